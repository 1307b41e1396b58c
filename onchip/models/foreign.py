"""Any other causal language model: the modules of transformers, with onchip's attention over pages.

Slower than `decoder`: nothing is fused, no step is captured in a CUDA graph, and experts and norms
run as in transformers. Nothing is downloaded, and no code of a checkpoint is run. A model is
refused as early as possible: by its config, by a run without data (`probe`), by its files, and by a
self check.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from onchip.core.files import check_folder
from onchip.core.hub_cache import resolve_folder
from onchip.core.problem import UnsupportedError
from onchip.kvcache import KVCache, PagedBatch, Spec
from onchip.models import interface, safetensors
from onchip.models.attend import PagedAttend
from onchip.models.config import FAMILIES, token_ids
from onchip.models.interface import MaskFunction
from onchip.models.loader import entries_of, read_json
from onchip.models.probe import AttentionLayout, call, check_config, probe
from onchip.models.safetensors import TensorEntry
from onchip.models.self_check import MAX_TOKENS, run_self_check

ABOUT = "runs through transformers, slower: nothing is fused, and no step is recorded"
# Why modules of transformers fail here, by a part of the error text.
_REASONS = {
    "'MaskFunction'": "it computes with its masks instead of passing them to the attention"
    " interface",
    "meta tensor": "it reads values while it computes, so it cannot be checked before it is loaded",
}


@dataclass(frozen=True)
class ForeignConfig:
    """The sizes that an engine needs, under the names of `ModelConfig`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    max_seqlen: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checked folder, and the attention layout of its model. source: its transformers config;
    model_class: its transformers class.
    """

    folder: Path
    source: Any
    model_class: Any
    dtype: torch.dtype
    layout: AttentionLayout
    config: ForeignConfig


class _PagedHandler:
    """An `AttentionHandler` that counts the layers of one step."""

    def __init__(self, paged: PagedAttend, windows: tuple[int | None, ...]):
        self._paged, self._windows, self._layer = paged, windows, 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, rule: MaskFunction, options: dict[str, Any]
    ) -> Tensor:
        layer, self._layer = self._layer, self._layer + 1
        window = self._windows[layer]
        if window is not None:
            options = options | {"window_size": (window - 1, 0)}
        return self._paged(layer, q, k, v, **options)


class Foreign:
    """A transformers model with the interface of `Decoder`. A step returns logits instead of hidden
    states, because only the model itself can compute logits from its hidden states.
    """

    model: Any
    config: ForeignConfig
    device: torch.device
    dtype: torch.dtype
    width: int
    layer_weights: int
    windows: tuple[int | None, ...]

    def __init__(self, model: Any, config: ForeignConfig, layout: AttentionLayout):
        self.model, self.config, self._layout = model, config, layout
        self.device = next(model.parameters()).device
        self.dtype, self.width = layout.logits_dtype, layout.vocab_size
        self.windows = layout.windows
        self.layer_weights = sum(w.numel() for w in model.parameters()) // config.num_layers

    def cache_spec(self, page_size: int = 16, kv_dtype: str | None = None) -> Spec:
        """Pages for the keys and values of every attention of this model."""
        _, num_kv_heads, head_dim, head_dim_v, dtype = self._layout.heads
        sizes = self.config.num_layers, num_kv_heads, head_dim, head_dim_v
        spec = Spec(*sizes, page_size=page_size, dtype=dtype, device=self.device)
        return spec.stored_as(kv_dtype)

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Logits of one step, or of some rows of it: as `Decoder.forward`."""
        keep = (
            {"logits_to_keep": rows.long()}
            if rows is not None and self._layout.selects_rows
            else {}
        )
        with interface.handle_attention(
            _PagedHandler(PagedAttend(batch, cache), self._layout.windows)
        ):
            logits = call(self.model, tokens.long(), position_ids=positions[None], **keep)
        return logits if rows is None or keep else logits.index_select(0, rows)

    @torch.no_grad()
    def own_logits(self, tokens: Tensor) -> Tensor:
        """Logits of one whole sequence, by transformers' own attention."""
        self.model.set_attn_implementation("eager")
        try:
            return call(self.model, tokens)
        finally:
            self.model.set_attn_implementation(interface.NAME)

    def logits(self, hidden: Tensor, wide: bool = True) -> Tensor:
        """The result of a step, in fp32 (fp64 for fp64) if wide."""
        return hidden if not wide or hidden.dtype == torch.float64 else hidden.float()


