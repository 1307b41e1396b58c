"""Runs transformers' own tests of attention with onchip instead of the implementation they name.

    python tests/integrations/upstream.py CHECKOUT [--models llama,bert] [--kernel tiled]
        [pytest ...]
    python tests/integrations/upstream.py CHECKOUT --models all --resume --json FILE.json

CHECKOUT is a clone of transformers' repository at the installed version. In its tests "sdpa" and
"flash_attention_2" are replaced by names under which onchip is registered, and onchip is the
default implementation. Conditions about the package flash_attn, a GPU or limits of SDPA are
dropped. Nothing else changes: tolerances, inputs, models, retries of flaky tests, and all other
reasons to skip are upstream's.

A test that also fails with --baseline, SDPA under onchip's names, fails for a reason outside of
onchip: a bound that is too tight for random inputs, or a test of another version. With a JSON file,
--baseline runs the tests that failed in it.

On the CPU most calls run torch's own kernel: such a run tests masks, layouts and options. A run
with --kernel tiled tests onchip's arithmetic.

This is a program, not a module of onchip's tests: here `tests` is the package of the checkout.
"""

import argparse
import ast
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections import Counter
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest

from onchip.core.problem import UnsupportedError

NAMES = {"sdpa": "onchip", "flash_attention_2": "onchip2"}  # two, because both are keys of a dict
MODELS = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3"),
    *("gpt_oss", "phi", "phi3", "gpt2", "gpt_neox", "opt", "deepseek_v2", "deepseek_v3"),
    *("olmo2", "cohere", "cohere2", "starcoder2", "stablelm", "granite", "smollm3", "glm4"),
    *("ministral", "exaone4", "bert", "roberta", "modernbert", "vit", "bart", "whisper", "t5"),
)
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
# Tests of the implementation's name: they call no attention. Not among them:
# test_flash_attn_2_can_dispatch_composite_models, which expects flash_attn's refusal of models that
# onchip serves.
TESTS_OF_NAMES = (
    "test_attn_implementation_composite_models",
    "test_can_set_attention_dynamically*",
)
# Tests that fail for a reason outside of onchip, and whether they always do.
_NOISE = "bf16: eager is as far from fp32 as onchip, and one element exceeds the bound"
KNOWN = {
    "MixtralModelTest::test_flash_attn_2_equivalence": (_NOISE, False),
    "Glm4ModelTest::test_flash_attn_2_equivalence": (_NOISE, False),
    "DeepseekV4ModelTest::test_eager_matches_sdpa_generate": (
        "fp16: its compressor multiplies half by float, under eager as well",
        True,
    ),
}
# Variants that choose among torch's kernels: for onchip the same test again.
_TORCH_VARIANTS = "_sdpa_kernels"
# Modules that common tests import for other subjects; their classes are empty here.
_ABSENT = (
    *("tests.exporters.test_export", "tests.utils.test_configuration_utils"),
    *("tests.test_pipeline_mixin", "tests.test_fsdp_mixin", "tests.test_training_mixin"),
    *("tests.test_tensor_parallel_mixin", "tests.test_expert_parallel_mixin"),
    "fetch_hub_objects_for_ci",
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


class _Absent:
    """Loads a module in which every name is an empty class, which takes any arguments."""

    def create_module(self, spec):
        return ModuleType(spec.name)

    def exec_module(self, module):
        make = lambda kind, *args, **kwargs: object.__new__(kind)
        module.__getattr__ = lambda name: type(name, (), {"__new__": make})


class _Finder:
    """Finds the package `tests` in the checkout."""

    def __init__(self, checkout):
        self.checkout = checkout

    def find_spec(self, name, path=None, target=None):
        if name in _ABSENT:
            return importlib.util.spec_from_loader(name, _Absent())
        if name.partition(".")[0] != "tests":
            return None
        at = self.checkout.joinpath(*name.split("."))
        file = at / "__init__.py" if at.is_dir() else at.with_suffix(".py")
        if not file.exists():
            return None
        return importlib.util.spec_from_loader(name, _Loader(name, str(file)))


def _drop_conditions():
    from transformers import testing_utils

    for name in ("slow", "require_flash_attn", "require_torch_accelerator"):
        setattr(testing_utils, name, lambda test: test)


def _lift_limits(model):
    """Lift the limits of SDPA and flash_attn, a softcap or sinks, which onchip does not have."""
    for kind in model.__subclasses__():
        if kind._supports_attention_backend:
            kind._supports_sdpa, kind._compatible_flash_implementations = True, None
        _lift_limits(kind)


def _register(calls, baseline=False):
    """Register onchip under the new names, and as the default instead of SDPA. `calls` counts the
    calls of onchip and of SDPA, and the models that refuse onchip and keep SDPA. baseline: SDPA
    runs under the new names.
    """
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface

    from onchip.integrations import transformers as adapter

    def default_to_onchip(self, requested, *args, **kwargs):
        if requested is None and self._supports_sdpa:
            refuses = _refuses(type(self))
            calls["refused"] += refuses
            requested = None if refuses else NAMES["sdpa"]
        return choose(self, requested, *args, **kwargs)

    sdpa = AttentionInterface()["sdpa"]
    adapter.attend = _count_calls(calls, "onchip", adapter.attend)
    for name in NAMES.values():
        if baseline:
            AttentionInterface.register(name, _count_calls(calls, "onchip", sdpa))
            AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])
        else:
            adapter.register(name)
    choose = PreTrainedModel.get_correct_attn_implementation
    AttentionInterface.register("sdpa", _count_calls(calls, "sdpa", sdpa))
    PreTrainedModel.get_correct_attn_implementation = default_to_onchip


