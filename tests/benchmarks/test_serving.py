"""`python -m benchmarks serving` without a GPU: the workload, what is measured of it, and every
part of it on a tiny model.
"""

import dataclasses
import json
import sys

import pytest
import torch

from benchmarks import serving, serving_prefill, serving_samples
from benchmarks import serving_report as report
from benchmarks.step import QWEN3
from benchmarks.workload import Mark, Ran, Roofline, Workload, serve, warm_up
from onchip.cli import main
from onchip.cli.bench.harness import RowRefused, Session, check_thresholds
from onchip.models import ModelConfig, num_parameters

CPU = torch.device("cpu")


def test_the_workload_is_that_of_nano_vllm():
    workload = Workload.uniform()
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (142_827, 133_966)
    assert len(workload.requests) == 256 and workload.steps <= 1024 and workload.longest <= 2048
    pages, page_bytes = workload.peak_pages(16), 2 * 28 * 8 * 128 * 2 * 16
    assert 19e9 < pages * page_bytes < 20e9


def test_pages_and_keys_are_counted_token_by_token():
    workload = Workload((([1] * 5, 7), ([1] * 3, 2)))
    assert workload.peak_pages(4) == 3 and workload.peak_pages(1) == 11
    keys = sum(range(5, 12)) + sum(range(3, 5))
    assert workload.tokens_read == keys
    assert workload.cut(1, 4).requests == (([1] * 5, 4),)
    assert [len(one.requests) for one in Workload.uniform(7, 1, 2).batches(3)] == [3, 3, 1]


def test_the_roofline_reads_the_weights_in_every_step_and_every_key_once():
    config = ModelConfig.from_hf(serving.TINY)
    workload = Workload((([1] * 5, 7),))
    roofline = Roofline.of(config, 2, 1e9)
    assert roofline.weight_bytes == 2 * num_parameters(config)
    token = 2 * 2 * 2 * 16 * 2
    assert roofline.seconds(workload) == (7 * roofline.weight_bytes + 56 * token) / 1e9
    untied = ModelConfig.from_hf(serving.TINY | {"tie_word_embeddings": False})
    assert Roofline.of(untied, 2, 1e9).weight_bytes == roofline.weight_bytes
    assert f"56 keys read x {token:,} bytes" in roofline.formula(workload)


def test_the_shapes_are_those_of_the_models_they_are_named_after():
    billions = {"qwen3": 0.596e9, "llama": 8.03e9}
    for fields in (serving.QWEN3, serving.LLAMA3):
        parameters = num_parameters(ModelConfig.from_hf(fields))
        assert abs(parameters / billions[fields["model_type"]] - 1) < 0.001


def test_quick_models_are_of_the_same_kind():
    session = Session(quick=True, device=CPU)
    llama = serving.setting(session, "llama-3-8b", serving.LLAMA3).model.config
    qwen3 = quick().model.config
    assert (llama.tied, llama.qk_norm, qwen3.tied, qwen3.qk_norm) == (False, False, True, True)


def test_waits_are_those_of_each_request():
    """Two tokens of the first request come together late; the second one waits, then runs."""
    workload = Workload((([1], 3), ([1], 2)))
    counts = [[1, 0], [2, 0], [2, 1], [3, 2]]
    marks = [Mark(0.01 * (i + 1), c, i) for i, c in enumerate(counts)]
    got = Ran(workload, marks, 0.01, 0, 0).columns
    assert got["first_token_ms"] == pytest.approx({"p50": 30, "p99": 30, "max": 30})
    assert got["between_tokens_ms"] == pytest.approx({"p50": 10, "p99": 20, "max": 20})
    assert (got["steps"], got["peak_pages"]) == (4, 3)
    assert got["step_ms_by_draws"] == pytest.approx({"1-64": 10})
    assert got["host_share"] == pytest.approx(0.25) and got["seconds"] == pytest.approx(0.04)


def quick():
    session = Session(quick=True, device=CPU)
    return serving.setting(session, "qwen3-0.6b", serving.QWEN3)


@pytest.fixture(scope="module")
def tiny():
    return quick()


def test_a_workload_gets_its_numbers_of_tokens(tiny):
    with tiny.llm(num_pages=200) as llm:
        warm_up(llm.engine, tiny.workload)
        ran = serve(llm.engine, [tiny.workload])
        num_cached = llm.stats().tokens_cached  # a token or two are alike by chance
        assert num_cached < 0.01 * tiny.workload.num_prompt_tokens
    assert ran.marks[-1].counts == [count for _, count in tiny.workload.requests]
    assert ran.columns["steps"] <= tiny.workload.steps + 1 and ran.columns["host_share"] is None
    # After a step the requests that it ended hold no pages.
    assert 0.9 < ran.columns["peak_pages"] / tiny.workload.peak_pages(16) <= 1


