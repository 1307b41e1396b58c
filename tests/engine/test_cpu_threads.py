"""Small steps on the CPU use one thread, and torch's setting is restored."""

from types import SimpleNamespace

import pytest
import torch

from onchip.engine import cpu_threads
from onchip.engine.cpu_threads import MIN_PARALLEL_MACS, Span, StepThreads
from onchip.engine.speculation.config import SpeculativeConfig


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def step(*spans, rows=1):
    """The arguments of a step that computes these tokens, (start, stop) of each sequence."""
    return [Span(*span) for span in spans], rows


def test_work_is_that_of_a_layer_or_of_the_head(tiny):
    model = tiny.model()
    layer = sum(weight.numel() for weight in model.layers[0].parameters())
    own = StepThreads(model)
    pairs = 5 * 12 + 1 * 100
    assert own.estimate_work(*step((7, 12), (99, 100))) == (6 + 16) * layer + 2 * 32 * pairs
    assert own.estimate_work(*step((7, 8), rows=99)) == (99 + 16) * 32 * model.config.vocab_size


def test_small_steps_have_one_thread_and_large_ones_all(tiny, two_threads):
    own = StepThreads(tiny.model())
    with own.limit_for(*step((7, 8))):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    large = step((0, 2000))
    assert own.estimate_work(*large) >= MIN_PARALLEL_MACS
    with own.limit_for(*large):
        assert torch.get_num_threads() == 2
    with pytest.raises(KeyError), own.limit_for(*step((7, 8))):
        raise KeyError
    assert torch.get_num_threads() == 2


def test_the_engine_sets_threads_for_every_step(tiny, two_threads, monkeypatch):
    """For all steps; torch's number of threads is restored afterwards."""
    num_threads = []
    with tiny.engine() as one:
        torch.set_num_threads(2)  # tiny.model() sets one
        forward = one.model.forward
        note = lambda *args: num_threads.append(torch.get_num_threads()) or forward(*args)
        monkeypatch.setattr(one.model, "forward", note)
        tiny.ask(one)
        tiny.drain(one)
        assert set(num_threads) == {1} and torch.get_num_threads() == 2
        monkeypatch.setattr(cpu_threads, "MIN_PARALLEL_MACS", 0)
        num_threads.clear()
        tiny.ask(one)
        tiny.drain(one)
        assert set(num_threads) == {2}


def test_other_devices_keep_torchs_threads(tiny, two_threads):
    model = tiny.model()
    facts = {"config": model.config, "layer_weights": model.layer_weights}
    own = StepThreads(SimpleNamespace(**facts, device=torch.device("meta")))
    with own.limit_for(*step((7, 8))):
        assert torch.get_num_threads() == 2


def test_drafts_are_limited_too(tiny, two_threads, monkeypatch):
    num_threads = []
    options = {"method": "draft", "model": tiny.model(), "num_speculative_tokens": 2}
    with tiny.engine(
        speculative_config=SpeculativeConfig(**options), draft_model=tiny.model()
    ) as one:
        torch.set_num_threads(2)
        draft = one._draft.model
        forward = draft.forward
        note = lambda *args: num_threads.append(torch.get_num_threads()) or forward(*args)
        monkeypatch.setattr(draft, "forward", note)
        tiny.ask(one)
        tiny.drain(one)
    assert set(num_threads) == {1}
