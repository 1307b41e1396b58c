"""A transformers model in an engine gives the tokens of transformers."""

import threading
from functools import partial

import pytest
import torch

from onchip import LLM, BeamSearchParams, SamplingParams, UnsupportedError
from onchip.cli import main
from onchip.engine import ExecutionConfig, PoolingParams
from onchip.engine import llm as llm_module
from tests.models import foreign_models

PROMPTS = [[5, 9, 5, 7], list(range(10, 41)), [3], [*range(20, 31)], [*range(10, 33), 90]]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


@pytest.fixture(autouse=True)
def _transformers():
    pytest.importorskip("transformers")


@pytest.fixture
def saved(tmp_path):
    def save(kind):
        foreign_models.model(kind).save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return save


def serve(model, **options):
    small = {"max_model_len": 128, "block_size": 4, "max_num_seqs": 4, "swap_space": 0}
    return LLM(model, **small | {"num_pages": 90, "max_num_batched_tokens": 9} | options)


def token_ids_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def expected(kind, count=14):
    return [foreign_models.greedy(foreign_models.model(kind), prompt, count) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", foreign_models.mark_most_slow(foreign_models.SERVED))
def test_greedy_tokens_are_those_of_transformers(kind, saved):
    """Prompts of 1 to 31 tokens in chunks of at most 9, pages of 4 slots, shared prefixes."""
    theirs = expected(kind)
    assert len({token for tokens in theirs for token in tokens}) > 12, "too dull to tell"
    with serve(saved(kind)) as llm:
        assert token_ids_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == theirs


@pytest.mark.parametrize(("how", "gib"), [("recompute", 0), ("swap", 1)])
def test_preemption_changes_no_token(how, gib, saved):
    """Pages for two of the five sequences at their longest."""
    with serve(saved("granite_swa"), num_pages=20, swap_space=gib) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert getattr(llm.stats(), f"preempted_by_{how}") > 0
    assert token_ids_of(outputs) == expected("granite_swa")


def test_pages_in_host_memory_change_no_token(saved):
    """Sinks and windows, in a cache of 20 tokens."""
    with serve(saved("granite_swa"), num_pages=6, kv_offloading_size=0.01) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert llm.stats().pages_streamed > 0
    assert token_ids_of(outputs) == expected("granite_swa")


def test_embeddings_are_refused_in_a_sentence(saved):
    """A step of such a model returns logits: their rows are no hidden states."""
    with serve(saved("granite_swa")) as llm:
        assert llm.engine.embedding_size is None
        with pytest.raises(ValueError, match="this model has no embeddings"):
            llm.engine.add([1, 2], PoolingParams())


def test_shared_pages_that_are_read_once_change_no_token(saved, monkeypatch):
    """Sinks count once, layers with a window read all pages."""
    monkeypatch.setattr(llm_module, "ExecutionConfig", partial(_with_cascade, "always"))
    with serve(saved("granite_swa")) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert llm.stats().cascade_steps > 0
    assert token_ids_of(outputs) == expected("granite_swa")


def _with_cascade(mode, **options):
    return ExecutionConfig(**options | {"cascade": mode})


@torch.no_grad()
def test_logprobs_forks_and_beams(saved):
    with serve(saved("olmoe")) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, n=2, prompt_logprobs=0, logprobs=0)
        (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
        (beams,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(3, 4, ignore_eos=True))
    text = torch.tensor([PROMPTS[1] + list(output.outputs[0].token_ids)])
    logits = foreign_models.model("olmoe")(text, use_cache=False).logits[0]
    exact = logits.log_softmax(-1)[:-1].gather(1, text[0, 1:, None])[:, 0]
    logprobs = [next(iter(one.values())).logprob for one in output.prompt_logprobs[1:]]
    logprobs += [next(iter(one.values())).logprob for one in output.outputs[0].logprobs]
    torch.testing.assert_close(torch.tensor(logprobs), exact, rtol=0, atol=1e-4)
    assert output.outputs[0].token_ids == output.outputs[1].token_ids
    assert beams.outputs[0].cumulative_logprob >= beams.outputs[1].cumulative_logprob


@pytest.mark.gpu
@pytest.mark.parametrize("kind", foreign_models.SERVED)
def test_a_gpu_gives_the_same_tokens(kind, saved):
    """In fp32; the self-check bounds the differences of 16 bits and must pass."""
    with serve(saved(kind), device="cuda", dtype="float32", num_pages=None) as llm:
        assert token_ids_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected(kind)
    with serve(saved(kind), device="cuda", dtype="bfloat16", num_pages=20) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert all(len(tokens) == 14 for tokens in token_ids_of(outputs))


def test_two_engines_in_two_threads_do_not_interfere(saved):
    """Even with one model: it holds no state of a step."""
    folder, answers = saved("olmo2"), {}

    def run(name, model):
        with serve(model) as llm:
            answers[name] = token_ids_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))

    with serve(folder) as llm:
        shared = llm.engine.model
        threads = [threading.Thread(target=run, args=(i, shared)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {0: expected("olmo2"), 1: expected("olmo2")}


def test_it_runs_on_one_rank_only(saved):
    with pytest.raises(ValueError, match="runs through transformers, on one device"):
        serve(saved("olmo2"), tensor_parallel_size=2)


def test_an_unsupported_model_is_rejected_by_the_engine(tmp_path):
    foreign_models.config("mamba").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(UnsupportedError, match="most weights are stored as none"):
        serve(tmp_path)


def test_the_command_line_warns_that_it_is_slower(saved, capsys):
    folder = str(saved("olmo2"))
    assert main(["doctor", "--model", folder]) == 0
    assert "runs through transformers, slower" in capsys.readouterr().out
    assert main(["generate", "x", "--model", folder]) == 2  # it has no tokenizer
    assert f"{folder} runs through transformers, slower" in capsys.readouterr().err
