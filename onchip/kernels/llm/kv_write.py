"""Write new keys and values into their slots of the paged cache, quantised if pages are 8-bit, and
copy whole pages, in Triton.

    write_kernel   one program per token:   k, v (all kv heads) -> page slot // page_size,
                                            position slot % page_size [quantised + scale]
    copy_kernel    one program per TILE elements of (layer, pair): page source -> page target

Slots and page ids out of range write nothing: callers pass -1 to skip a token.

Worked shape: batch 1, 300 new tokens, pages of 16: 300 programs; token 299 is written to slot
block_table[18] * 16 + 11. Not an attention kernel: no teaching version; docs/paged.md describes the
layout.
"""

import triton
import triton.language as tl
from torch import Tensor

from onchip.core.backend import scale_strides
from onchip.kernels.runtime.launcher import CachedLauncher, on_device
from onchip.kernels.tiles import COPY_ELEMENTS, TRITON_STREAMED
from onchip.kernels.triton.kv8 import compute_scale, quantise
from onchip.kernels.triton.launch import launch_options, make_contiguous


@triton.jit(do_not_specialize=("num_slots",))
def write_kernel(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, slots_ptr,
    stride_ks, stride_kh, stride_vs, stride_vh, stride_kp, stride_kps, stride_kph, stride_vp,
    stride_vps, stride_vph, stride_ksp, stride_kss, stride_ksh, stride_vsp, stride_vss, stride_vsh,
    num_slots, page_size, num_kv_heads,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PAD_HEADS: tl.constexpr,
    PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """Write the key and the value of one token, all kv heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    page, place = slot // page_size, slot % page_size
    k_pages_ptr += page * stride_kp + place * stride_kps
    v_pages_ptr += page * stride_vp + place * stride_vps
    if k_scales_ptr is not None:
        k_scales_ptr += page * stride_ksp + place * stride_kss
        v_scales_ptr += page * stride_vsp + place * stride_vss
    _copy_token(
        k_ptr + token * stride_ks, k_pages_ptr, k_scales_ptr, stride_kh, stride_kph, stride_ksh,
        num_kv_heads, HEAD_DIM, PAD_HEADS, PAD_DIM,
    )  # fmt: skip
    _copy_token(
        v_ptr + token * stride_vs, v_pages_ptr, v_scales_ptr, stride_vh, stride_vph, stride_vsh,
        num_kv_heads, HEAD_DIM_V, PAD_HEADS, PAD_DIM_V,
    )  # fmt: skip


@triton.jit
def _copy_token(
    source, target, scales, stride_source, stride_target, stride_scales, num_heads,
    DIM: tl.constexpr, PAD_HEADS: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    head, dims = tl.arange(0, PAD_HEADS), tl.arange(0, PAD)[None, :]
    heads = head.to(tl.int64)[:, None]
    inside = (heads < num_heads) & (dims < DIM)
    x = tl.load(source + heads * stride_source + dims, mask=inside, other=0.0)
    if scales is not None:
        x = x.to(tl.float32)
        scale = compute_scale(tl.max(tl.abs(x), 1), tl.sum(x * 0.0, 1), target.dtype.element_ty)
        tl.store(scales + head.to(tl.int64) * stride_scales, scale, mask=head < num_heads)
        x = quantise(x, scale[:, None], target.dtype.element_ty)
    tl.store(target + heads * stride_target + dims, x, mask=inside)


@triton.jit(do_not_specialize=("num_pages", "num_pairs"))
def copy_kernel(
    pages_ptr, pairs_ptr, stride_layer, stride_page, num_pages, num_pairs, num_tiles, page_elements,
    TILE: tl.constexpr,
):  # fmt: skip
    """Copy TILE elements of one page of one layer to another page of that layer."""
    pid = tl.program_id(0)
    tile, pair = pid % num_tiles, pid // num_tiles % num_pairs
    layer = (pid // num_tiles // num_pairs).to(tl.int64)
    source, target = tl.load(pairs_ptr + 2 * pair), tl.load(pairs_ptr + 2 * pair + 1)
    exist = (source >= 0) & (source < num_pages) & (target >= 0) & (target < num_pages)
    if exist == 0:
        return
    pages_ptr += layer * stride_layer
    element = tile * TILE + tl.arange(0, TILE)
    inside = element < page_elements
    x = tl.load(pages_ptr + source.to(tl.int64) * stride_page + element, mask=inside)
    tl.store(pages_ptr + target.to(tl.int64) * stride_page + element, x, mask=inside)


_write_kernel = CachedLauncher(write_kernel)
_copy_kernel = CachedLauncher(copy_kernel)


def write(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write k (tokens, num_kv_heads, head_dim) and v (tokens, num_kv_heads, head_dim_v) into the
    slots of slot_mapping, int (tokens,): slot = page * page_size + position in the page. A slot out
    of range, like -1, writes nothing. Two tokens must not share a slot. Any strides, last dimension
    contiguous. 8-bit pages have scales, (num_pages, page_size, num_kv_heads), and receive
    onchip.quant.kv8.quantise(k) and (v).
    """
    if not k.numel():
        return
    num_pages, page_size, num_kv_heads, head_dim = k_pages.shape
    head_dim_v = v_pages.shape[-1]
    pad = triton.next_power_of_2
    with on_device(k):
        _write_kernel[(k.shape[0],)](
            k, v, k_pages, v_pages, k_scales, v_scales, make_contiguous(slot_mapping),
            *k.stride()[:2], *v.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3],
            *scale_strides(k_scales), *scale_strides(v_scales),
            num_pages * page_size, page_size, num_kv_heads,
            head_dim, head_dim_v, pad(num_kv_heads), pad(head_dim), pad(head_dim_v),
            **launch_options(TRITON_STREAMED),
        )  # fmt: skip


def copy_pages(pages: Tensor, pairs: Tensor) -> None:
    """Copy page pairs[i, 0] to page pairs[i, 1], for all i at once, in every layer.

    pages: (num_layers, num_pages, ...), each page of a layer contiguous; pairs: int (n, 2). A pair
    out of range copies nothing. No page may be the target of two pairs, nor the target of one and
    the source of another.
    """
    if not pairs.numel() or not pages.numel():
        return
    elements = pages[0, 0].numel()
    if not pages[0, 0].is_contiguous():
        raise ValueError(f"pages must be contiguous one by one, got strides {pages.stride()}")
    num_tiles = triton.cdiv(elements, COPY_ELEMENTS)
    with on_device(pages):
        _copy_kernel[(num_tiles * pairs.shape[0] * pages.shape[0],)](
            pages, make_contiguous(pairs), *pages.stride()[:2],
            pages.shape[1], pairs.shape[0], num_tiles, elements,
            TILE=COPY_ELEMENTS, **launch_options(TRITON_STREAMED),
        )  # fmt: skip
