"""`python -m benchmarks wide` without a GPU: its cells, what it compares, and its columns."""

from types import SimpleNamespace

import pytest
import torch

import onchip
from benchmarks import wide
from onchip.cli.bench import gpu, paged, peers
from onchip.cli.bench.gpu import GpuCandidate
from onchip.cli.bench.harness import Inaccurate, Session, check_thresholds
from tests.benchmarks.stand_ins import replace_clock

CPU = torch.device("cpu")
CELL = wide.LatentCell(4, batch=3, keys=128, page_size=16)


@pytest.fixture
def stand_ins(monkeypatch):
    """A candidate takes as long as its name says."""
    replace_clock(monkeypatch, {"onchip": 1.0, "fa3": 1.2, "flex": 1.5, "math": 3.0})
    about = SimpleNamespace(L2_cache_size=1 << 18)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(wide, "copy_bytes_per_s", lambda device: 1e9)


def refuse(*args, **options):
    raise RuntimeError("head dimension at most 256")


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_row_has_every_peer_that_runs_its_memory_and_the_refusals(stand_ins, monkeypatch, name):
    monkeypatch.setattr(gpu, "TOKENS", 96)
    served = lambda backend, **options: peers.standard if backend == "math" else refuse
    monkeypatch.setattr(peers, "backend", served)
    monkeypatch.setattr(peers, "flex", lambda n, mod, device: peers.standard)
    for missing in ("fa3", "fa4"):
        monkeypatch.setattr(peers, missing, lambda **options: refuse)
    case = list(wide.wide_cases(name, (48,), (512,)))[1]
    assert (case.mask, case.batch, case.num_heads) == ("causal", 2, 4)
    (row,) = wide.measure(Session(device=CPU), case)
    assert row["best_peer"] == "flex" and row["ratio"] == pytest.approx(1.5)
    assert set(row["peers"]) == {"math", "flex"} and gpu.counts(row)
    assert set(row["refusals"]) == {"cudnn", "fa2", "efficient", "fa3", "fa4"}
    assert "at most 256" in row["refusals"]["fa3"]
    assert set(row["peak_mb"]) == {"onchip", "math", "flex"}
    assert row["value"] == pytest.approx(gpu.flops(case) / 1e9)


def test_the_cells(stand_ins):
    wanted = Session(device=CPU, only=["latent"])
    titles = [title for title, _ in wide.steps(wanted)]
    assert len(titles) == len(wide.LATENT_CELLS) and "pages of 64" in titles[0]
    assert len(list(wide.steps(Session(device=CPU)))) == len(titles) + 8
    few = Session(device=CPU, only=["forward"], seqlens=[4096], head_dims=[320])
    assert [title for title, _ in wide.steps(few) if "320" not in title] == []


def test_pages_hold_what_the_check_reads(stand_ins):
    sets, check = wide.draw_latent(CELL, CPU)
    assert len(sets) == gpu.num_sets(sets[0][1].nbytes, 1 << 18) > 1
    assert not torch.equal(sets[0][1], sets[1][1])
    q, pages, table = sets[0]
    lengths = torch.full((3,), 128, dtype=torch.int32)
    attend = lambda q, pages, table, n=lengths: onchip.paged_attention(
        q, pages, None, table, n, latent=512, softmax_scale=576**-0.5
    )
    assert check(GpuCandidate("onchip", attend, sets, check, ours=True), True)["normal"] < 0.01
    short = lambda q, pages, table: attend(q, pages, table, n=lengths - 1)
    with pytest.raises(Inaccurate, match="FAILS"):
        check(GpuCandidate("onchip", short, sets, check, ours=True), True)


def test_flash_attention_3_takes_the_parts_of_a_page(stand_ins, monkeypatch):
    """With `qv`, as its function for caches has it: the sum of both products, times the latents."""

    def with_kvcache(q, k, v, *, qv, page_table, cache_seqlens, softmax_scale, num_splits):
        assert num_splits == 0 and q.shape[-1] == k.shape[-1] == 64
        out = []
        for b, pages in enumerate(page_table.long()):
            keys, values = (x[pages].flatten(0, 1)[None, : cache_seqlens[b]] for x in (k, v))
            both = torch.cat((qv, q), -1)[b : b + 1], torch.cat((values, keys), -1)
            out.append(onchip.attention(*both, values, softmax_scale=softmax_scale))
        return torch.cat(out)

    module = SimpleNamespace(flash_attn_with_kvcache=with_kvcache)
    monkeypatch.setattr(peers, "import_module", lambda name: module)
    (row,) = wide.decode(Session(device=CPU), CELL)
    assert row["best_peer"] == "fa3" and row["ratio"] == pytest.approx(1.2) and gpu.counts(row)
    assert (row["head_dim"], row["head_dim_v"], row["num_kv_heads"]) == (576, 512, 1)
    assert row["value"] == pytest.approx(1e3)  # us
    assert row["copy_share"] == pytest.approx(3 * 128 * 576 * 2 / 1e6)
    assert row["tflops"] == pytest.approx(2 * 3 * 4 * 128 * (576 + 512) / 1e3 / 1e6)
    large = row | {"num_heads": 16, "batch": 64, "mask": "pages of 64"}
    results = check_thresholds([large], wide.THRESHOLDS)
    measured = {x.threshold.name: x.measured for x in results}
    assert measured["latent decode, 16 heads, share of copy"] == row["copy_share"]
    assert measured["latent decode, 128 heads"] is None


def test_a_peer_without_these_operands_is_left_out(stand_ins, monkeypatch):
    monkeypatch.setattr(peers, "fa3", refuse)
    (row,) = wide.decode(Session(device=CPU), CELL)
    assert row["peers"] == {} and row["ratio"] is None and not gpu.counts(row)
    assert CELL.batch <= paged.CHECKED
