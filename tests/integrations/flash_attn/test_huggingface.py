"""attn_implementation="flash_attention_2" of transformers runs through the drop-in, anywhere."""

import copy

import pytest
import torch

from onchip.integrations import flash_attn as fa

transformers = pytest.importorskip("transformers")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
CASES = {
    "LlamaForCausalLM": transformers.LlamaConfig(**SIZES),
    "MistralForCausalLM": transformers.MistralConfig(**SIZES, sliding_window=7),
    "Gemma2ForCausalLM": transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=7),
}


@pytest.fixture(autouse=True)
def _drop_in():
    with fa.installed(transformers=True):
        yield


def models(name):
    """The same weights twice: through flash_attn, and eager."""
    config, cls = copy.deepcopy(CASES[name]), getattr(transformers, name)
    torch.manual_seed(0)
    eager = cls._from_config(config, attn_implementation="eager")
    flash = cls._from_config(copy.deepcopy(config), attn_implementation="flash_attention_2")
    flash.load_state_dict(eager.state_dict())
    return flash.eval(), eager.eval()


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_equal_eager(name):
    """With padding on the left; a sliding window, a softcap, grouped heads."""
    flash, eager = models(name)
    ids = torch.randint(97, (3, 21))
    mask = torch.ones_like(ids)
    mask[0, :9] = mask[1, :2] = 0
    with torch.no_grad():
        got, want = (m(input_ids=ids, attention_mask=mask).logits for m in (flash, eager))
        tokens = [
            m.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
            for m in (flash, eager)
        ]
    seen = mask.bool()
    torch.testing.assert_close(got[seen], want[seen], rtol=1e-4, atol=1e-4)
    assert torch.equal(*tokens)
    assert flash.config._attn_implementation == "flash_attention_2"


def test_training_on_packed_documents():
    """position_ids that begin anew make transformers call flash_attn_varlen_func: the loss and the
    gradients equal those of single documents.
    """
    flash, eager = models("LlamaForCausalLM")
    ids = torch.randint(97, (1, 24))
    lengths = [5, 11, 8]
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    logits = flash(input_ids=ids, position_ids=places, use_cache=False).logits
    alone = [eager(input_ids=part).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(logits, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)
    logits.square().sum().backward()
    sum(part.square().sum() for part in alone).backward()
    for (name, a), b in zip(flash.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.slow
def test_continuous_batching():
    """generate_batch, which accepts flash names and no custom ones: packed prompts through
    flash_attn_varlen_func; on a GPU decoding steps through flash_attn_with_kvcache.
    """
    if DEVICE == "cpu":
        pytest.importorskip("transformers", minversion="5.22")  # before, it needs a GPU or psutil
    flash, eager = models("LlamaForCausalLM")
    prompts = [torch.randint(1, 97, (n,)).tolist() for n in (5, 33, 1)]
    greedy = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = [eager.generate(torch.tensor([p]), **greedy)[0, len(p) :].tolist() for p in prompts]
    outputs = flash.to(DEVICE).generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(**greedy),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=128
        ),
    )
    assert [outputs[name].generated_tokens for name in sorted(outputs)] == want


def test_with_a_gpu_a_plain_install_is_enough(monkeypatch):
    """transformers that is imported after a plain install() sees a distribution and a version."""
    import importlib.metadata

    from transformers.utils import import_utils

    fa.uninstall()
    check = import_utils.is_flash_attn_2_available
    with fa.installed():
        distributions = importlib.metadata.packages_distributions()
        monkeypatch.setattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING", distributions)
        monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
        check.cache_clear()
        assert check() and import_utils.is_flash_attn_greater_or_equal("2.8")
    check.cache_clear()
    import_utils.is_flash_attn_greater_or_equal.cache_clear()


def test_after_uninstall_transformers_checks_again():
    fa.uninstall()
    from transformers.utils import import_utils, is_flash_attn_2_available

    if not torch.cuda.is_available():
        assert not is_flash_attn_2_available()
    assert "flash_attn" not in import_utils.PACKAGE_DISTRIBUTION_MAPPING
    with pytest.raises((ImportError, ValueError)):
        models("LlamaForCausalLM")
