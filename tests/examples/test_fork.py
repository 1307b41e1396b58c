"""examples/fork.py: sharing changes where keys lie, never what is generated."""

import importlib.util
from pathlib import Path

import pytest
import torch

import onchip

PATH = Path(__file__).parents[2] / "examples" / "fork.py"
SPEC = importlib.util.spec_from_file_location("fork_example", PATH)
fork = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fork)

PROMPT = [(5 * i + 3) % 97 for i in range(21)]
STEPS = 19


def dense(model, tokens):
    """Log-probabilities after the last token, with no cache: everything is computed again."""

    def attend(layer, q, k, v):
        return onchip.attention(q[None], k[None], v[None], causal=True)[0]

    return model(torch.tensor(tokens), torch.arange(len(tokens)), attend)[-1]


def sampled_alone(model, seed):
    generator, tokens = torch.Generator().manual_seed(seed), list(PROMPT)
    for _ in range(STEPS):
        probabilities = dense(model, tokens).exp()
        tokens += torch.multinomial(probabilities, 1, generator=generator).tolist()
    return tokens[len(PROMPT) :]


def searched_alone(model, width):
    beams = [(0.0, [])]
    for _ in range(STEPS):
        rows = [dense(model, PROMPT + tokens) for _, tokens in beams]
        grown = [
            (score + float(row[t]), [*tokens, t])
            for (score, tokens), row in zip(beams, rows, strict=True)
            for t in row.topk(width).indices.tolist()
        ]
        beams = sorted(grown, key=lambda beam: -beam[0])[:width]
    return [tokens for _, tokens in beams]


@pytest.fixture(params=[1, 8, 16], ids=lambda size: f"pages of {size}")
def cache(request):
    return fork.new_cache(num_pages=1024 // request.param, page_size=request.param)


def test_samples_are_those_of_independent_runs(cache):
    model, watch = fork.Decoder(), fork.PageWatch(cache)
    outputs = fork.sample(model, cache, PROMPT, 3, STEPS, watch)
    assert outputs == [sampled_alone(model, seed) for seed in range(3)]
    assert len(set(map(tuple, outputs))) == 3
    check_pages(cache, watch)


def test_beams_are_those_of_a_search_without_a_cache(cache):
    model, watch = fork.Decoder(), fork.PageWatch(cache)
    outputs = fork.search(model, cache, PROMPT, 4, STEPS, watch)
    assert outputs == searched_alone(model, 4)
    check_pages(cache, watch)


def check_pages(cache, watch):
    """Pages were saved, copied only where a page is cut, and all of them came back."""
    assert 0 < watch.held < watch.unshared
    assert (watch.copied > 0) == (cache.spec.page_size > 1)
    assert cache.pool.num_free == cache.pool.capacity and not cache.pool.tables
    cache.check()


def test_a_cache_that_is_too_small_raises_the_missing_pages():
    with pytest.raises(MemoryError, match="2 pages are needed, 1 are free"):
        fork.sample(fork.Decoder(), fork.new_cache(num_pages=5), PROMPT, 3, 1, lambda *_: None)


def test_the_page_tables_are_printed(capsys):
    fork.main()
    out = capsys.readouterr().out
    assert "copied 3 → 4" in out and "3 pages in use, 12 if none were shared" in out
    assert out.count("63 of 63 are free again") == 2


def test_it_stays_short():
    assert len(PATH.read_text().splitlines()) < 200
