"""The local cache of the Hugging Face Hub: folders of downloaded models by their ids. Nothing is
fetched.

    models--org--name/refs/main               the commit that was downloaded last
    models--org--name/snapshots/COMMIT/...    its files, links to blobs
"""

import os
import re
from pathlib import Path

from onchip.core.files import read_regular

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[\w-]{1,64}", re.ASCII)


def cache_folder() -> Path:
    """The folder that huggingface_hub uses in this environment."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(named).expanduser()
    general = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or general).expanduser() / "hub"


def is_model_id(name: str) -> bool:
    """Whether the Hub could have a model of this name: org/name."""
    return bool(_ID.fullmatch(name)) and "--" not in name and ".." not in name


def find_model(model_id: str) -> Path | None:
    """The snapshot of the branch main, or None if it was not downloaded."""
    folder = cache_folder() / f"models--{model_id.replace('/', '--')}"
    try:
        commit = read_regular(folder / "refs" / "main", limit=256).decode().strip()
    except (OSError, ValueError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def list_models() -> list[str]:
    """The ids of all models in the cache."""
    folders = sorted(cache_folder().glob("models--*--*"))
    ids = (folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders)
    return [each for each in ids if is_model_id(each) and find_model(each)]


def resolve_folder(name: str | Path) -> str | Path:
    """The folder of a model: `name` itself if there is such a folder, otherwise the snapshot of the
    Hub id `name`. ValueError with the command that downloads it.
    """
    if Path(name).exists():
        return name
    if not is_model_id(str(name)):
        raise ValueError(f"there is no folder {name}: a model is the folder of a checkpoint")
    snapshot = find_model(str(name))
    if snapshot is None:
        raise ValueError(
            f"there is no folder {name}, and no model of that name in the Hub cache"
            f" {cache_folder()}; nothing is fetched here: run `hf download {name}`"
        )
    return snapshot
