"""The attention interface of transformers: a model with `attn_implementation` `NAME` passes its
queries, keys and values to the current `AttentionHandler`.

transformers calls two functions, registered under one name: one for each mask of a forward, one for
each attention. Their arguments become options of `onchip.attention`; arguments without such an
option are refused. transformers is imported on first use.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor, nn

from onchip.core.extras import advise
from onchip.core.problem import UnsupportedError
from onchip.models import interface_check
from onchip.models.mask_parsing import MaskFunction

NAME = "onchip_paged"
# Keywords of transformers' attention functions that choose keys or change scores, and that
# `onchip.attention` has no option for. Every other keyword is one that a model passes to all of its
# modules (`TransformersKwargs`, labels, arguments of a loss); attention ignores it.
_REFUSED = frozenset(
    {
        *("alibi", "attention_bias", "block_indices", "block_mask", "block_table", "cache"),
        *("head_mask", "indices", "k_cache", "learnable_sink", "position_bias", "score_mod"),
        *("use_top_left_mask", "v_cache", "window_size"),
    }
)


class AttentionHandler(Protocol):
    """Attention of the next layer: q (tokens, num_heads, head_dim), k and v (tokens, num_kv_heads,
    ...) of one batch row, the mask function of the model, and options of `onchip.attention`.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, rule: MaskFunction, options: dict[str, Any]
    ) -> Tensor: ...


_handler: ContextVar[AttentionHandler] = ContextVar("onchip_attention_handler")


def load_transformers() -> ModuleType:
    """The transformers module, with the two functions of this file registered."""
    return register(NAME, _attend, _mask)


def register(name: str, attend: Callable[..., Any], mask: Callable[..., Any]) -> ModuleType:
    """The transformers module, in which attn_implementation=name calls these two functions;
    UnsupportedError if it is not installed or lacks one of the two interfaces.
    """
    try:
        import transformers
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise UnsupportedError(
            "this runs through transformers 5.17 or later, which cannot be imported"
            f" ({error}): {advise('transformers')}"
        ) from None
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    interface_check.guard(transformers.PreTrainedModel, name)
    return transformers


@contextmanager
def handle_attention(handler: AttentionHandler) -> Iterator[None]:
    """Inside, in this thread, the handler computes attention of models under `NAME`."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def options_of(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `onchip.attention` for the keywords of a call. UnsupportedError for a keyword that
    would change the scores and has no counterpart. `sliding_window` is in the mask already.
    """
    keywords = {name: value for name, value in keywords.items() if value is not None}
    scale, softcap = keywords.pop("scaling", None), keywords.pop("softcap", 0.0)
    sinks = keywords.pop("s_aux", None)
    for name, value in keywords.items():
        if name in _REFUSED and value is not False:
            raise UnsupportedError(f"attention got {name}, which onchip.attention does not have")
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
    **keywords: Any,
) -> tuple[Tensor, None]:
    """query (1, num_heads, tokens, head_dim), key and value likewise; returns out (1, tokens,
    num_heads, head_dim_v).
    """
    handler = _handler.get(None)
    if handler is None:
        raise UnsupportedError(f"attn_implementation={NAME!r} runs only in the steps of an engine")
    if not isinstance(attention_mask, MaskFunction):
        raise UnsupportedError(f"{type(module).__name__} attends without a causal mask")
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise UnsupportedError(f"{type(module).__name__} attends to other tokens than its own")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return handler(q, k, v, attention_mask, options_of(keywords))[None], None


def _mask(
    *, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any
) -> MaskFunction:
    return MaskFunction(mask_function, local_size)
