"""The explanation of a call agrees with the call."""

import pytest
import torch

from benchmarks.hide_condition import hide_length, hides
from onchip import masks
from onchip.parallel import context_parallel_attention, explain
from onchip.parallel.comm import CountingComm, run_ranks
from onchip.parallel.machines import H200, LINKS, Link
from onchip.parallel.sharding import LAYOUTS
from onchip.parallel.simulate import LayerShape, RingStep


def meta(seqlen, heads, head_dim=128):
    shapes = ((1, seqlen, heads[0], head_dim), *[(1, seqlen, heads[1], head_dim)] * 2)
    return [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]


class Rank:
    """A rank of a group without communication."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    shift = None


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "hybrid", "allgather"])
@pytest.mark.parametrize("causal", [False, True])
def test_bytes_are_the_bytes_sent(strategy, causal):
    size, local, heads = 4, 8, (8, 2)
    options = {"strategy": strategy, "causal": causal, "layout": "contiguous"}

    def on_rank(comm):
        comm = CountingComm(comm)
        q, k, v = (
            torch.randn(2, local, h, 16).requires_grad_() for h in (heads[0], *heads[1:] * 2)
        )
        explanation = explain(q, k, v, comm, **options)
        assert not comm.messages
        out = context_parallel_attention(q, k, v, comm, **options)
        forward = comm.bytes.total()
        out.sum().backward()
        return explanation, (forward, comm.bytes.total() - forward)

    for explanation, sent in run_ranks(size, on_rank):
        assert tuple(each.sent_bytes for each in explanation.passes) == sent


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [(None, None), (300, 0)])
def test_flops_and_balance_are_of_all_ranks(layout, window):
    size, local, heads = 4, 256, (4, 2)
    seqlen, rows = size * local, torch.arange(size * local)
    pairs = ((rows + 1) - (rows - 300).clamp(min=0) * (window[0] is not None)).sum()
    options = {"strategy": "ring", "layout": layout, "causal": True, "window_size": window}
    explanation = [explain(*meta(local, heads), Rank(r, size), **options) for r in range(size)]
    assert len({each.passes for each in explanation}) == 1  # the same on all ranks
    forward, backward = explanation[0].passes
    assert forward.mean_flops * size == 4 * 128 * heads[0] * int(pairs)
    assert backward.mean_flops == 2.5 * forward.mean_flops
    assert explanation[0].balance == pytest.approx(sum(forward.flops) / forward.mean_flops)
    if layout == "contiguous" and window[0] is None:
        assert explanation[0].balance == pytest.approx(2 - 1 / size, rel=1e-2)
        assert [each.idle_rounds for each in explanation] == [3, 2, 1, 0]
    if layout == "contiguous" and window[0] is not None:
        assert forward.hops == 2
    assert seqlen == explanation[0].seqlen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("link", LINKS.values(), ids=str)
def test_the_hide_condition_is_the_simulators(link, causal):
    """c >= (b / 2) (H_kv / H_q) F / B, twice for causal; longer rounds hide their messages."""
    size, heads = 8, (32, 8)
    explanation = explain(*meta(8192, heads), Rank(0, size), strategy="ring", causal=causal)
    rate = H200.kernel(False, causal, 128).rate(8192)
    chunk_of_formula = 1.0 * (8 / 32) * rate / link.bytes_s * (2 if causal else 1)
    assert explanation.min_chunks[link.name] == pytest.approx(chunk_of_formula)
    step = RingStep(65536, size, causal=causal, shape=LayerShape(*heads, 128, 2))
    assert hide_length(step, link) == pytest.approx(
        chunk_of_formula, rel=0.1
    )  # at the rate of long calls
    assert (explanation.passes[0].hidden_share(link) == 1.0) == hides(step, link)
    least = int(explanation.min_chunks[link.name]) + 1
    for chunk, share in ((least + 64, 1.0), (least - 64, 0.0)):
        options = {"strategy": "ring", "causal": causal, "flops_s": rate}
        other = explain(*meta(chunk, heads), Rank(0, size), **options)
        assert other.passes[0].hidden_share(link) == share


def test_efficiency_is_lost_to_messages_and_to_the_busiest_rank():
    explain_call = lambda **options: explain(
        *meta(4096, (8, 8)), Rank(1, 8), strategy="ring", causal=True, flops_s=5e14, **options
    )
    fast, slow = Link("fast", 1e15, 0.0), Link("slow", 1e9, 0.0)
    even, uneven = explain_call().passes[0], explain_call(layout="contiguous").passes[0]
    assert even.efficiency(fast) == pytest.approx(1.0, rel=1e-3)
    assert uneven.efficiency(fast) == pytest.approx(1 / (2 - 1 / 8), rel=1e-3)
    messages = 7 * 4096 * 8 * 256 * 2 / 1e9
    last = even.flops[-1] / 5e14
    assert even.seconds(slow) == pytest.approx(messages + last, rel=1e-3)
    assert even.efficiency(slow) < 0.1


def test_auto_counts_that_windows_end_a_ring_early():
    explain_call = lambda **options: (
        explain(*meta(256, (8, 8)), Rank(0, 8), causal=True, **options).choice
    )
    assert explain_call(layout="contiguous").strategy == "ulysses"
    assert explain_call(layout="contiguous", window_size=(200, 0)).strategy == "ring"
    assert explain_call(layout="striped", window_size=(200, 0)).strategy == "ulysses"


def test_the_text_names_every_part():
    text = str(explain(*meta(8192, (32, 8)), Rank(3, 8), strategy="ring", causal=True))
    for words in (
        "attention of 65536 positions over 8 ranks, 8192 here",
        "ring: requested",
        "the busiest rank has 1.00 of the mean work",
        "8 here, 0 more see nothing; 0 need a block mask",
        "sends 7 x 33.6 MB overlapped",
        "measured on an NVIDIA H200 at head_dim 128",
        "NVLink 4: 100% forward, hidden",
        "100 GbE: 32% forward, exposed",
        "hidden from 27,880 positions a rank on",
    ):
        assert words in text, text
    odd = masks.mod(lambda b, h, q, k: (q + k) % 2 == 0)
    masked = explain(*meta(256, (4, 4)), Rank(0, 2), strategy="ring", mask=odd)
    assert "2 need a block mask" in str(masked)
    assert "hidden from" not in str(masked)
    assert "as given" in str(explain(*meta(64, (4, 4)), Rank(0, 2), flops_s=1e12))
    assert "sends least" in str(explain(*meta(64, (4, 4)), Rank(0, 2)))
