"""Pages of 8 bits for tests: of any keys, and of keys that 8 bits hold exactly, so that the
accuracy rule of 16-bit calls judges 8-bit ones too.
"""

import torch
from torch import Tensor

from onchip.eightbit import LARGEST, held, quantise, widened

FORMS = list(LARGEST)


def on_grid(x: Tensor, form: torch.dtype) -> Tensor:
    """`held`, and it is."""
    y = held(x, form)
    values, scales = quantise(y, form)
    assert torch.equal(widened(values, torch.float32) * scales[..., None], y.float())
    return y


def quantise_pages(
    k_pages: Tensor, v_pages: Tensor, form: torch.dtype
) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """The same pages quantised, and their scales: NaN where pages hold NaN."""
    (k, k_scales), (v, v_scales) = (quantise(t, form) for t in (k_pages, v_pages))
    return (k, v), {"k_scales": k_scales, "v_scales": v_scales}
