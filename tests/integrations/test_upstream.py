"""transformers' own tests of attention pass with onchip instead of their implementation."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

pytest.importorskip("transformers")

PROGRAM = Path(__file__).with_name("upstream.py")
CHECKOUT = os.environ.get("ONCHIP_TRANSFORMERS")


def run(checkout, *options):
    """Exit status and output of the program over a clone of transformers' repository."""
    paths = [str(PROGRAM.parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(PROGRAM), str(checkout), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    not CHECKOUT, reason="ONCHIP_TRANSFORMERS names no clone of transformers' repository"
)
def test_all_tests_that_apply_pass():
    status, output = run(CHECKOUT)
    assert status == 0, output[-8000:]


@pytest.mark.slow
def test_the_page_of_families_agrees_with_the_models():
    """Counts of tests are from a run that takes hours: they are read, not measured."""
    import transformers

    from tests.integrations import table

    published = table.PAGE.read_text()
    if f"transformers {transformers.__version__}," not in published:
        pytest.skip("the page is of another version of transformers")
    assert published == table.page(), "run python tests/integrations/table.py"


@pytest.mark.slow
def test_names_are_replaced_and_a_test_without_onchip_does_not_pass(tmp_path):
    """A checkout with three tests: of onchip's attention, of SDPA's, and without attention."""
    folder = tmp_path / "tests" / "models" / "llama"
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    (folder / "test_modeling_llama.py").write_text(
        dedent("""
            import torch
            from transformers import LlamaConfig, LlamaForCausalLM
            from transformers.testing_utils import require_flash_attn, slow

            SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}

            @slow
            @require_flash_attn
            def test_eager_matches_sdpa_generate():
                config = LlamaConfig(**SIZES, num_attention_heads=2, vocab_size=99)
                for name in ("sdpa", "flash_attention_2", None):
                    one = LlamaForCausalLM._from_config(config, attn_implementation=name)
                    assert "onchip" in one.config._attn_implementation
                    one(torch.arange(11)[None])

            def test_custom_4d_attention_mask():
                config = LlamaConfig(**SIZES, num_attention_heads=2, vocab_size=99)
                LlamaForCausalLM._from_config(config, attn_implementation="sd" + "pa")(
                    torch.arange(11)[None]
                )

            def test_batching_equivalence():
                pass

            def test_of_something_else():
                raise AssertionError
        """)
    )
    status, output = run(tmp_path, "--models", "llama")
    assert status == 1 and "1 failed, 1 passed, 1 skipped, 1 deselected" in output, output
    assert "passes with the attention of SDPA" in output
