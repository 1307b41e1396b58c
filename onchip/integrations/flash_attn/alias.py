"""`import flash_attn` without flash_attn: modules of that name with onchip's functions."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType

from onchip.integrations.flash_attn.names import FLASH_ATTN, FLASH_ATTN_3, UNSUPPORTED

VERSION = "2.8.3"  # of flash_attn, the version of these functions
VERSION_3 = "3.0.0"  # of the distribution flash-attn-3
_HERE = "onchip.integrations.flash_attn"  # this package


def install(*, transformers: bool = False, flash_attn_3: bool = False) -> None:
    """Make `import flash_attn`, and the submodules in names.py, give onchip's functions, and
    importlib.metadata find a flash-attn 2.8.3.

    transformers: import that package and make it find flash_attn, also on the CPU, so that
    attn_implementation="flash_attention_2" works. flash_attn_3: also FlashAttention-3's module
    flash_attn_interface and its package flash_attn_3; not by default, because programs that find
    them prefer them. A second call adds modules that the first did not install. RuntimeError if a
    real module of these names is loaded, because programs keep references to its functions.
    """
    requested = FLASH_ATTN | (FLASH_ATTN_3 if flash_attn_3 else {})
    missing = {name: names for name, names in requested.items() if not _is_alias(name)}
    _refuse_real_modules(missing)
    sys.modules.update(_build(missing))
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if transformers:
        from onchip.integrations.flash_attn import huggingface

        huggingface.enable()


def uninstall() -> None:
    """Undo install(). Names that a program has imported stay valid."""
    if not is_installed():
        return
    if huggingface := sys.modules.get(f"{_HERE}.huggingface"):
        huggingface.disable()
    sys.meta_path.remove(_FINDER)
    for name in [n for n, module in sys.modules.items() if isinstance(module, Alias)]:
        del sys.modules[name]


@contextmanager
def installed(*, transformers: bool = False, flash_attn_3: bool = False) -> Iterator[None]:
    """install() for a with block; not undone if it was installed before."""
    before = is_installed()
    install(transformers=transformers, flash_attn_3=flash_attn_3)
    try:
        yield
    finally:
        if not before:
            uninstall()


def is_installed() -> bool:
    return _is_alias("flash_attn")


class Alias(ModuleType):
    """A module that replaces one of flash_attn."""


def _is_alias(name: str) -> bool:
    return isinstance(sys.modules.get(name), Alias)


def _refuse_real_modules(names: dict) -> None:
    for name in names:
        real = sys.modules.get(name)
        if real is not None:
            raise RuntimeError(
                f"{name} is loaded already, from {getattr(real, '__file__', None)}: call install()"
                " before anything imports it, or import from onchip.integrations.flash_attn"
            )


def _build(rows: dict[str, dict[str, str]]) -> dict[str, Alias]:
    """The modules of rows; each is an attribute of its parent."""
    modules = {name: _module(name, names) for name, names in rows.items()}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent:
            (modules.get(parent) or sys.modules[parent]).__dict__[last] = module
    if "flash_attn" in modules:
        modules["flash_attn"].__dict__["__version__"] = VERSION
    return modules


def _module(name: str, names: dict[str, str]) -> Alias:
    here = import_module(".", _HERE).__file__
    module = Alias(name, f"{name}, computed by onchip: see onchip.integrations.flash_attn.")
    # All are packages: `from module import name` then calls the finder for a missing name.
    module.__spec__ = ModuleSpec(name, None, origin=here, is_package=True)
    module.__file__, module.__path__ = here, []
    public = [theirs for theirs in names if not theirs.startswith("_")]
    module.__dict__.update({t: _find(ours) for t, ours in names.items()}, __all__=public)
    return module


def _find(where: str) -> object:
    """The object at "file:name" of this package, or the module "file"."""
    file, _, name = where.partition(":")
    module = import_module(f".{file}", _HERE)
    return getattr(module, name) if name else module


class _Distribution(Distribution):
    """The metadata of one of the aliases for importlib.metadata."""

    def __init__(self, name: str, version: str, modules: str):
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": modules,
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path) -> Path:
        return Path(__file__).parent / path  # no file of it exists


class _Finder(DistributionFinder):
    """Finds the distributions. Finds no module; raises ImportError for names that flash_attn has
    and onchip does not support.
    """

    def find_spec(self, fullname, path=None, target=None) -> None:
        if fullname in UNSUPPORTED and _is_alias(fullname.rpartition(".")[0]):
            raise ImportError(f"onchip does not support {fullname}: {UNSUPPORTED[fullname]}")

    def find_distributions(self, context=DistributionFinder.Context()) -> list[Distribution]:  # noqa: B008
        versions = {"flash-attn": (VERSION, "flash_attn\nflash_attn_2_cuda\n")}
        if _is_alias("flash_attn_3"):
            versions["flash-attn-3"] = VERSION_3, "flash_attn_interface\nflash_attn_3\n"
        name = context.name and context.name.replace("_", "-").lower()
        return [_Distribution(n, *row) for n, row in versions.items() if name in (None, n)]


_FINDER = _Finder()