def test_batches_follow_one_another(tiny):
    with tiny.llm(num_pages=200) as llm:
        ran = serve(llm.engine, tiny.workload.batches(9))
    steps = sum(batch.steps for batch in tiny.workload.batches(9))
    assert ran.columns["steps"] == steps
    first = next(mark for mark in ran.marks if mark.counts[9])
    assert first.counts[:9] == [count for _, count in tiny.workload.requests[:9]]


def test_a_cache_of_8_bits_is_served_and_named_in_the_row():
    session = Session(quick=True, device=CPU, kv_dtypes=["int8"])
    tiny = serving.setting(session, "qwen3-0.6b", serving.QWEN3)
    assert tiny.page_bytes * 64 == quick().page_bytes * (16 + 4)  # fp32 here
    with tiny.llm(num_pages=200) as llm:
        row = tiny.row("throughput", "onchip", llm, [tiny.workload])
        assert row["kv_bytes"] == llm.stats().pages_total * llm.stats().page_bytes
    assert row["mask"] == "tiny qwen3, int8 cache"
    assert tiny.roofline.token_bytes * 64 == quick().roofline.token_bytes * (16 + 4)
    with pytest.raises(ValueError, match="one cache at a time"):
        serving.setting(Session(kv_dtypes=["int8", "fp8"]), "qwen3-0.6b", serving.QWEN3)


def test_a_request_that_fails_leaves_no_row():
    tiny = quick()
    with tiny.llm(num_pages=200) as llm:
        with torch.no_grad():
            llm.engine.model.embed.fill_(float("nan"))
        with pytest.raises(RowRefused, match="not finite"):
            serve(llm.engine, [tiny.workload])
    with tiny.llm(num_pages=3) as llm, pytest.raises(RowRefused, match="refused"):
        serve(llm.engine, [tiny.workload])


def test_a_capped_pool_preempts_by_the_chosen_policy(tiny):
    rows = {way: serving.capped(tiny, way)[0] for way in serving.WAYS}
    assert rows["recompute"]["swapped"] == 0 < rows["recompute"]["recomputed"]
    assert rows["swap"]["swapped"] > 0, "nobody went to the host"
    assert rows["auto"]["swapped"] + rows["auto"]["recomputed"] > 0
    for row in rows.values():
        assert row["kv_bytes"] < 0.5 * tiny.workload.peak_pages(16) * tiny.page_bytes
        assert row["lost"] == pytest.approx(100 * (1 - row["value"] / tiny.whole["value"]))


def test_reservations_seat_fewer_than_pages_do(tiny):
    rows = {policy: serving.allocation(tiny, policy)[0] for policy in serving.POLICIES}
    assert rows["paged"]["steps"] < rows["contiguous"]["steps"] < rows["static"]["steps"]
    assert len({row["kv_bytes"] for row in rows.values()}) == 1
    held = rows["contiguous"]["seats"] * rows["contiguous"]["reserved_tokens"] * 16
    assert held <= 16 * 16 * tiny.capped_pages


def test_peers_serve_the_same_part(tiny):
    pytest.importorskip("transformers")
    (row,) = serving.peers(tiny)
    assert set(row["peers"]) == {"transformers static", "transformers continuous"}
    assert row["ratio"] == row["value"] / row["peers"][row["best_peer"]]


def test_without_transformers_there_are_no_peers(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    printed = []
    monkeypatch.setattr(tiny.session, "say", printed.append)
    (row,) = serving.peers(tiny)
    assert row["peers"] == {} and row["ratio"] is None and "no peers" in printed[-1]


def test_parts_are_chosen_by_name(capsys, tmp_path):
    path = tmp_path / "serving.json"
    command = [
        "bench",
        "serving",
        "--quick",
        "--threads",
        "1",
        "--only",
        "throughput",
        "--json",
        str(path),
    ]
    assert main(command) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["bench"], row["unit"], row["failed"]) == ("throughput", "tokens/s", 0)
    assert row["ready_s"] > 0 and "byte roofline" in capsys.readouterr().out


def test_samples_of_one_prompt_are_measured_with_and_without_a_cascade(tiny):
    shared, plain = serving.samples(tiny)
    assert shared["cascade_steps"] > 0 == plain["cascade_steps"] == plain["tokens_unread"]
    assert shared["ratio"] == shared["value"] / plain["value"]
    assert shared["tokens_unread"] == shared["cascade_steps"] * 31 * 1024
    assert shared["output_tokens"] == 32 * 16 and plain["ratio"] is None
    heads, body = report.samples_sheet([shared, plain])
    assert len(body) == 2 and all(len(cells) == len(heads) for cells in body)


@pytest.mark.slow
def test_first_tokens_are_measured_with_attention_in_8_and_in_16_bits(tiny, monkeypatch):
    """On the CPU the recipe is executed tile by tile: the shortest prompt that is in 8 bits."""
    monkeypatch.setattr(serving_prefill, "ROUNDS", 1)
    fast, plain = serving.prefill(tiny)
    assert (fast["kernel"], plain["kernel"], fast["unit"]) == ("fp8", "16 bits", "ms")
    assert fast["ratio"] == plain["value"] / fast["value"] and plain["ratio"] is None
    assert fast["predicted_ratio"] is None  # no rates were measured for this head_dim
    heads, body = report.prefill_sheet([fast, plain])
    assert len(body) == 2 and all(len(cells) == len(heads) for cells in body)


