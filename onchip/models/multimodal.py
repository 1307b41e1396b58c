"""The language model inside a multimodal checkpoint, for use with text alone.

Its config is `text_config`, or, in older checkpoints, the top level of config.json. Its weights
have the names of a text model after a prefix. Weights of the other modalities are not read.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from onchip.models.safetensors import TensorEntry


class _Composite(NamedTuple):
    """A model_type that contains a language model. text_types: `text_config.model_type` -> the
    family of the text model. other_parts: prefixes of weights and of config fields that are not of
    the text model.
    """

    text_types: dict[str, str]
    other_parts: tuple[str, ...]


_QWEN = ("visual.", "model.visual.", "image_", "video_", "vision_")
_PIXTRAL = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.")
_PIXTRAL += ("model.multi_modal_projector.",)
COMPOSITES = {
    "gemma3": _Composite({"gemma3_text": "gemma3_text"}, _PIXTRAL),
    "mistral3": _Composite({"mistral": "mistral"}, _PIXTRAL),
    "qwen2_5_vl": _Composite({"qwen2_5_vl_text": "qwen2"}, _QWEN),
    "qwen2_vl": _Composite({"qwen2_vl_text": "qwen2"}, _QWEN),
}
# Prefixes of the language model -> the prefixes that text models of the family have instead.
_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}


def text_fields(data: Any) -> Any:
    """The fields of the language model of a config.json, in the form of a text model's config; data
    itself if its model_type is not a known composite.
    """
    composite = _composite(data)
    if composite is None:
        return data
    fields = data.get("text_config") or _without(data, composite.other_parts)
    if not isinstance(fields, Mapping):
        return data
    stated = fields.get("model_type")
    default = next(iter(composite.text_types))
    # The head and the ids of special tokens belong to the whole model.
    shared = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
    whole = {name: data[name] for name in shared if data.get(name) is not None}
    known = composite.text_types | {data["model_type"]: composite.text_types[default]}
    family = known.get(stated or default, stated)
    return {**fields, **whole, "model_type": family, **_rope_of_text(fields)}


def text_entries(data: Any, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors of the language model under the names of a text model."""
    composite = _composite(data)
    if composite is None:
        return entries
    names = (name for name in entries if not name.startswith(composite.other_parts))
    return {_text_name(name): entries[name] for name in names}


def _composite(data: Any) -> _Composite | None:
    model_type = data.get("model_type") if isinstance(data, Mapping) else None
    return COMPOSITES.get(model_type) if isinstance(model_type, str) else None


def _without(data: Mapping[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if not name.startswith(prefixes)}


def _text_name(name: str) -> str:
    for prefix, plain in _PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _rope_of_text(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary fields without sections of time, height and width: a text token has the same position
    in all three, so the sections rotate alike.
    """
    plain = {}
    for name in ("rope_scaling", "rope_parameters"):
        block = fields.get(name)
        if isinstance(block, Mapping) and "mrope_section" in block:
            rest = {key: value for key, value in block.items() if key != "mrope_section"}
            plain[name] = {k: "default" if v == "mrope" else v for k, v in rest.items()}
    return plain
