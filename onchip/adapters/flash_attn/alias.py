"""`import flash_attn` without flash_attn: modules of that name whose functions are onchip's."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType

VERSION = "2.8.3"  # of flash_attn, whose functions these are
INTERFACE = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)
PADDING = (
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
)
ROTARY = (
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
)
_HERE = "onchip.adapters.flash_attn"


def install(*, transformers: bool = False) -> None:
    """From now on `import flash_attn` and its submodules flash_attn_interface, bert_padding and
    layers.rotary give onchip's functions, and importlib.metadata knows a flash-attn 2.8.3.

    transformers: that package is imported, and told that flash_attn is there, on the CPU too, so
    that attn_implementation="flash_attention_2" works. A second call changes nothing. RuntimeError
    if the real flash_attn is loaded: programs hold on to its functions.
    """
    if not is_installed():
        _refuse_the_real_one()
        sys.modules.update({module.__name__: module for module in _modules()})
        sys.meta_path.insert(0, _FINDER)
    if transformers:
        import_module(f"{_HERE}.huggingface").admit()


def uninstall() -> None:
    """Undo install(). What a program has imported stays with it."""
    if not is_installed():
        return
    if huggingface := sys.modules.get(f"{_HERE}.huggingface"):
        huggingface.dismiss()
    sys.meta_path.remove(_FINDER)
    for name in [n for n, module in sys.modules.items() if isinstance(module, Alias)]:
        del sys.modules[name]


@contextmanager
def installed(*, transformers: bool = False) -> Iterator[None]:
    """install() for a while; nothing is undone if it was installed before."""
    before = is_installed()
    install(transformers=transformers)
    try:
        yield
    finally:
        if not before:
            uninstall()


def is_installed() -> bool:
    return isinstance(sys.modules.get("flash_attn"), Alias)


class Alias(ModuleType):
    """A module that stands in for one of flash_attn."""


def _refuse_the_real_one() -> None:
    real = sys.modules.get("flash_attn")
    if real is not None:
        raise RuntimeError(
            f"flash_attn is loaded already, from {getattr(real, '__file__', None)}: call install()"
            " before anything imports it, or import from onchip.adapters.flash_attn"
        )


def _modules() -> list[Alias]:
    """Parents first; each is an attribute of its parent."""
    ours = {name: import_module(f"{_HERE}.{name}") for name in ("bert_padding", "rotary")}
    package = import_module(_HERE)
    flash_attn = _module("flash_attn", package, INTERFACE, is_package=True)
    flash_attn.__dict__["__version__"] = VERSION
    interface = _module("flash_attn.flash_attn_interface", package, INTERFACE)
    padding = _module("flash_attn.bert_padding", ours["bert_padding"], PADDING)
    layers = _module("flash_attn.layers", package, (), is_package=True)
    rotary = _module("flash_attn.layers.rotary", ours["rotary"], ROTARY)
    flash_attn.__dict__.update(flash_attn_interface=interface, bert_padding=padding, layers=layers)
    layers.__dict__["rotary"] = rotary
    return [flash_attn, interface, padding, layers, rotary]


def _module(
    name: str, source: ModuleType, names: tuple[str, ...], is_package: bool = False
) -> Alias:
    module = Alias(name, f"{name}, computed by onchip: see onchip.adapters.flash_attn.")
    module.__spec__ = ModuleSpec(name, None, origin=source.__file__, is_package=is_package)
    module.__file__ = source.__file__
    if is_package:
        module.__path__ = []  # nothing else of flash_attn can be imported
    module.__dict__.update({n: getattr(source, n) for n in names}, __all__=list(names))
    return module


class _Distribution(Distribution):
    """What importlib.metadata says about it."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
            "top_level.txt": "flash_attn\n",
        }
        return texts.get(filename)

    def locate_file(self, path) -> Path:
        return Path(__file__).parent / path  # no file of it exists


class _Finder(DistributionFinder):
    """Finds the distribution; modules it leaves to others."""

    def find_spec(self, fullname, path=None, target=None) -> None:
        return None

    def find_distributions(self, context=DistributionFinder.Context()) -> list[Distribution]:  # noqa: B008
        name = context.name
        asked = name is None or name.replace("_", "-").lower() == "flash-attn"
        return [_Distribution()] if asked else []


_FINDER = _Finder()
