"""Layers of experts: for each token a router chooses a few of many gated MLPs.

    x (tokens, width)           the router gives each token per_token experts and their weights
    tokens * per_token rows     sorted by expert; up: one product a group of rows, an activation,
                                down: one product a group
    back in order of tokens     weighted and added, from the best expert of a token to its last

What multiplies the groups:

    inside `fuse_experts`       a launch with gate, up and activation, one with down, one with the
                                sum (kernels/llm/fused_moe.py): fp16, bf16, fp32 on a GPU with
                                Triton, without gradients and compilers
    bf16 on Hopper, Blackwell   torch's grouped product, without gradients: the sizes of the groups
                                stay on the device
    all else                    a product for each expert with rows; on a GPU the host waits for the
                                sizes once a layer

A CUDA graph can hold the first two.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onchip.core.device import device_info
from onchip.core.problem import UnsupportedError
from onchip.models.config import ModelConfig
from onchip.models.layer_config import Experts
from onchip.models.linear import Linear, ParameterFactory
from onchip.models.pointwise import clamped_swiglu, fused, gated_activation
from onchip.models.reproducible import in_whole_vectors, is_reproducible, multiply
from onchip.models.routing import Routing, route

_ALIGNED = 8  # torch's grouped product reads rows of bf16 at multiples of 16 bytes
_is_fused: ContextVar[bool] = ContextVar("onchip_fused_experts", default=False)


@contextmanager
def fuse_experts(enabled: bool = True) -> Iterator[None]:
    """Inside, in this thread, layers of experts are fused kernels where these serve them."""
    token = _is_fused.set(enabled)
    try:
        yield
    finally:
        _is_fused.reset(token)


def find_kernel(x: Tensor, *weights: Tensor) -> ModuleType | None:
    """The module with the fused kernels; None if torch's products must run."""
    if not _is_fused.get() or not all(weight.is_contiguous() for weight in weights):
        return None
    if fused(x, *weights) is None:
        return None
    from onchip.kernels.llm import fused_moe

    return fused_moe


def can_fuse(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused kernels serve inference on this device, inside `fuse_experts`."""
    served = dtype in (torch.float16, torch.bfloat16, torch.float32)
    return served and device.type == "cuda" and device_info(device).has_triton


class RowGroups(NamedTuple):
    """Rows sorted by expert. choices: of each row, token * per_token + i if it is for the i-th
    expert of that token, int64 (rows,). experts: of each row, int64 (rows,). ends: of the rows of
    each expert, int32 (num_experts,). sizes: how many rows each expert has; None if the host has
    not read them.
    """

    choices: Tensor
    experts: Tensor
    ends: Tensor
    sizes: list[int] | None


def group_rows(experts: Tensor, num_experts: int, reads_sizes: bool = True) -> RowGroups:
    """The rows of these experts (tokens, per_token). Rows of an expert are in the order of their
    tokens.
    """
    ordered, choices = experts.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, device=experts.device)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    if not reads_sizes:
        return RowGroups(choices, ordered, ends, None)
    if experts.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a CUDA graph cannot hold this layer of experts: the host reads how many tokens each"
            " has, except in bf16 on a GPU of capability 9 or 10 or with fused experts, without"
            " gradients"
        )
    return RowGroups(choices, ordered, ends, ends.diff(prepend=ends.new_zeros(1)).tolist())


def take_rows(x: Tensor, groups: RowGroups, per_token: int) -> Tensor:
    """The rows of all groups, from x (tokens, width)."""
    # Indexed as (token, i), each element occurs once, so its gradients are added in a fixed order.
    token, i = groups.choices // per_token, groups.choices % per_token
    return x[:, None].expand(-1, per_token, -1)[token, i]


def has_grouped_product(device: torch.device, dtype: torch.dtype, inner: int) -> bool:
    """Whether torch multiplies groups without their sizes on the host, with rows of `inner`
    numbers: elsewhere its grouped product reads the sizes there.
    """
    if device.type != "cuda" or dtype != torch.bfloat16 or inner % _ALIGNED:
        return False
    capability = device_info(device).capability
    return capability is not None and capability[0] in (9, 10)


def multiply_groups(
    rows: Tensor, weight: Tensor, groups: RowGroups, bias: Tensor | None = None
) -> Tensor:
    """rows @ matrix.T + bias with the matrix and the bias of each row's expert; weight (num_experts
    * outer, inner), bias (num_experts * outer,).
    """
    count = len(groups.ends)
    matrices = weight.unflatten(0, (count, -1))
    biases = None if bias is None else bias.unflatten(0, (count, -1))
    if groups.sizes is None:
        out = F.grouped_mm(rows, matrices.transpose(1, 2), offs=groups.ends)
        return out if biases is None else out + biases[groups.experts]
    each = [None] * count if biases is None else biases.unbind()
    parts = zip(rows.split(groups.sizes), matrices.unbind(), each, strict=True)
    needs_all = len(rows) == 0  # of no rows, every product is empty
    linear = multiply if is_reproducible() else F.linear
    return torch.cat([linear(*part) for part in parts if needs_all or len(part[0])])


def combine_rows(rows: Tensor, groups: RowGroups, routing: Routing) -> Tensor:
    """(tokens, width): the weighted sum of each token's rows, in fp32 and rounded once."""
    by_token = torch.empty_like(rows).index_copy(0, groups.choices, rows)
    weighted = by_token.unflatten(0, routing.experts.shape) * routing.weights[..., None]
    return weighted.sum(1).to(rows.dtype)