def inspect_foreign(folder: str | Path, dtype: torch.dtype | None = None) -> ForeignCheckpoint:
    """The checkpoint of a model that `decoder` does not serve, or a ValueError with the reason why
    transformers and pages cannot serve it either. Reads config.json and headers only. dtype: None
    for the dtype of most weights.
    """
    folder = Path(resolve_folder(folder))
    model_type = _stated_type(folder)
    check_folder(folder)
    entries = entries_of(folder)
    dtype = dtype or _dtype(entries)
    transformers = interface.load_transformers()
    with _as_unsupported(model_type, transformers):
        source = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        check_config(source, transformers)
        skeleton = _skeleton(source, dtype, transformers)
        layout = probe(skeleton, transformers)
        _check_size(skeleton, entries)
        config = _config(source, layout)
    return ForeignCheckpoint(folder, source, type(skeleton), dtype, layout, config)


def load_foreign(
    checkpoint: ForeignCheckpoint | str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Foreign:
    """The model of a checkpoint, after its self check. Its weights pass through host memory."""
    if not isinstance(checkpoint, ForeignCheckpoint):
        checkpoint = inspect_foreign(checkpoint, dtype)
    transformers = interface.load_transformers()
    with _as_unsupported(checkpoint.config.model_type, transformers):
        model = _read(checkpoint).to(device)
        foreign = Foreign(model, checkpoint.config, checkpoint.layout)
        run_self_check(foreign, foreign.own_logits)
    return foreign


def _stated_type(folder: Path) -> str:
    data = read_json(folder / "config.json")
    model_type = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(model_type, str):
        raise ValueError(f"config.json of {folder} has no model_type")
    if data.get("quantization_config"):
        raise UnsupportedError(f"{model_type}: its weights are quantised, which is not served")
    if (folder / "adapter_config.json").exists():
        raise UnsupportedError(f"{model_type}: the folder holds an adapter, not a model; merge it")
    return model_type


def _dtype(entries: dict[str, TensorEntry]) -> torch.dtype:
    """The dtype of most weights."""
    counts: dict[str, int] = {}
    for entry in entries.values():
        counts[entry.dtype] = counts.get(entry.dtype, 0) + math.prod(entry.shape)
    most = max(counts, key=lambda name: counts[name], default="none")
    if most not in safetensors.DTYPES:
        kinds = ", ".join(safetensors.DTYPES)
        raise UnsupportedError(f"most weights are stored as {most}; supported are {kinds}")
    return safetensors.DTYPES[most]


def _config(source: Any, layout: AttentionLayout) -> ForeignConfig:
    text, heads = source.get_text_config(), layout.heads
    if text.max_position_embeddings < MAX_TOKENS:
        raise UnsupportedError(f"it has only {text.max_position_embeddings} positions")
    return ForeignConfig(
        model_type=source.model_type,
        vocab_size=layout.vocab_size,
        hidden_size=text.hidden_size,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        num_layers=len(layout.windows),
        max_seqlen=text.max_position_embeddings,
        **token_ids({"bos_token_id": text.bos_token_id, "eos_token_id": text.eos_token_id}),
    )


def _skeleton(source: Any, dtype: torch.dtype, transformers: ModuleType) -> Any:
    """The model on the meta device, without weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            source, attn_implementation=interface.NAME, dtype=dtype, trust_remote_code=False
        ).eval()


def _check_size(skeleton: Any, entries: dict[str, TensorEntry]) -> None:
    """Refuse a config with more weights than the files hold, before anything is allocated."""
    wanted = sum(weight.numel() for weight in skeleton.parameters())
    known = [entry for entry in entries.values() if entry.dtype in safetensors.DTYPES]
    held = sum(math.prod(entry.shape) for entry in known)
    if wanted > held:
        raise ValueError(f"its config needs {wanted:,} weights, the files hold {held:,}")


def _read(checkpoint: ForeignCheckpoint) -> Any:
    model, report = checkpoint.model_class.from_pretrained(
        checkpoint.folder,
        config=checkpoint.source,
        attn_implementation=interface.NAME,
        dtype=checkpoint.dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    for name in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := report.get(name):
            some = ", ".join(sorted(map(str, keys))[:3])
            raise ValueError(f"{len(keys)} {name.replace('_', ' ')} in its files: {some}")
    return model.eval()


@contextmanager
def _as_unsupported(model_type: str, transformers: ModuleType) -> Iterator[None]:
    """Turn any exception inside into an UnsupportedError about the model: configs and modules of
    transformers fail in many ways on unexpected input. Out-of-memory errors pass unchanged.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(
            f"model_type={model_type!r} is none of {', '.join(FAMILIES)}, and cannot be served"
            f" through transformers {transformers.__version__}: {_explain(error):.300}"
        ) from error


def _explain(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    if isinstance(error, ValueError):
        return text
    unknown = f"{type(error).__name__}: {text}"
    return next((reason for trace, reason in _REASONS.items() if trace in text), unknown)
