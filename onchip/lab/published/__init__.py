"""The published algorithms as running code, with an exact account of memory traffic. Tensors are in
HBM, tiles are loaded to the chip and stored back, and a ledger counts every byte that crosses and
every operation in between.

    from onchip.lab.published import ledger

    with ledger(sram=51_200) as book:      # M, in elements of the inputs
        out = onchip.attention(q, k, v, kernel="paper_v1")
    print(book)

Each function is the published algorithm with the published names, for all heads of a batch at
once; a ledger holds the sum over them. `onchip.lab.traffic` predicts ledgers without running.

Importing this package registers the backends paper_v0, paper_v1, paper_v2 and paper_v4, by the same
call as a third party's (docs/adding_a_backend.md). `import onchip.lab` imports it.
"""

from onchip.core.dispatch import register_backend

from . import v0, v1, v2, v4
from .ledger import Ledger, TileVisit, ledger

__all__ = ["Ledger", "TileVisit", "ledger"]

register_backend("paper_v0", v0.backend)
register_backend("paper_v1", v1.backend)
register_backend("paper_v2", v2.backend)
register_backend("paper_v4", v4.backend)
