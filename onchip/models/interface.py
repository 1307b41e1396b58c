"""The attention interface of transformers: a model whose `attn_implementation` is `NAME` hands its
queries, keys and values to whoever reads here.

transformers calls two functions of ours, registered under one name: one for each mask of a forward,
one for each attention. What it says to them becomes the options of `onchip.attention`; what cannot
be said with those is refused. transformers is imported when it is asked for, never before.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor, nn

from onchip.models import interface_check
from onchip.models.mask_parsing import MaskFunction
from onchip.problem import UnsupportedError

NAME = "onchip_paged"
# Keywords of attention functions of transformers that choose keys or change scores, and that
# `onchip.attention` has no option for. Any other keyword is one that a model hands on to all of its
# modules (`TransformersKwargs`, labels, arguments of a loss), and says nothing to attention.
_REFUSED = frozenset(
    {
        *("alibi", "attention_bias", "block_indices", "block_mask", "block_table", "cache"),
        *("head_mask", "indices", "k_cache", "learnable_sink", "position_bias", "score_mod"),
        *("use_top_left_mask", "v_cache", "window_size"),
    }
)


class AttentionHandler(Protocol):
    """Attention of the next layer: q (tokens, num_heads, head_dim), k and v (tokens, num_kv_heads,
    ...) of one batch row, the rule that the model hands over, and options of `onchip.attention`.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, rule: MaskFunction, options: dict[str, Any]
    ) -> Tensor: ...


_handler: ContextVar[AttentionHandler] = ContextVar("onchip_attention_handler")


def load_transformers() -> ModuleType:
    """transformers, with our functions registered."""
    return register(NAME, _attend, _mask)


def register(name: str, attend: Callable[..., Any], mask: Callable[..., Any]) -> ModuleType:
    """transformers, in which attn_implementation=name calls these two; UnsupportedError where there
    is none, or one without the two interfaces.
    """
    try:
        import transformers
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise UnsupportedError(
            "this runs through transformers 5.17 or later, which cannot be imported"
            f" ({error}): pip install transformers"
        ) from None
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    interface_check.guard(transformers.PreTrainedModel, name)
    return transformers


@contextmanager
def handle_attention(handler: AttentionHandler) -> Iterator[None]:
    """Inside, in this thread, attention of models under `NAME` is the reader's."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def options_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `onchip.attention` for the keywords of a call; UnsupportedError names one that
    would change the scores and has no counterpart. `sliding_window` is in the mask already.
    """
    said = {name: value for name, value in said.items() if value is not None}
    scale, softcap = said.pop("scaling", None), said.pop("softcap", 0.0)
    sinks = said.pop("s_aux", None)
    for name, value in said.items():
        if name in _REFUSED and value is not False:
            raise UnsupportedError(f"attention is given {name}, which has no counterpart here")
    if isinstance(scale, Tensor) or isinstance(softcap, Tensor):
        raise UnsupportedError("scaling or softcap of attention is computed, not a number")
    options: dict[str, Any] = {"softmax_scale": scale, "softcap": float(softcap)}
    return options if sinks is None else options | {"sinks": sinks}


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **said: Any,
) -> tuple[Tensor, None]:
    """query (1, num_heads, tokens, head_dim), key and value alike; out (1, tokens, num_heads,
    head_dim_v).
    """
    handler = _handler.get(None)
    if handler is None:
        raise UnsupportedError(f"attn_implementation={NAME!r} runs in steps of an engine alone")
    if not isinstance(attention_mask, MaskFunction):
        raise UnsupportedError(f"{type(module).__name__} attends without a causal mask")
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise UnsupportedError(f"{type(module).__name__} attends to other tokens than its own")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return handler(q, k, v, attention_mask, options_of(said))[None], None


def _mask(
    *, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any
) -> MaskFunction:
    return MaskFunction(mask_function, local_size)
