"""Writes docs/transformers.md: every family of the installed transformers, and whether its models
take attn_implementation="onchip".

    python tests/integrations/table.py

Verdicts are computed from the classes, as when the name is set on a model. Counts of transformers'
own tests are from docs/transformers.json, to which `upstream.py --json` adds.
"""

import importlib
import json
import sys
import textwrap
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RESULTS = DOCS / "transformers.md", DOCS / "transformers.json"
HEAD = """# Families of transformers

[`attn_implementation="onchip"`](integrations.md#transformers) in transformers {version}, by family:
a folder of its `models`. Written by `python tests/integrations/table.py`; a test compares this page
with the classes of the installed version. The verdict is the result of setting the name on a model:

| verdict | families | |
|---|---|---|
{counts}
A model inside another, such as the image encoder of a language model, has its own verdict:
`attn_implementation={{"text_config": "onchip"}}` uses onchip for the supported part.

The numbers count transformers' own tests of attention, with onchip instead of SDPA and flash_attn
([method](integrations.md#transformers-own-tests)), on CPUs with and without bf16: {passed:,}
passed, {refused:,} raised a documented refusal, {failed_with_sdpa:,} fail with SDPA in the place of
onchip too (tight bounds, tests of another version), {failed:,} failed, over {families} families.
Those that failed compare packed with padded sequences in bf16, within one unit in the last place:
1 to 10 of 6,930 logits were beyond it; in fp32 these tests pass. `-`: not run, because the file of
tests cannot be imported here or has no test of attention. The tests are those of 5.22.2; what it
does not ship is from commit d56c55bf (5.16.0.dev0).

"""
MEANINGS = {
    "supported": "its attention modules look up the implementation",
    "in part": "some of its models do, and the named ones refuse",
    "refused": "none does: `UnsupportedError`",
    "inner models": "it has no attention itself; each model inside it has its own verdict",
}
COLUMNS = ("family", "verdict", "passed", "refused", "skipped", "fails with SDPA too", "failed")
REASONS = "\n## Reasons\n\nWhy families are refused, whole or in part:\n\n"
TABLE = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"


def families():
    """(family, modules of models) of the installed transformers."""
    import transformers

    folders = (Path(transformers.__file__).parent / "models").iterdir()
    for folder in sorted(folders):
        names = [file.stem for file in sorted(folder.glob("modeling_*.py"))]
        modules = [_module(f"transformers.models.{folder.name}.{name}") for name in names]
        if any(modules):
            yield folder.name, [module for module in modules if module is not None]


def _module(name):
    """The module; None if it needs a package that is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def verdict(modules):
    """(verdict, reason) of the models that are defined in modules."""
    from transformers import PreTrainedModel

    from onchip.models import interface_check

    reasons, looks_up = {}, False
    for kind in [kind for module in modules for kind in _models(module, PreTrainedModel)]:
        reason = interface_check.reason(kind, "onchip", PreTrainedModel)
        if reason is not None:
            reasons.setdefault(reason.partition(":")[0], []).append(f"`{kind.__name__}`")
        elif any(map(interface_check.looks_up, interface_check.classes_of(kind, PreTrainedModel))):
            looks_up = True
    if not reasons:
        return ("supported" if looks_up else "inner models"), ""
    sentences = [f"{', '.join(kinds)} {reason}" for reason, kinds in reasons.items()]
    return ("in part" if looks_up else "refused"), "; ".join(sentences)


def _models(module, base):
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, base) and kind.__module__ == module.__name__]


def page():
    import transformers

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = [(family, *verdict(modules)) for family, modules in families()]
    counts = Counter(kind for _, kind, _ in rows)
    summary = "".join(f"| {kind} | {counts[kind]} | {MEANINGS[kind]} |\n" for kind in MEANINGS)
    sums = {name: sum(_count(result, name) for result in results.values()) for name in _OUTCOMES}
    head = HEAD.format(
        version=transformers.__version__, counts=summary, families=len(results), **sums
    )
    lines = [_line(family, kind, results.get(family)) for family, kind, _ in rows]
    reasons = [_reason(family, why) for family, _, why in rows if why]
    return "".join([head, TABLE, *lines, REASONS, *reasons])


_OUTCOMES = ("passed", "refused", "skipped", "failed_with_sdpa", "failed")


def _count(result, outcome):
    tests = result.get(outcome, 0)
    return tests if isinstance(tests, int) else len(tests)


def _line(family, kind, result):
    numbers = ["-" if result is None else f"{_count(result, name)}" for name in _OUTCOMES]
    return f"| {family} | {kind} | {' | '.join(numbers)} |\n"


def _reason(family, why):
    return textwrap.fill(f"- {family}: {why}", 120, subsequent_indent="  ") + "\n"


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, its flash_attn is not the package
    PAGE.write_text(page())
