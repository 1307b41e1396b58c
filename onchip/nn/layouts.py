"""State dicts of attention layers in the layouts of torch and transformers, read and written.

A layout names the tensors of q, k and v, and those of the output. One name for q, k and v is a
fused tensor, with the rows of q, then k, then v.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import UnsupportedError

OURS = ("q_proj", "k_proj", "v_proj")


class WeightLayout(NamedTuple):
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    out: str
    transposed: bool = False  # weights are (in, out): Conv1D of transformers
    interleaved: bool = False  # rows are (head, q or k or v, head_dim)
    ignored: tuple[str, ...] = ()  # buffers of older checkpoints: causal masks, frequencies


def _modules(*names: str, out: str, **options) -> WeightLayout:
    weights, biases = (tuple(f"{name}.{kind}" for name in names) for kind in ("weight", "bias"))
    return WeightLayout(weights, biases, out, **options)


_SEPARATE = tuple(f"{name}_weight" for name in OURS)  # torch's, if kdim or vdim differ
LAYOUTS = {
    "onchip": _modules(*OURS, out="out_proj"),
    "torch": WeightLayout(("in_proj_weight",), ("in_proj_bias",), "out_proj"),
    "torch_kdim": WeightLayout(_SEPARATE, ("in_proj_bias",), "out_proj"),
    "llama": _modules(*OURS, out="o_proj", ignored=("rotary_emb.inv_freq",)),
    "phi3": _modules("qkv_proj", out="o_proj"),
    "gpt2": _modules("c_attn", out="c_proj", transposed=True, ignored=("bias", "masked_bias")),
    "gpt_neox": _modules(
        "query_key_value",
        out="dense",
        interleaved=True,
        ignored=("bias", "masked_bias", "rotary_emb.inv_freq"),
    ),
}


class ProjectionSizes(NamedTuple):
    """The rows of the weights of q, k and v, and of one head."""

    rows: tuple[int, int, int]
    head_dim: int


def find(names: Collection[str]) -> str | None:
    """The layout that has these names, or None."""
    for name, layout in LAYOUTS.items():
        if {*layout.weights, f"{layout.out}.weight"} <= set(names):
            return name
    return None


def translate(state: dict[str, Any], prefix: str, sizes: ProjectionSizes) -> None:
    """Replace the tensors of one layer, whose names begin with prefix, by those that
    MultiheadAttention has. Names of no layout are left for load_state_dict to report.
    """
    own = {name.removeprefix(prefix): name for name in state if name.startswith(prefix)}
    if "bias_k" in own:
        raise UnsupportedError(f"{own['bias_k']}: add_bias_kv is not served")
    layout = find(own)
    if layout is not None and layout != "onchip":
        tensors = {name: state.pop(full) for name, full in own.items()}
        state.update((prefix + name, t) for name, t in read(tensors, layout, sizes).items())


def read(state: Mapping[str, Tensor], layout: str, sizes: ProjectionSizes) -> dict[str, Tensor]:
    """A state dict of a layout, with the names of MultiheadAttention. Tensors that the layout does
    not name are passed on.
    """
    source = LAYOUTS[layout]
    state = {name: t for name, t in state.items() if name not in source.ignored}
    result: dict[str, Tensor] = {}
    for kind, names in (("weight", source.weights), ("bias", source.biases)):
        tensors = [state.pop(name) for name in names if name in state]
        for name, t in zip(OURS, _split(tensors, names, kind, source, sizes), strict=False):
            result[f"{name}.{kind}"] = t
        if (out := state.pop(f"{source.out}.{kind}", None)) is not None:
            result[f"out_proj.{kind}"] = out.T if source.transposed and kind == "weight" else out
    return result | state


def write(state: Mapping[str, Tensor], layout: str, sizes: ProjectionSizes) -> dict[str, Tensor]:
    """The inverse of `read`."""
    target, rest = LAYOUTS[layout], dict(state)
    result: dict[str, Tensor] = {}
    for kind, names in (("weight", target.weights), ("bias", target.biases)):
        tensors = [rest.pop(f"{n}.{kind}") for n in OURS if f"{n}.{kind}" in rest]
        if tensors:
            result |= dict(zip(names, _join(tensors, names, kind, target, sizes), strict=True))
        if (out := rest.pop(f"out_proj.{kind}", None)) is not None:
            is_transposed = target.transposed and kind == "weight"
            result[f"{target.out}.{kind}"] = out.T.contiguous() if is_transposed else out
    return result | rest


def _split(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    kind: str,
    layout: WeightLayout,
    sizes: ProjectionSizes,
) -> Iterator[Tensor]:
    """Weights, or biases, of q, k and v."""
    if len(names) == 3 or not tensors:
        yield from tensors
        return
    fused = tensors[0].T if layout.transposed and kind == "weight" else tensors[0]
    if len(fused) != sum(sizes.rows):
        q, k, v = (n // sizes.head_dim for n in sizes.rows)
        raise ValueError(
            f"{names[0]} has {len(fused)} rows of q, k and v; {q} + {k} + {v} heads of head_dim="
            f"{sizes.head_dim} have {sum(sizes.rows)}"
        )
    if layout.interleaved:
        _check_ungrouped(names[0], sizes)
        parts = fused.unflatten(0, (-1, 3, sizes.head_dim)).unbind(1)
        yield from (t.flatten(0, 1) for t in parts)
    else:  # copies: with load_state_dict(assign=True) parameters must not share memory
        yield from (t.clone() for t in fused.split(sizes.rows))


def _join(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    kind: str,
    layout: WeightLayout,
    sizes: ProjectionSizes,
) -> list[Tensor]:
    if len(names) == 3:
        return list(tensors)
    if layout.interleaved:
        _check_ungrouped(names[0], sizes)
        heads = [t.unflatten(0, (-1, sizes.head_dim)) for t in tensors]
        return [torch.stack(heads, 1).flatten(0, 2)]
    if len({t.shape[1:] for t in tensors}) > 1:
        raise ValueError(f"{names[0]} needs kdim = vdim = embed_dim: write 'torch_kdim'")
    fused = torch.cat(tuple(tensors))
    return [fused.T.contiguous() if layout.transposed and kind == "weight" else fused]


def _check_ungrouped(name: str, sizes: ProjectionSizes) -> None:
    if len(set(sizes.rows)) > 1:
        raise ValueError(f"{name} is interleaved by head, which needs num_kv_heads = num_heads")
