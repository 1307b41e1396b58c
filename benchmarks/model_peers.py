"""The peers of a model's call, each given the call in its own words, or refusing it.

A peer that has no argument for an option of the call raises a PeerRefusal that names the option. A
peer that has one is called: what it raises on the shape is its refusal. Over pages, peers that read
no pages get the same keys in one piece.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.model_calls import ModelCall
from onchip.cli.bench import gpu, peers
from onchip.cli.bench.gpu import GpuAccuracyCheck, GpuCandidate, Inputs
from onchip.cli.bench.harness import Session
from onchip.cli.bench.peers import Attend, PeerRefusal


def refuse(call: ModelCall, *lacks: str, unless: str = "") -> None:
    """Raise the PeerRefusal of a peer that lacks these features, if the call has one of them.
    unless: how the peer could have them, by code that is not here.
    """
    layer = call.layer
    has = {
        "softcap": layer.softcap != 0.0,
        "sinks": layer.has_sinks,
        "bias": bool(layer.bias),
        "3-D window": layer.video is not None,
        "window": layer.window is not None,
        "packed sequences": call.lengths is not None,
        "causal mask aligned to the last key": call.is_causal
        and call.call.keys != call.call.seqlen_q,
        "backward": call.backward,
    }
    missing = [name for name in lacks if has[name]]
    if missing:
        raise PeerRefusal(f"it has no {' and no '.join(missing)}{unless}")


def fa3(call: ModelCall, **splits: Any) -> Attend:
    refuse(call, "sinks", "bias", "3-D window", "backward")
    return peers.fa3(call.lengths, **_flash_options(call, unbounded=-1), **splits)


def fa4(call: ModelCall, **splits: Any) -> Attend:
    refuse(call, "bias", "3-D window", unless=" but in CuTe code (score_mod, mask_mod)")
    options = _flash_options(call, unbounded=None)
    if call.layer.has_sinks:
        options["learnable_sink"] = call.scores.sinks
    return peers.fa4(call.lengths, **options, **splits)


def _flash_options(call: ModelCall, unbounded: int | None) -> dict[str, Any]:
    window = (unbounded, unbounded) if call.layer.window is None else (call.layer.window - 1, 0)
    scale, softcap = call.layer.softmax_scale, call.layer.softcap
    options: dict[str, Any] = {
        "causal": call.is_causal,
        "softmax_scale": scale,
        "window_size": window,
    }
    if call.call.page_size:
        options["cache_seqlens"] = call.cache_seqlens
    return options | ({"softcap": softcap} if softcap else {})


def fa2(call: ModelCall) -> Attend:
    refuse(call, "softcap", "sinks", "bias", "3-D window")
    is_plain = call.lengths is None and call.layer.window is None
    if is_plain and call.call.keys == call.call.seqlen_q:
        return _sdpa("fa2", call)
    scale = call.layer.softmax_scale
    return peers.fa2(call.is_causal, call.layer.window, scale, call.lengths)


def cudnn(call: ModelCall) -> Attend:
    return _masked_sdpa("cudnn", call)


def efficient(call: ModelCall) -> Attend:
    return _masked_sdpa("efficient", call)


def _masked_sdpa(name: str, call: ModelCall) -> Attend:
    lacks = ("softcap", "sinks", "3-D window", "window", "packed sequences")
    refuse(call, *lacks, "causal mask aligned to the last key")
    return _sdpa(name, call)


def _sdpa(name: str, call: ModelCall) -> Attend:
    options: dict = {"is_causal": call.is_causal, "scale": call.layer.softmax_scale}
    if call.layer.num_kv_heads != call.layer.num_heads:
        options["enable_gqa"] = True
    if call.scores.bias is not None:
        options["attn_mask"] = call.scores.bias
    return peers.explain_refusal(peers.backend(name, **options))


def flex(call: ModelCall) -> Attend:
    """Compiled for the call; it has a word for everything but sinks, which `peers.flex` adds."""
    layer, sizes = call.layer, call.call
    return peers.flex(
        sizes.seqlen_q,
        None if call.mask_name == "none" else call.mask_mod,
        call.device,
        seqlen_k=sizes.keys,
        score_mod=_score_mod(layer.softcap, call.scores.bias),
        scale=layer.softmax_scale,
        sinks=call.scores.sinks,
    )


def _score_mod(softcap: float, bias: Tensor | None) -> Callable | None:
    if bias is not None and bias.shape[0] == 1:
        shared = bias[0]
        return lambda score, b, h, q, k: score + shared[h, q, k]
    if bias is not None:
        return lambda score, b, h, q, k: score + bias[b, h, q, k]
    if softcap:
        return lambda score, b, h, q, k: softcap * torch.tanh(score / softcap)
    return None


MAKERS: dict[str, Callable[..., Attend]] = {
    "fa3": fa3,
    "fa4": fa4,
    "cudnn": cudnn,
    "fa2": fa2,
    "efficient": efficient,
    "flex": flex,
}
IN_BOTH_LAYOUTS = ("cudnn", "fa2", "efficient")
SPLITS_KEYS = READS_PAGES = ("fa3", "fa4")


def needs_flex(call: ModelCall) -> bool:
    """Whether the call has an option that some of the other peers lack."""
    return call.mask_name not in ("none", "causal") or bool(
        call.layer.softcap or call.layer.has_sinks or call.layer.bias
    )


def ways(session: Session, call: ModelCall) -> Iterator[tuple[str, Callable[..., Attend]]]:
    """How each peer is called; of several ways with one name the fastest counts. FlashAttention
    splits the keys of a decoding step over programs only if it may choose their number (0).
    """
    for name, make in MAKERS.items():
        if name != "flex" or session.flex or needs_flex(call):
            yield name, make
        if name in SPLITS_KEYS and call.call.seqlen_q == 1:
            yield name, partial(make, num_splits=0)


def find(
    session: Session, call: ModelCall, sets: list[Inputs], check: GpuAccuracyCheck
) -> tuple[list[GpuCandidate], list[str]]:
    """The candidates, also peers that will refuse; the names of peers not installed here."""
    candidates: list[GpuCandidate] = []
    missing: dict[str, None] = {}
    for name, make in ways(session, call):
        over_pages = call.call.page_size > 0 and name in READS_PAGES
        step, cut = _without_window(call, over_pages)
        try:
            attend = make(step)
        except ImportError as error:
            session.note(f"{name} is left out: {gpu.sentence(error)}")
            missing[name] = None
            continue
        except Exception as error:
            attend = _raise(error)
        given = [step.in_pages((q, cut(k), cut(v))) for q, k, v in sets] if over_pages else sets
        attend = attend if over_pages else _cut_keys(attend, cut)
        candidates += _layouts(name, attend, given, check, tuple(call.scores.parameters.values()))
    return candidates, list(missing)


def _without_window(
    call: ModelCall, over_pages: bool
) -> tuple[ModelCall, Callable[[Tensor], Tensor]]:
    """ModelCall.without_window. A window that does not begin with a page stays a window."""
    step, cut = call.without_window()
    if over_pages and step.call.keys % call.call.page_size:
        return call, lambda x: x
    return step, cut


def _cut_keys(attend: Attend, cut: Callable[[Tensor], Tensor]) -> Attend:
    return lambda q, k, v: attend(q, cut(k), cut(v))


def _raise(error: Exception) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise error

    return attend


def _layouts(
    name: str,
    attend: Attend,
    sets: list[Inputs],
    check: GpuAccuracyCheck,
    parameters: tuple[Tensor, ...],
) -> Iterator[GpuCandidate]:
    """SDPA in either layout, of which the faster one counts; FlexAttention heads first."""
    layouts = [peers.heads_first] if name == "flex" or name in IN_BOTH_LAYOUTS else []
    layouts += [] if name == "flex" else [lambda x: x]
    for layout in layouts:
        yield GpuCandidate(name, attend, sets, check, layout, parameters=parameters)
