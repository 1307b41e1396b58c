"""The tensors of the cache: keys and values of every layer in pages, with scales if pages are int8
or fp8.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TypedDict

import torch
from torch import Tensor

from onchip.core.device import device_info
from onchip.core.problem import DTYPES, UnsupportedError, check_head_dims
from onchip.core.values import checks
from onchip.kvcache.pool import Copy, Pool
from onchip.quant.kv8 import MAX_VALUES, SCALE_BYTES, parse_kv_dtype, quantise

MAX_PAGE_SIZE = 256


class LayerScales(TypedDict, total=False):
    """The scales of the pages of one layer; empty unless pages are quantised."""

    k_scales: Tensor
    v_scales: Tensor


@dataclass(frozen=True)
class Spec:
    """The contents of one page: page_size tokens of num_layers layers, num_kv_heads heads each,
    keys of head_dim and values of head_dim_v (default: head_dim). dtype: of the keys and values
    that are written. kv_dtype: the dtype in pages, torch.int8 or torch.float8_e4m3fn with a scale
    for each token and head, or None for dtype itself. latent: the values are the first `latent`
    columns of the keys (multi-head latent attention), so pages hold keys alone; 0: they are not.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int = 0
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | str = "cpu"
    kv_dtype: torch.dtype | None = None
    latent: int = 0

    def __post_init__(self) -> None:
        head_dim_v = self.head_dim_v or self.latent or self.head_dim
        object.__setattr__(self, "head_dim_v", head_dim_v)
        object.__setattr__(self, "device", torch.device(self.device))
        for name in ("num_layers", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        check_head_dims(self.head_dim, self.head_dim_v)
        if self.latent and not self.latent == self.head_dim_v <= self.head_dim:
            raise ValueError(
                f"latent={self.latent} must be head_dim_v={self.head_dim_v}, and at most"
                f" head_dim={self.head_dim}"
            )
        if not 1 <= self.page_size <= MAX_PAGE_SIZE or self.page_size & (self.page_size - 1):
            raise ValueError(
                f"page_size={self.page_size} must be a power of two up to {MAX_PAGE_SIZE}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype} is not one of {', '.join(map(str, DTYPES))}")
        if self.kv_dtype is not None and self.kv_dtype not in MAX_VALUES:
            formats = ", ".join(map(str, MAX_VALUES))
            raise ValueError(f"kv_dtype {self.kv_dtype} is not one of {formats}, None")
        if self.kv_dtype == torch.int8 and 0 < self.latent < self.head_dim:
            raise UnsupportedError(
                f"int8 pages of latents are not served: a key has one scale, so if its last"
                f" {self.head_dim - self.latent} columns are larger than its latent, few levels"
                " remain for the latent; use fp8, whose steps are relative, or 16 bits"
            )

    def stored_as(self, name: str | None) -> "Spec":
        """This spec with pages of kv_dtype "fp8", "int8", or None for dtype."""
        return replace(self, kv_dtype=parse_kv_dtype(name))

    @property
    def k_page(self) -> tuple[int, int, int, int]:
        """The keys of one page: (num_layers, page_size, num_kv_heads, head_dim)."""
        return (self.num_layers, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def v_page(self) -> tuple[int, int, int, int]:
        return (self.num_layers, self.page_size, self.num_kv_heads, self.head_dim_v)

    @property
    def page_elements(self) -> int:
        """Keys and values of one page, all layers."""
        return math.prod(self.k_page) + (0 if self.latent else math.prod(self.v_page))

    @property
    def scales_page(self) -> tuple[int, int, int]:
        """The scales of the keys (or values) of one page: (num_layers, num_kv_heads, page_size).
        The scales of a head are contiguous, because a kernel reads all of them together.
        """
        return (self.num_layers, self.num_kv_heads, self.page_size)

    @property
    def page_bytes(self) -> int:
        if self.kv_dtype is None:
            return self.page_elements * self.dtype.itemsize
        scales = (1 if self.latent else 2) * math.prod(self.scales_page)
        return self.page_elements * self.kv_dtype.itemsize + scales * SCALE_BYTES

    def pages_in(self, num_bytes: int) -> int:
        """How many pages fit into num_bytes: the num_pages of a cache of that size."""
        return num_bytes // self.page_bytes


class PageTensors:
    """k: (num_layers, num_pages, page_size, num_kv_heads, head_dim); v: the same, head_dim_v.
    k_scales, v_scales: (num_layers, num_pages, num_kv_heads, page_size), None unless quantised.
    Of latent pages v is a view of k, and v_scales is k_scales.

    The memory is never cleared, neither on allocation nor when a page is freed. Slots behind a
    sequence's length and free pages hold arbitrary values, NaN included; no kernel reads them.
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None

    def __init__(self, spec: Spec, pool: Pool):
        if pool.num_pages * spec.page_size >= 2**31:
            raise ValueError(
                f"num_pages={pool.num_pages} of page_size={spec.page_size}: slots do not fit into"
                " int32"
            )
        self.spec = spec
        self.pool = pool
        stored, shapes = spec.kv_dtype or spec.dtype, (spec.k_page, spec.v_page)
        held = shapes[:1] if spec.latent else shapes
        self._tokens = [self._empty(shape, stored) for shape in held]
        quantised = held if spec.kv_dtype is not None else ()
        self._scales = [self._empty(spec.scales_page, torch.float32) for _ in quantised]
        self.k, self.v = self._tokens[0], self._tokens[-1][..., : spec.head_dim_v]
        self.k_scales = self._scales[0] if quantised else None
        self.v_scales = self._scales[-1] if quantised else None

    def _empty(self, page: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """(num_layers, num_pages, ...), not cleared."""
        shape = page[0], self.pool.num_pages, *page[1:]
        return torch.empty(shape, dtype=dtype, device=self.spec.device)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the pages, each (num_layers, num_pages, ...): they are copied and moved
        together. e4m3 is viewed as int8, because torch cannot index float8.
        """
        return [*self._indexable_tokens(), *self._scales]

    def _indexable_tokens(self) -> list[Tensor]:
        is_float8 = self.k.dtype == torch.float8_e4m3fn
        return [t.view(torch.int8) if is_float8 else t for t in self._tokens]

    def release_memory(self) -> None:
        """Free the memory of all pages. No page may be in use until `take_memory`."""
        self._resize(0)

    def take_memory(self) -> None:
        """Allocate the memory of all pages again, for the same tensors and their views."""
        self._resize(1)

    def check_memory(self) -> None:
        if not self.k.untyped_storage().nbytes():
            raise ValueError("the memory of the pages was released: take_memory() comes first")

    def _resize(self, factor: int) -> None:
        for t in (*self._tokens, *self._scales):
            t.untyped_storage().resize_(factor * t.numel() * t.itemsize)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(k_pages, v_pages) of one layer, as paged_attention takes them."""
        self.check_memory()
        if not 0 <= layer < self.spec.num_layers:
            raise ValueError(f"{layer=} must lie in [0, num_layers={self.spec.num_layers})")
        return self.k[layer], self.v[layer]

    def scales(self, layer: int) -> LayerScales:
        """k_scales and v_scales of one layer, as paged_attention takes them; empty unless pages are
        quantised.
        """
        if self.k_scales is None or self.v_scales is None:
            return {}
        self.layer(layer)
        return {
            "k_scales": self.k_scales[layer].transpose(1, 2),
            "v_scales": self.v_scales[layer].transpose(1, 2),
        }

    def write(self, layer: int, k: Tensor, v: Tensor | None, slot_mapping: Tensor) -> None:
        """Write k (tokens, num_kv_heads, head_dim) and v (tokens, num_kv_heads, head_dim_v) to the
        slots of slot_mapping, int32 (tokens,): page * page_size + offset, -1 writes nothing. int8
        and fp8 pages quantise them. v is None for latent pages.
        """
        pages, scales = self.layer(layer), tuple(self.scales(layer).values())
        self._check_write(k, v, slot_mapping)
        if slot_mapping.device.type == "cpu" or checks.enabled:
            self._check_slots(slot_mapping)
        if v is None:
            _scatter((k,), pages[:1], scales[:1], slot_mapping)
        elif kernel := _kernel(k.device):
            k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))
            kernel.write(k, v, *pages, slot_mapping, *scales)
        else:
            _scatter((k, v), pages, scales, slot_mapping)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy pages in all layers at once. No target is listed twice, and no target is also a
        source: the pool copies only to pages that it has just taken.
        """
        if not copies:
            return
        pairs = to_device(torch.tensor(copies), self.k.device)
        for pages in self.tensors:
            if kernel := _kernel(pages.device):
                kernel.copy_pages(pages, pairs)
            else:
                source, target = pairs.unbind(1)
                pages.index_copy_(1, target, pages.index_select(1, source))

    def move_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots (source, target) in all layers at once, as if all were read before any is
        written.
        """
        moved = to_device(torch.tensor(pairs), self.k.device)
        size = self.spec.page_size
        (source, target), (at, to) = (moved // size).unbind(1), (moved % size).unbind(1)
        for tokens in self._indexable_tokens():
            tokens[:, target, to] = tokens[:, source, at]
        for scales in self._scales:
            scales[:, target, :, to] = scales[:, source, :, at]

    def _check_write(self, k: Tensor, v: Tensor | None, slot_mapping: Tensor) -> None:
        spec, count = self.spec, slot_mapping.shape[0] if slot_mapping.dim() == 1 else -1
        if (v is None) != bool(spec.latent):
            kind = "hold no values: v must be None" if spec.latent else "hold values: v is None"
            raise ValueError(f"pages of {spec.latent=} {kind}")
        written = (("k", k, spec.head_dim), ("v", v, spec.head_dim_v))
        for name, t, dim in written[: 1 if v is None else 2]:
            shape = (count, spec.num_kv_heads, dim)
            if tuple(t.shape) != shape or t.dtype != spec.dtype or t.device != self.k.device:
                raise ValueError(
                    f"{name} must be {shape} {spec.dtype} on {self.k.device} for slot_mapping"
                    f" {tuple(slot_mapping.shape)}, got {tuple(t.shape)} {t.dtype} on {t.device}"
                )
        if slot_mapping.dtype != torch.int32 or slot_mapping.device != self.k.device:
            got = f"{slot_mapping.dtype} on {slot_mapping.device}"
            raise ValueError(f"slot_mapping must be torch.int32 on {self.k.device}, got {got}")

    def _check_slots(self, slot_mapping: Tensor) -> None:
        """Raise ValueError unless exactly one table holds each page that is written."""
        slots = slot_mapping[slot_mapping != -1]
        for page in (slots // self.spec.page_size).unique_consecutive().tolist():
            if not 0 < page < self.pool.num_pages:
                raise ValueError(
                    f"slot_mapping points to page {page}, pages are 1 to {self.pool.capacity}"
                )
            if (refs := self.pool.refs(page)) != 1:
                raise ValueError(f"slot_mapping points to page {page}, which {refs} tables hold")


def _scatter(
    tokens: Sequence[Tensor],
    pages: Sequence[Tensor],
    scales: Sequence[Tensor],
    slot_mapping: Tensor,
) -> None:
    """Write tokens to pages with torch operations. scales: of the pages, none unless quantised."""
    slots = slot_mapping.long().clamp(min=0)  # -1 is written to the null page, which is never read
    if not scales:
        for new, target in zip(tokens, pages, strict=True):
            target.flatten(0, 1).index_copy_(0, slots, new)
        return
    at = slots // pages[0].shape[1], slots % pages[0].shape[1]
    for new, target, its_scales in zip(tokens, pages, scales, strict=True):
        target[at], its_scales[at] = quantise(new, target.dtype)


def _kernel(device: torch.device) -> ModuleType | None:
    """The Triton module that writes and copies in one launch; None without Triton."""
    if device.type != "cuda" or not device_info(device).has_triton:
        return None
    from onchip.kernels.llm import kv_write

    return kv_write


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to the device without blocking the host."""
    return t if device.type == "cpu" else t.pin_memory().to(device, non_blocking=True)