def test_prefill_without_8_bits_leaves_no_row(tiny, monkeypatch):
    monkeypatch.setattr(serving_prefill, "QUICK", serving_prefill.PrefillLoad((40,), 64))
    monkeypatch.setattr(serving_prefill, "ROUNDS", 1)
    with pytest.raises(RowRefused, match="0 tokens of 40 were computed in 8 bits"):
        serving.prefill(tiny)


def test_predicted_first_tokens():
    """Attention alone becomes faster: more so the longer the prompt, and never by more than its
    rates. A larger model has more products with weights.
    """
    small = ModelConfig.from_hf(QWEN3)
    large = dataclasses.replace(small, hidden_size=4096, intermediate_size=12_288, num_heads=32)
    ratios = [
        [serving_prefill.predict_ratio(config, 8192 << i, 8192) for i in range(3)]
        for config in (small, large)
    ]
    full = [serving_prefill.read_rates(small, precision).full for precision in (None, "fp8")]
    assert 1 < ratios[0][0] < ratios[0][1] < ratios[0][2] < full[1] / full[0]
    assert all(a > b for a, b in zip(*ratios, strict=True))
    assert serving_prefill.quantised_bytes(small, 100) == 100 * 8 * 128 * 8


def test_samples_without_the_steps_they_are_about_leave_no_row(tiny, monkeypatch):
    """A cascade that never pays, here because the prompt is short."""
    monkeypatch.setattr(serving_samples, "QUICK", serving_samples.SamplesLoad(2, 40, 4))
    with pytest.raises(RowRefused, match="0 of .* steps of 'cascade' had a cascade"):
        serving.samples(tiny)


def test_a_new_process_is_ready(tiny):
    (row,) = serving.ready(tiny)
    assert row["unit"] == "s" and row["value"] > 0.5, "it imports torch"


def test_a_process_that_fails_is_no_row(tiny, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RowRefused, match="ended with 1"):
        serving.ready(tiny)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_full_size_needs_a_gpu(capsys):
    assert main(["bench", "serving"]) == 2
    assert "--quick" in capsys.readouterr().err


def test_a_server_is_loaded_from_outside():
    pytest.importorskip("fastapi")
    session = Session(quick=True, only=["http"], seconds=1.0)
    serving.run(session)
    (row,) = session.rows
    assert not session.refused and row["answered"] == row["requests"] == 5
    assert row["first_token_ms"]["p50"] > 0 and row["memory_mib"] and 0 < row["fairness"] <= 1


def test_all_of_many_clients_are_answered():
    pytest.importorskip("fastapi")
    session = Session(quick=True, only=["crowd"], seconds=0.5)
    serving.run(session)
    (row,) = session.rows
    assert not session.refused and row["clients"] == 20 and row["answers"][0] >= 1
    assert row["answered"] == row["requests"] >= 20 and row["memory_mib"]
    ((load, *_),) = report.http_sheet(session.rows)[1]
    assert load.startswith("20 clients, ")


def test_the_thresholds_are_the_required_ones():
    row = lambda bench, kernel, value, **more: {
        "bench": bench, "mask": "qwen3-0.6b", "kernel": kernel, "value": value, "unit": "", **more
    }  # fmt: skip
    good = [row("throughput", "onchip", 22_001.0), row("ready", "onchip", 19.0)]
    bad = [row("throughput", "onchip", 21_999.0), row("ready", "onchip", 21.0)]
    capped = [row("capped", "auto", 1.0, lost=lost) for lost in (34.0, 36.0)]
    verdicts = check_thresholds([*good, capped[0]], serving.THRESHOLDS)
    assert [v.ok for v in verdicts] == [True, True, True]
    verdicts = check_thresholds([*bad, capped[1]], serving.THRESHOLDS)
    assert [v.ok for v in verdicts] == [False, False, False]


def test_rows_become_tables_and_a_picture(tiny, tmp_path, capsys):
    from rich.console import Console

    rows = [tiny.whole, *serving.capped(tiny, "recompute"), *serving.allocation(tiny, "paged")]
    assert [len(sheet(rows)[1]) for sheet in report.SHEETS.values()] == [2, 1, 0, 0, 0, 0]
    for heads, body in (sheet(rows) for sheet in report.SHEETS.values()):
        assert all(len(line) == len(heads) for line in body)
    report.print_report(Console(width=200), rows, tmp_path / "bars.svg")
    assert "at most 256" in capsys.readouterr().out
    assert f"{rows[0]['value']:,.0f}" in (tmp_path / "bars.svg").read_text()
