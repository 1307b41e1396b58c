"""transformers' own tests of attention, with our implementation where they name another.

    python tests/adapters/upstream.py CHECKOUT [--models llama,bert] [arguments of pytest]

CHECKOUT is a clone of transformers' repository at the version that is installed. Its tests are read
with "sdpa" and "flash_attention_2" replaced by names under which the adapter is registered, and a
model that is asked for no implementation takes ours. The conditions that only speak of the package
flash_attn or of a GPU are dropped, and so are the retries of tests that are called flaky. Nothing
else changes: tolerances, inputs, models and all other reasons to skip are theirs.

This is a program, not a module of our tests: `tests` is the package of the checkout here.
"""

import argparse
import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from onchip.problem import UnsupportedError

NAMES = {"sdpa": "onchip", "flash_attention_2": "onchip2"}  # two, because both are keys of a dict
MODELS = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3"),
    *("gpt_oss", "phi", "phi3", "gpt2", "gpt_neox", "opt", "deepseek_v2", "deepseek_v3", "llama4"),
    *("olmo2", "cohere", "cohere2", "starcoder2", "stablelm", "granite", "smollm3", "glm4"),
    *("ministral", "exaone4", "bert", "roberta", "modernbert", "vit", "bart", "whisper", "t5"),
)
# Whole names, or up to the last character before a star.
TESTS = (
    "test_eager_matches_sdpa_inference*",
    "test_eager_matches_sdpa_generate",
    "test_eager_matches_fa2_generate",
    "test_flash_attn_2_equivalence",
    "test_flash_attn_2_inference_equivalence",
    "test_flash_attn_2_inference_equivalence_right_padding",
    "test_flash_attn_2_from_config",
    "test_sdpa_padding_matches_padding_free_with_position_ids",
    "test_flash_attention_2_padding_matches_padding_free_with_position_ids*",
    "test_flash_attention_2_continue_generate_with_position_ids",
    "test_left_padding_compatibility",
    "test_custom_4d_attention_mask",
    "test_batching_equivalence",
    "test_training_gradient_checkpointing*",
    "test_generate_with_static_cache",
    "test_generate_continue_from_past_key_values",
    "test_generate_from_inputs_embeds_with_static_cache",
    "test_beam_search_generate",
)
# Variants that choose among torch's kernels: to us the same test again.
_SAME_TO_US = "_sdpa_kernels"
# What common tests import for other subjects, with packages of its own: its classes are empty here.
_ABSENT = (
    *("tests.exporters.test_export", "tests.utils.test_configuration_utils"),
    *("tests.test_pipeline_mixin", "tests.test_fsdp_mixin", "tests.test_training_mixin"),
    *("tests.test_tensor_parallel_mixin", "tests.test_expert_parallel_mixin"),
)


class _Renamed(ast.NodeTransformer):
    def visit_Constant(self, node):
        name = NAMES.get(node.value) if isinstance(node.value, str) else None
        return node if name is None else ast.copy_location(ast.Constant(name), node)


class _Loader(importlib.machinery.SourceFileLoader):
    """Reads a module with the names replaced; neither reads nor writes byte code."""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        tree = _Renamed().visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, "exec", dont_inherit=True)


class _Absent(importlib.machinery.ModuleSpec):
    """A module in which every name is an empty class."""

    class _Loader:
        def create_module(self, spec):
            return ModuleType(spec.name)

        def exec_module(self, module):
            module.__getattr__ = lambda name: type(name, (), {})

    def __init__(self, name):
        super().__init__(name, self._Loader())


class _Finder:
    """Finds the package `tests` in the checkout."""

    def __init__(self, checkout):
        self.checkout = checkout

    def find_spec(self, name, path=None, target=None):
        if name in _ABSENT:
            return _Absent(name)
        if name.partition(".")[0] != "tests":
            return None
        at = self.checkout.joinpath(*name.split("."))
        file = at / "__init__.py" if at.is_dir() else at.with_suffix(".py")
        if not file.exists():
            return None
        return importlib.util.spec_from_loader(name, _Loader(name, str(file)))


def _drop_conditions():
    from transformers import testing_utils

    always = lambda test: test
    for name in ("slow", "require_flash_attn", "require_torch_accelerator"):
        setattr(testing_utils, name, always)
    testing_utils.is_flaky = lambda *_, **__: always


def _register(calls):
    """Our implementation under the new names and as the default, wherever SDPA would be; calls
    counts who is asked for attention, us or SDPA.
    """
    from transformers import AttentionInterface, PreTrainedModel

    from onchip.adapters import transformers as adapter

    choose = PreTrainedModel.get_correct_attn_implementation

    def ours_by_default(self, requested, *args, **kwargs):
        if requested is None and self._supports_sdpa:
            requested = NAMES["sdpa"]
        return choose(self, requested, *args, **kwargs)

    adapter.attend = _counted(calls, "ours", adapter.attend)
    for name in NAMES.values():
        adapter.register(name)
    theirs = AttentionInterface()["sdpa"]
    AttentionInterface.register("sdpa", _counted(calls, "theirs", theirs))
    PreTrainedModel.get_correct_attn_implementation = ours_by_default


def _counted(calls, whose, attend):
    def counted(*args, **kwargs):
        calls[whose] += 1
        return attend(*args, **kwargs)

    return counted


def _selected(name):
    base = name.partition("[")[0]
    fits = lambda one: base.startswith(one[:-1]) if one.endswith("*") else base == one
    return _SAME_TO_US not in base and any(map(fits, TESTS))


class Upstream:
    """What pytest has to know: which tests, and whether each asked us for attention."""

    def __init__(self):
        self.calls, self.skipped = Counter(), Counter()

    def pytest_collection_modifyitems(self, config, items):
        kept = [item for item in items if _selected(item.name)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        """A test that fell back to SDPA, or that had no model to run, has shown nothing."""
        self.calls.clear()
        result = yield
        if self.calls["theirs"] and not self.calls["ours"]:
            pytest.fail("passes with the attention of SDPA")
        if not self.calls["ours"]:
            pytest.skip("passes without any attention but eager")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """That attention gives no probabilities is a refusal that documentation promises."""
        report = yield
        refused = call.excinfo is not None and call.excinfo.errisinstance(UnsupportedError)
        if refused and "output_attentions" in item.name:
            report.outcome, report.wasxfail = "skipped", str(call.excinfo.value)
        return report

    def pytest_runtest_logreport(self, report):
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_terminal_summary(self, terminalreporter):
        for reason, count in sorted(self.skipped.items()):
            terminalreporter.write_line(f"skipped {count:4} x {reason}")


def _files(checkout, models):
    for model in models:
        found = sorted((checkout / "tests" / "models" / model).glob("test_modeling_*.py"))
        if not found:
            sys.exit(f"{checkout} has no tests of {model!r}: is it a clone of transformers?")
        yield from map(str, found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    said, rest = parser.parse_known_args()
    checkout = said.checkout.resolve()
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.pop(0)  # the folder of this file, which has a flash_attn that is none
    sys.path.insert(0, str(checkout))
    plugin = Upstream()
    _drop_conditions()
    _register(plugin.calls)
    sys.meta_path.insert(0, _Finder(checkout))
    given = [*_files(checkout, said.models.split(",")), f"--rootdir={checkout}", "-c", os.devnull]
    plain = ["-q", "--noconftest", "--assert=plain", "-p", "no:cacheprovider", "-W", "ignore"]
    return pytest.main([*given, *plain, *rest], [plugin])


if __name__ == "__main__":
    sys.exit(main())
