"""One call of a model's layer: its tensors, its visible keys, and onchip's way to compute it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import onchip
from benchmarks.model_shapes import CallShape, ModelLayer
from benchmarks.video import mask_mod
from onchip.cli.bench.gpu import Inputs
from onchip.cli.bench.harness import Case
from onchip.cli.bench.paged import in_pages
from onchip.cli.bench.patterns import document_ends
from onchip.cli.bench.peers import Attend, Lengths
from onchip.cli.bench.scores import Scores
from onchip.core.explain import Explanation
from onchip.cost import roofline

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class ModelCall:
    """layer.calls has call; `without_window` has one of its own."""

    layer: ModelLayer
    call: CallShape
    device: torch.device

    @property
    def case(self) -> Case:
        layer, call = self.layer, self.call
        sizes = (layer.head_dim, call.seqlen_q, call.batch, layer.num_heads)
        return Case(
            "models",
            self.mask_name,
            DTYPE,
            *sizes,
            backward=self.backward,
            way=call.way,
            num_kv_heads=layer.num_kv_heads,
            head_dim_v=layer.head_dim_v,
            seqlen_k=call.keys,
        )

    @property
    def backward(self) -> bool:
        return self.call.way == "backward"

    @property
    def mask_name(self) -> str:
        if self.layer.video is not None:
            return self.layer.video.name
        if self.call.documents:
            return f"{self.call.documents} documents"
        if self.layer.window is not None:
            return f"window {self.layer.window}"
        return "causal" if self.is_causal else "none"

    @property
    def is_causal(self) -> bool:
        """One query over all keys sees the same keys with and without a causal mask."""
        return self.layer.causal and self.call.seqlen_q > 1

    @cached_property
    def lengths(self) -> Lengths | None:
        """Of packed sequences."""
        if not self.call.documents:
            return None
        ends = document_ends(self.call.seqlen_q, self.call.documents)
        return Lengths(ends.int().to(self.device), int(ends.diff().max()))

    @cached_property
    def scores(self) -> Scores:
        """bias and sinks are the same in every call: sinks are weights, and a bias larger than the
        L2 or used by the whole batch is read alike.
        """
        draw = lambda *shape: torch.randn(
            shape, generator=torch.Generator(self.device).manual_seed(1), device=self.device
        ).to(DTYPE)
        layer, call, bias, sinks = self.layer, self.call, None, None
        if layer.bias:
            batch = 1 if layer.bias == "shared" else call.batch
            bias = draw(batch, layer.num_heads, call.seqlen_q, call.keys)
            bias.requires_grad_(self.backward)
        if layer.has_sinks:
            sinks = draw(layer.num_heads).requires_grad_(self.backward)
        return Scores(layer.softmax_scale, layer.softcap, bias, sinks)

    @cached_property
    def mask_mod(self) -> Callable[..., Tensor]:
        """is_visible(b, h, q, k) by indices. It closes over numbers and tensors alone, so that
        FlexAttention can compile it.
        """
        if self.layer.video is not None:
            return mask_mod(self.layer.video)
        if self.lengths is not None:
            tokens = torch.arange(self.call.seqlen_q, device=self.device)
            ids = torch.bucketize(tokens, self.lengths.cu_seqlens[1:], right=True)
            return lambda b, h, q, k: ids[q] == ids[k]
        offset, window = self.call.keys - self.call.seqlen_q, self.layer.window
        if not self.layer.causal:
            return lambda b, h, q, k: (q >= 0) & (k >= 0)
        if window is None:
            return lambda b, h, q, k: q + offset >= k
        return lambda b, h, q, k: (q + offset >= k) & (q + offset - k < window)

    def visible(self, rows: Tensor) -> Tensor:
        keys = torch.arange(self.call.keys, device=rows.device)
        return self.mask_mod(None, None, rows[:, None], keys)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The keywords of onchip's functions."""
        options = dict(self.scores.options)
        if self.layer.video is not None:
            options["mask"] = self.layer.video.build(self.device)
        if self.layer.window is not None:
            options["window_size"] = (self.layer.window - 1, 0)
        return options | {"causal": self.layer.causal}

    @cached_property
    def packed(self) -> dict[str, Any]:
        """The arguments of varlen_attention besides q, k, v and options."""
        if self.lengths is None:
            return {}
        cu, longest = self.lengths
        ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        return ends | {"max_seqlen_q": longest, "max_seqlen_k": longest}

    @cached_property
    def cache_seqlens(self) -> Tensor:
        lengths = [self.call.keys] * self.call.batch
        return torch.tensor(lengths, dtype=torch.int32, device=self.device)

    def in_pages(self, inputs: Inputs) -> Inputs:
        """(q, pages of k and v, page_table)."""
        return in_pages(inputs, (self.call.keys,) * self.call.batch, self.call.page_size)

    def ours(self) -> Attend:
        """attend(q, k, v), over pages attend(q, pages, page_table)."""
        options = self.options
        if self.call.page_size:
            return lambda q, pages, table: onchip.paged_attention(
                q, pages[0], pages[1], table, self.cache_seqlens, **options
            )
        if self.packed:
            return lambda q, k, v: onchip.varlen_attention(
                q[0], k[0], v[0], **self.packed, **options
            )[None]
        return lambda q, k, v: onchip.attention(q, k, v, **options)

    def explain(self, inputs: tuple[Tensor, ...], on: str | None = None) -> Explanation:
        """inputs: a set that `ours` takes."""
        if self.call.page_size:
            q, pages, table = inputs
            cached = {"page_table": table, "cache_seqlens": self.cache_seqlens}
            return onchip.explain(q, *pages, **cached, **self.options, on=on)
        q, k, v = (x.detach().requires_grad_(self.backward) for x in inputs[:3])
        if self.packed:
            return onchip.explain(q[0], k[0], v[0], **self.packed, **self.options, on=on)
        return onchip.explain(q, k, v, **self.options, on=on)

    def least_seconds(self, explained: Explanation) -> float | None:
        """A lower bound by the rates of the device; None if they are unknown. A bias is read once,
        and its gradient written once.
        """
        if explained.hardware is None:
            return None
        problem, bias = explained.problem, self.scores.bias
        ratio = roofline.backward_ratio(problem) if self.backward else 1.0
        moved = explained.min_bytes + (0 if bias is None else bias.numel() * bias.element_size())
        moved *= 2 if self.backward else 1
        flops = round(ratio * explained.flops)
        return roofline.bound(problem, explained.hardware, flops, moved, ratio).seconds

    def without_window(self) -> tuple["ModelCall", Callable[[Tensor], Tensor]]:
        """The same step over the last keys alone, and the function that cuts keys and values: one
        query with a window sees no others, so that kernels without windows can decode.
        """
        window = self.layer.window
        if window is None or self.call.seqlen_q > 1:
            return self, lambda x: x
        call = self.call._replace(seqlen_k=min(window, self.call.keys))
        cut = lambda x: x[:, -window:]
        return replace(self, layer=self.layer._replace(window=None), call=call), cut