class ExpertsUp(nn.Module):
    """Gate and up of all experts. The weight holds the rows of gate, then up, of expert 0, then
    of expert 1, and so on; the bias their elements.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, width: int, experts: Experts, factory: ParameterFactory):
        super().__init__()
        rows = experts.num_experts * 2 * experts.intermediate_size
        self.weight = factory.empty(rows, width)
        self.bias = factory.empty(rows) if experts.has_bias else None

    def forward(self, rows: Tensor, groups: RowGroups) -> Tensor:
        return multiply_groups(rows, self.weight, groups, self.bias)


class ExpertsDown(nn.Module):
    """The second product of all experts, and the sum over the experts of a token; `shared` is added
    to it, so that ranks of tensor parallelism sum both at once. The weight holds the rows of expert
    0, then of expert 1, and so on; the bias their elements.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, width: int, experts: Experts, factory: ParameterFactory):
        super().__init__()
        self.weight = factory.empty(experts.num_experts * width, experts.intermediate_size)
        self.bias = factory.empty(experts.num_experts * width) if experts.has_bias else None

    def forward(
        self,
        rows: Tensor,
        groups: Any,
        routing: Routing,
        shared: Tensor | None,
        kernel: ModuleType | None = None,
    ) -> Tensor:
        """groups: RowGroups, or the RowTiles of a fused kernel."""
        if kernel is not None:
            return kernel.down(rows, self.weight, self.bias, groups, routing.weights, shared)
        rows = multiply_groups(rows, self.weight, groups, self.bias)
        out = combine_rows(rows, groups, routing)
        return out if shared is None else out + shared


class SharedExpert(nn.Module):
    """An expert for all tokens; in some families times the sigmoid of a gate, one a token."""

    gate: Linear | None
    up: Linear
    down: Linear

    def __init__(self, config: ModelConfig, inner: int, gated: bool, factory: ParameterFactory):
        super().__init__()
        width, self.activation = config.hidden_size, config.activation
        self.gate = Linear(width, 1, False, factory) if gated else None
        self.up = Linear(width, 2 * inner, False, factory)
        self.down = Linear(inner, width, False, factory)

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(gated_activation(self.up(x), self.activation))
        if self.gate is None:
            return out
        return in_whole_vectors(torch.sigmoid, self.gate(x)) * out


class SparseMLP(nn.Module):
    """The experts of a layer and their router."""

    shared: SharedExpert | None
    router: Linear
    choice_bias: nn.Parameter | None
    up: ExpertsUp
    down: ExpertsDown
    record: list[Routing] | None  # every routing is appended to it

    def __init__(self, config: ModelConfig, experts: Experts, factory: ParameterFactory):
        super().__init__()
        width, count = config.hidden_size, experts.num_experts
        self.experts, self.activation = experts, config.activation
        shared = experts.shared_size, experts.has_shared_gate
        self.shared = None if shared[0] is None else SharedExpert(config, *shared, factory)
        routing = factory if experts.groups is None else factory.wide()
        self.router = Linear(width, count, experts.has_bias, routing)
        self.choice_bias = routing.empty(count) if experts.has_choice_bias else None
        if self.choice_bias is not None:  # it decides, and weighs nothing: no gradient reaches it
            self.choice_bias.requires_grad = False
        self.up = ExpertsUp(width, experts, factory)
        self.down = ExpertsDown(width, experts, factory)
        self.record = None

    @property
    def idle_weights(self) -> int:
        """The number of weights that a token does not need: of other experts."""
        count, per_token = self.experts.num_experts, self.experts.per_token
        weights = (*self.up.parameters(), *self.down.parameters())
        return sum(weight.numel() for weight in weights) // count * (count - per_token)

    @property
    def is_recordable(self) -> bool:
        """Whether a CUDA graph can hold this layer, inside `fuse_experts` or outside of it."""
        weight = self.up.weight
        return (_is_fused.get() and can_fuse(weight.device, weight.dtype)) or self.is_grouped

    @property
    def is_grouped(self) -> bool:
        """Whether both products are torch's grouped ones."""
        weights = self.up.weight, self.down.weight
        return all(has_grouped_product(w.device, w.dtype, w.shape[1]) for w in weights)

    def forward(self, x: Tensor) -> Tensor:
        tokens, experts = x.flatten(0, -2), self.experts
        if experts.router_jitter_noise and torch.is_grad_enabled():
            raise UnsupportedError(
                f"router_jitter_noise={experts.router_jitter_noise} changes training, and is not"
                " served: compute without gradients, or set it to 0"
            )
        routing = route(self._logits(tokens), experts, self.choice_bias)
        if self.record is not None:
            self.record.append(routing)
        shared = None if self.shared is None else self.shared(tokens)
        if kernel := find_kernel(tokens, self.up.weight, self.down.weight):
            tiles = kernel.group_rows(routing.experts, experts.num_experts, tokens.element_size())
            up = self.up.weight, self.up.bias, tiles, self.activation, experts.swiglu
            out = self.down(kernel.up(tokens, *up), tiles, routing, shared, kernel)
        else:
            reads_sizes = torch.is_grad_enabled() or not self.is_grouped
            groups = group_rows(routing.experts, experts.num_experts, reads_sizes)
            inner = self.up(take_rows(tokens, groups, experts.per_token), groups)
            out = self.down(self._activate(inner), groups, routing, shared)
        return out.unflatten(0, x.shape[:-1])

    def _logits(self, tokens: Tensor) -> Tensor:
        """Of all experts. DeepSeek's router computes them in fp32."""
        if self.experts.groups is None:
            return self.router(tokens)
        weight = self.router.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        return F.linear(tokens.to(wide), weight.to(wide))

    def _activate(self, x: Tensor) -> Tensor:
        swiglu = self.experts.swiglu
        if swiglu is None:
            return gated_activation(x, self.activation)
        return clamped_swiglu(x, *swiglu)
