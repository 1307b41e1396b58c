"""Choose between the native decoder and transformers for the model in a folder."""

from pathlib import Path

from onchip.core.hub_cache import resolve_folder
from onchip.models import builtin, foreign
from onchip.models.config import FAMILIES
from onchip.models.loader import read_json
from onchip.models.multimodal import text_fields


def resolve(model: str | Path) -> str | Path:
    """The name of a built-in model, or the folder of any other: `model` is that folder, or the id
    of a model in the local Hub cache. ValueError if there is neither.
    """
    return model if model in builtin.NAMES else resolve_folder(model)


def is_native(folder: str | Path) -> bool:
    """Whether `decoder` serves the model_type in a folder's config.json. A config without a
    model_type counts as native: the native loader refuses it.
    """
    data = text_fields(read_json(Path(resolve_folder(folder)) / "config.json"))
    model_type = data.get("model_type") if isinstance(data, dict) else None
    return not isinstance(model_type, str) or model_type in FAMILIES


def about(model: str | Path) -> str | None:
    """A note for users who start the model of this name, or None."""
    if model in builtin.NAMES:
        return builtin.ABOUT
    return None if is_native(model) else f"{model} {foreign.ABOUT}"
