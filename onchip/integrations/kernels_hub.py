"""A folder that Hugging Face's package `kernels` loads, with the functions of flash_attn:

    python -m onchip.integrations.kernels_hub FOLDER

    FOLDER/build/torch-cpu/    metadata.json, __init__.py
    FOLDER/build/torch-cuda/   the same files for another backend of torch
    FOLDER/build/torch-rocm/

`kernels.get_local_kernel(Path(FOLDER))` imports the variant for the backend of the installed torch.
Its functions are those of `onchip.integrations.flash_attn`: onchip must be installed. The folder
has no compiled code, so that one variant serves every version of torch that onchip supports.
"""

import argparse
import json
from pathlib import Path

from onchip.integrations import flash_attn

NAME = "onchip-flash-attn"
BACKENDS = ("cpu", "cuda", "rocm")
FUNCTIONS = tuple(name for name in flash_attn.__all__ if name.startswith("flash_attn_"))
_MODULE = '''\
"""The functions of flash_attn, computed by onchip, which must be installed."""

from onchip.integrations.flash_attn import (
{imports}
)

__all__ = [
{names}
]
'''


def write(folder: Path) -> list[Path]:
    """Write a variant for every backend, and return their folders. Existing files are replaced."""
    variants = [folder / "build" / f"torch-{backend}" for backend in BACKENDS]
    for backend, variant in zip(BACKENDS, variants, strict=True):
        variant.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_metadata(backend), indent=2)
        (variant / "metadata.json").write_text(text + "\n", encoding="utf-8")
        (variant / "__init__.py").write_text(_format_module(), encoding="utf-8")
    return variants


def _metadata(backend: str) -> dict:
    """The metadata of a variant. Its id is the name under which `kernels` imports the module."""
    return {
        "id": f"_{NAME.replace('-', '_')}_{backend}",
        "name": NAME,
        "version": 1,
        "license": "MIT",
        "python-depends": [],  # `kernels` knows a fixed list of packages; onchip is not one of them
        "backend": {"type": backend},
    }


def _format_module() -> str:
    imports = "\n".join(f"    {name}," for name in FUNCTIONS)
    names = "\n".join(f'    "{name}",' for name in FUNCTIONS)
    return _MODULE.format(imports=imports, names=names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0].rstrip(":"))
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    for variant in write(parser.parse_args().folder):
        print(variant)


if __name__ == "__main__":
    main()
