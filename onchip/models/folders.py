"""Choose between the native decoder and transformers for the model in a folder."""

import re
from pathlib import Path

from onchip.models import builtin, foreign
from onchip.models.config import FAMILIES
from onchip.models.loader import read_json
from onchip.models.multimodal import text_fields


def is_native(folder: str | Path) -> bool:
    """Whether `decoder` serves the model_type in a folder's config.json. A config without a
    model_type counts as native: the native loader refuses it.
    """
    check_exists(folder)
    data = text_fields(read_json(Path(folder) / "config.json"))
    model_type = data.get("model_type") if isinstance(data, dict) else None
    return not isinstance(model_type, str) or model_type in FAMILIES


def check_exists(folder: str | Path) -> None:
    """A model is a folder. The name of a hub model is refused with the command that fetches it."""
    name = str(folder)
    if Path(folder).exists():
        return
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise ValueError(f"there is no folder {name}: a model is the folder of a checkpoint")
    local = name.split("/")[1]
    raise ValueError(
        f"there is no folder {name}, and nothing is fetched: if it is the name of a model on the"
        f" Hugging Face hub, run `hf download {name} --local-dir {local}` and give {local} instead"
    )


def about(model: str | Path) -> str | None:
    """A note for users who start the model of this name, or None."""
    if model == builtin.NAME:
        return builtin.ABOUT
    return None if is_native(model) else f"{model} {foreign.ABOUT}"
