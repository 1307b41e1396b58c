"""8-bit pages for tests: of any keys, and of keys that 8 bits hold exactly, so that the accuracy
rule of 16-bit calls also applies to 8-bit ones.
"""

import torch
from torch import Tensor

from onchip.quant.kv8 import MAX_VALUES, quantise, snap_to_grid, widen

FORMS = list(MAX_VALUES)


def on_grid(x: Tensor, form: torch.dtype) -> Tensor:
    """snap_to_grid, after checking that the result quantises without loss."""
    y = snap_to_grid(x, form)
    values, scales = quantise(y, form)
    assert torch.equal(widen(values, torch.float32) * scales[..., None], y.float())
    return y


def quantise_pages(
    k_pages: Tensor, v_pages: Tensor, form: torch.dtype
) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """The quantised pages and their scales: NaN for pages that hold NaN."""
    (k, k_scales), (v, v_scales) = (quantise(t, form) for t in (k_pages, v_pages))
    return (k, v), {"k_scales": k_scales, "v_scales": v_scales}
