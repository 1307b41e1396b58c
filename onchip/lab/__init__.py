"""The interactive page. `record` computes its data, `page` writes it as one file, `serve` serves it
on the loopback with the Python pool behind its playground.

`import onchip.lab` registers the kernels of the papers: kernel="paper_v1" and its siblings.
"""

import onchip.lab.published as _papers  # noqa: F401, registers the backends