@cache
def _refuses(kind):
    """Whether a model, or one that it builds with the same config, refuses onchip's name."""
    from transformers import PreTrainedModel

    from onchip.models import interface_check

    if interface_check.reason(kind, NAMES["sdpa"], PreTrainedModel):
        return True
    built = [k for k in interface_check.named_in(kind, "__init__") if isinstance(k, type)]
    return any(_refuses(k) for k in built if issubclass(k, PreTrainedModel) and k != kind)


def _use_kernel(kernel):
    """Use one kernel for all calls; calls that it does not support are refused."""
    from onchip.integrations import transformers as adapter

    for name in ("attention", "varlen_attention"):
        setattr(adapter, name, partial(getattr(adapter, name), kernel=kernel))


def _count_calls(calls, name, attend):
    def counted(*args, **kwargs):
        calls[name] += 1
        return attend(*args, **kwargs)

    return counted


def _matches(tests, name):
    return _TORCH_VARIANTS not in name and any(fnmatchcase(name, pattern) for pattern in tests)


def _is_documented(sentence, test):
    """Whether this refusal is documented: attention returns no probabilities, and a model with
    attention of its own refuses onchip's name.
    """
    return "of its own" in sentence or (
        "output_attentions" in sentence and "output_attentions" in test
    )


class Upstream:
    """The pytest plugin: selects tests, and checks that each called onchip's attention."""

    def __init__(self, file=None, baseline=False):
        self.file, self.baseline = file, baseline  # file: JSON
        self.calls, self.skipped = Counter(), Counter()
        self.outcomes = {}  # by family and test

    def pytest_collection_modifyitems(self, config, items):
        from transformers import PreTrainedModel

        _lift_limits(PreTrainedModel)
        for item in items:
            reason, always = KNOWN.get("::".join(item.nodeid.split("::")[-2:]), (None, False))
            if reason is not None:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=always))
        kept = [item for item in items if _matches(TESTS + TESTS_OF_NAMES, item.name)]
        if self.baseline and self.file is not None:
            failed = {name: result["failed"] for name, result in _read(self.file).items()}
            kept = [item for item in kept if _test(item) in failed.get(_family(item), ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        """The outcomes of a family are written after its last test: the whole run takes hours."""
        result = yield
        if self.file is not None and (nextitem is None or nextitem.path.parent != item.path.parent):
            self.write(self.file)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        """A test that fell back to SDPA, or that ran no model, does not count."""
        self.calls.clear()
        result = yield
        if _matches(TESTS_OF_NAMES, item.name):
            return result
        if self.calls["refused"] and not self.calls["onchip"]:
            raise UnsupportedError("the model refuses onchip: it has attention of its own")
        if self.calls["sdpa"] and not self.calls["onchip"]:
            pytest.fail("passes with the attention of SDPA")
        if not self.calls["onchip"]:
            pytest.skip("passes without any attention but eager")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """A documented refusal is no failure."""
        report = yield
        error = None if call.excinfo is None else call.excinfo.value
        if isinstance(error, UnsupportedError) and _is_documented(str(error), item.name):
            report.outcome, report.wasxfail = "skipped", str(error)
        return report

    def pytest_runtest_logreport(self, report):
        self._record(report)
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def _record(self, report):
        """The outcome of a test is the outcome of its last stage that did not pass; if one of its
        subtests fails, the test fails.
        """
        path, _, test = report.nodeid.partition("::")
        tests = self.outcomes.setdefault(Path(path).parent.name, {})
        if tests.get(test) == "failed" or (report.passed and report.when != "call"):
            return
        refused = report.skipped and _is_documented(getattr(report, "wasxfail", ""), test)
        tests[test] = "refused" if refused else report.outcome

    def write(self, file):
        """Add the outcomes of this run to a JSON file: counts, and the tests that fail. A baseline
        sets the failed tests apart that fail with SDPA, too.
        """
        known = _read(file)
        for family, tests in self.outcomes.items():
            failed = sorted(test for test, outcome in tests.items() if outcome == "failed")
            if self.baseline:
                result = known[family]
                result["failed"] = sorted(set(result["failed"]) - set(failed))
                result["failed_with_sdpa"] = sorted({*result.get("failed_with_sdpa", ()), *failed})
            else:
                known[family] = {**Counter(tests.values()), "failed": failed}
        file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")

    def pytest_terminal_summary(self, terminalreporter):
        for reason, count in sorted(self.skipped.items()):
            terminalreporter.write_line(f"skipped {count:4} x {reason}")


def _read(file):
    return json.loads(file.read_text()) if file.exists() else {}


def _family(item):
    return item.path.parent.name


def _test(item):
    return item.nodeid.partition("::")[2]


def _families(checkout):
    """The families with tests in the checkout and a model in the installed version."""
    import transformers

    known = {folder.name for folder in (Path(transformers.__file__).parent / "models").iterdir()}
    files = (checkout / "tests" / "models").glob("*/test_modeling_*.py")
    return sorted({file.parent.name for file in files} & known)


def _files(checkout, models):
    for model in models:
        files = sorted((checkout / "tests" / "models" / model).glob("test_modeling_*.py"))
        if not files:
            sys.exit(f"{checkout} has no tests of {model!r}: is it a clone of transformers?")
        yield from map(str, files)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--kernel", help="the kernel of all calls")
    parser.add_argument("--json", type=Path, help="a file that outcomes by family are added to")
    parser.add_argument("--baseline", action="store_true", help="SDPA in the place of onchip")
    parser.add_argument("--resume", action="store_true", help="skip families that the file has")
    args, rest = parser.parse_known_args()
    checkout = args.checkout.resolve()
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.pop(0)  # the folder of this file, its flash_attn is not the package
    sys.path.insert(0, str(checkout))
    plugin = Upstream(args.json, args.baseline)
    _drop_conditions()
    _use_kernel(args.kernel)
    _register(plugin.calls, args.baseline)
    sys.meta_path.insert(0, _Finder(checkout))
    models = _families(checkout) if args.models == "all" else args.models.split(",")
    if args.resume:
        models = [model for model in models if model not in _read(args.json)]
    if args.baseline and args.json is not None:
        models = [name for name, result in _read(args.json).items() if result["failed"]]
    selection = [*_files(checkout, models), f"--rootdir={checkout}", "-c", os.devnull]
    plain = ["-q", "--noconftest", "--assert=plain", "-p", "no:cacheprovider", "-W", "ignore"]
    return pytest.main([*selection, *plain, *rest], [plugin])


if __name__ == "__main__":
    sys.exit(main())
