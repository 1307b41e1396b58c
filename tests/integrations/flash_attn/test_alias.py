"""Programs import flash_attn, and get onchip while it is installed."""

import importlib.metadata
import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest

import onchip
import onchip.integrations
from onchip.integrations import flash_attn as fa
from onchip.integrations.flash_attn.names import FLASH_ATTN, FLASH_ATTN_3


def loaded():
    return [name for name in sys.modules if name.split(".")[0].startswith("flash_attn")]


def test_importing_installs_nothing():
    code = (
        "import sys, onchip.integrations.flash_attn; "
        "assert 'flash_attn' not in sys.modules and 'transformers' not in sys.modules; "
        "assert not [f for f in sys.meta_path if 'onchip' in type(f).__module__]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(onchip.__file__).parents[1])


def test_imports_while_it_is_installed():
    with fa.installed():
        import flash_attn
        import flash_attn.flash_attn_interface as interface
        from flash_attn import bert_padding, flash_attn_func
        from flash_attn.layers.rotary import apply_rotary_emb

        assert flash_attn_func is fa.flash_attn_func is interface.flash_attn_func
        assert callable(apply_rotary_emb) and callable(bert_padding.unpad_input)
        assert sorted(loaded()) == sorted(FLASH_ATTN)
        assert flash_attn.layers.rotary.apply_rotary_emb is apply_rotary_emb
        for name in fa.__all__:
            if name.startswith("flash_attn_"):
                assert getattr(flash_attn, name) is getattr(fa, name)
        assert "onchip" in flash_attn.__doc__ and flash_attn.__file__ == fa.__file__
        with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.unheard_of"):
            import flash_attn.unheard_of
        with pytest.raises(ImportError):
            from flash_attn import flash_attn_unheard_of  # noqa: F401
    assert loaded() == []
    with pytest.raises(ModuleNotFoundError):
        import flash_attn


def test_checks_for_the_package_find_it():
    """By spec, by module, by distribution, as programs check."""
    assert importlib.util.find_spec("flash_attn") is None
    finders = list(sys.meta_path)
    with fa.installed():
        assert importlib.util.find_spec("flash_attn") is not None
        assert importlib.util.find_spec("flash_attn.bert_padding") is not None
        for name in ("flash_attn", "flash-attn", "Flash-Attn"):
            assert importlib.metadata.version(name) == fa.__version__
        assert sys.modules["flash_attn"].__version__ == fa.__version__
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        assert importlib.metadata.version("torch")  # others are found as before
    assert sys.meta_path == finders
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


def test_flash_attention_3_is_installed_on_request():
    """Not by default, because programs that find it prefer it."""
    with fa.installed():
        assert importlib.util.find_spec("flash_attn_interface") is None
        fa.install(flash_attn_3=True)
        import flash_attn_interface
        from flash_attn_3.flash_attn_interface import flash_attn_func

        assert flash_attn_interface.flash_attn_func is flash_attn_func
        assert flash_attn_func is not fa.flash_attn_func
        assert importlib.metadata.version("flash-attn-3").startswith("3.")
        assert sorted(loaded()) == sorted(FLASH_ATTN | FLASH_ATTN_3)
    assert loaded() == []


def test_unsupported_names_name_a_replacement():
    """Modules and names; hasattr and find_spec do not raise."""
    with fa.installed():
        with pytest.raises(ImportError, match=r"does not support flash_attn.models: onchip.models"):
            import flash_attn.models.gpt
        import flash_attn.modules.mha

        assert not hasattr(flash_attn.modules.mha, "ParallelMHA")
        with pytest.raises(ImportError, match=r"mha.ParallelMHA: onchip.parallel distributes"):
            from flash_attn.modules.mha import ParallelMHA  # noqa: F401


def test_installing_twice_is_the_same_as_once():
    fa.install()
    module = sys.modules["flash_attn"]
    with fa.installed():
        assert sys.modules["flash_attn"] is module
    assert sys.modules["flash_attn"] is module  # it was installed before
    fa.uninstall()
    fa.uninstall()
    assert loaded() == []


def test_a_real_flash_attn_is_not_replaced(monkeypatch):
    real = types.ModuleType("flash_attn")
    real.__file__ = "/somewhere/flash_attn/__init__.py"
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    with pytest.raises(RuntimeError, match="loaded already, from /somewhere/flash_attn"):
        fa.install()
    fa.uninstall()
    assert sys.modules["flash_attn"] is real


def test_adapters_are_lazy_and_named():
    assert onchip.integrations.flash_attn is fa
    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        _ = onchip.integrations.flash
