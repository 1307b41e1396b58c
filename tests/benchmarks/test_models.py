"""`python -m benchmarks models` without a GPU: every call of every model, shortened, on the CPU."""

import json
import warnings

import pytest
import torch
from matplotlib.colors import to_hex

from benchmarks import model_peers, models, models_report, plots, tables
from benchmarks.model_calls import ModelCall
from benchmarks.model_shapes import MODELS, NAMES
from onchip.cli import main
from onchip.cli.bench import gpu, peers
from onchip.cli.bench.gpu import GpuCandidate
from onchip.cli.bench.harness import Inaccurate, Session, check_thresholds, document
from onchip.cli.bench.plots import PEERS
from tests.benchmarks.stand_ins import replace_clock, replace_peers

CPU = torch.device("cpu")
TOKENS = 32


def shorten(layer):
    """At most two key heads, in groups as large as the model's."""
    kv_heads = min(layer.num_kv_heads, 2)
    heads = layer.num_heads // layer.num_kv_heads * kv_heads
    return layer.shrink(TOKENS)._replace(num_heads=heads, num_kv_heads=kv_heads)


CALLS = [ModelCall(layer, call, CPU) for layer in map(shorten, MODELS) for call in layer.calls]
named = lambda call: f"{call.layer.title}, {call.call.way}"


def find(model, way, kind=None):
    """The first call of a model in this pass, or that of a kind of layer."""
    return next(
        call
        for call in CALLS
        if (call.layer.name, call.call.way) == (model, way) and kind in (None, call.layer.kind)
    )


@pytest.fixture
def took(monkeypatch):
    """Milliseconds by name of candidate."""
    took = {"onchip": 1.0, "fa4": 1.1, "fa3": 1.2, "cudnn": 1.5}
    replace_clock(monkeypatch, took)
    replace_peers(monkeypatch)
    return took


def test_the_models_are_named_with_their_source():
    assert len(NAMES) >= 24
    titles = [layer.title for layer in MODELS]
    assert len(set(titles)) == len(titles)
    for layer in MODELS:
        assert layer.source.startswith(("https://huggingface.co/", "https://github.com/"))
        assert layer.num_heads % layer.num_kv_heads == 0
        assert {call.way for call in layer.calls} <= set(models_report.PASSES)
        assert all(call.keys % (call.page_size or 1) == 0 for call in layer.calls)


@pytest.mark.parametrize("call", CALLS, ids=named)
def test_every_call_of_every_model_is_accurate(call):
    inputs = gpu.draw(call.case, CPU)
    check = models.make_check(call, inputs)
    ours = models.our_candidate(call, [inputs], check)
    assert 0 < check(ours, strict=True)["normal"] < 0.01


@pytest.mark.parametrize(
    ("model", "way", "change"),
    [
        ("mistral-7b", "forward", {"window": 3}),
        ("gemma2-9b", "backward", {"softcap": 2.0}),
        ("gpt-oss-120b", "backward", {"has_sinks": False}),
        ("alphafold2", "backward", {"bias": "own"}),
        ("deepseek-v3", "forward", {"softmax_scale": 0.05}),
        ("llama3-8b", "prefill", {"window": 9}),
        ("whisper-large-v3", "forward", {"causal": True}),
    ],
)
def test_a_call_with_another_option_is_inaccurate(model, way, change):
    """The check of a call refuses what its layer with one option changed computes."""
    call = find(model, way)
    other = ModelCall(call.layer._replace(**change), call.call, CPU)
    inputs = gpu.draw(call.case, CPU)
    check = models.make_check(call, inputs)
    wrong = models.our_candidate(other, [inputs], check)
    parameters = tuple(call.scores.parameters.values())
    if change.keys() & {"has_sinks", "bias"}:  # the gradient of a parameter would be missing
        attend = lambda q, k, v: other.ours()(q, k, v) + 0 * sum(x.sum() for x in parameters)
        wrong = GpuCandidate("onchip", attend, [inputs], check, ours=True, parameters=parameters)
    with pytest.raises(Inaccurate, match="FAILS"):
        check(wrong, strict=True)


SPECIAL = [
    ("gemma2-9b", "backward", None),
    ("gpt-oss-120b", "forward", "window 128"),
    ("gpt-oss-120b", "decode", "window 128"),
    ("gpt-oss-120b", "backward", "global"),
    ("deepseek-v3", "forward", None),
    ("falcon-7b", "prefill", None),
    ("bert-large", "backward", None),
    ("sam-vit-h", "forward", "global"),
    ("whisper-large-v3", "decode", None),
    ("alphafold2", "backward", "triangle"),
]


@pytest.mark.parametrize(("model", "way", "kind"), SPECIAL)
def test_a_peer_computes_the_call_or_says_what_it_lacks(took, model, way, kind):
    call = find(model, way, kind)
    sets = [gpu.draw(call.case, CPU)]
    check = models.make_check(call, sets[0])
    error = check(models.our_candidate(call, sets, check), strict=True)["normal"]
    candidates, missing = model_peers.find(Session(device=CPU), call, sets, check)
    served = []
    for candidate in candidates:
        try:
            assert check(candidate, strict=False)["normal"] <= gpu.PEER_LIMIT * error
            served.append(candidate.name)
        except peers.PeerRefusal as refusal:
            assert str(refusal).startswith(("it has no ", "SDPA has no kernel"))
        except NotImplementedError:
            assert candidate.name == "flex" and way == "backward"  # torch has none on a CPU
    assert missing == [] and served
    assert way == "backward" or "flex" in served or not model_peers.needs_flex(call)


def test_a_row_names_its_model_its_peers_and_their_refusals(took):
    call = find("gemma3-12b", "forward", "window 1,024")
    (row,) = models.measure(Session(device=CPU), call)
    assert (row["model"], row["layer"], row["pass"]) == ("gemma3-12b", "window 1,024", "forward")
    assert (row["num_heads"], row["num_kv_heads"], row["unit"]) == (4, 2, "us")
    assert (row["best_peer"], row["ratio"]) == ("fa4", pytest.approx(1.1))
    assert row["refusals"] == {"cudnn": "it has no window", "efficient": "it has no window"}
    assert set(row["peers"]) == {"fa3", "fa4", "fa2", "flex"} and gpu.counts(row)
    assert row["source"] == call.layer.source and row["page_size"] is None
    results = check_thresholds([row], models.THRESHOLDS)
    assert [x.ok for x in results] == [True, True]
    json.dumps(row)


def test_a_row_without_a_package_does_not_count(took, monkeypatch):
    def missing(packed=None, cache_seqlens=None, **options):
        raise ImportError("No module named 'flash_attn'")

    monkeypatch.setattr(peers, "fa4", missing)
    said = []
    session = Session(device=CPU, say=said.append)
    (row,) = models.measure(session, find("llama3-8b", "decode"))
    assert row["doubts"] == ["no fa4 in this run"] and not gpu.counts(row)
    assert row["page_size"] == 16 and "fa4" not in row["refusals"]
    assert row["refusals"] == {"efficient": "SDPA has no kernel for it"}
    assert [x for x in said if x.startswith("fa4 is left out: ImportError")]


def test_a_call_that_no_peer_runs_shows_its_share_of_the_roofline(took, monkeypatch):
    def refuse(call):
        raise peers.PeerRefusal("it has no such thing")

    monkeypatch.setattr(model_peers, "MAKERS", dict.fromkeys(model_peers.MAKERS, refuse))
    call = find("alphafold2", "backward", "MSA rows")
    (row,) = models.measure(Session(device=CPU), call)
    assert row["ratio"] is None and row["roofline"] is None and len(row["refusals"]) == 6
    inputs = gpu.draw(call.case, CPU)
    least = call.least_seconds(call.explain(inputs, on="H200"))
    _, body = models_report.passes_sheet([row | {"roofline": least * 1e6 / row["value"]}])
    assert body[0][3].endswith("% of the roofline")


def test_sdpa_is_refused_with_the_reason_that_torch_prints():
    texts = ("Flash kernel not used because:", "Flash attention has been runtime disabled.")
    texts += ("cuDNN kernel not used because:", "head_dim must be even", "and more")

    def attend(q, k, v):
        for text in texts:
            warnings.warn(f"{text} (Triggered internally at sdp_utils.cpp)", stacklevel=2)
        raise RuntimeError("No available kernel. Aborting execution.")

    reason = pytest.raises(peers.PeerRefusal, match="^head_dim must be even$")
    with pytest.warns(UserWarning), reason:
        peers.explain_refusal(attend)(None, None, None)


def test_one_query_with_a_window_is_given_to_peers_without_it():
    call = find("phi3-mini", "decode")
    step, cut = call.without_window()
    assert step.layer.window is None and step.call.keys == min(call.layer.window, call.call.keys)
    assert cut(torch.zeros(2, call.call.keys, 1, 1)).shape[1] == step.call.keys
    prefill = find("phi3-mini", "prefill")
    assert prefill.without_window()[0] is prefill


def test_models_are_chosen_by_name_and_short_in_a_quick_run():
    session = Session(quick=True, only=["llama3-8b", "gpt-oss-120b"], device=CPU)
    chosen = list(models.calls(session, MODELS))
    assert {call.layer.name for call in chosen} == {"llama3-8b", "gpt-oss-120b"}
    assert max(call.call.keys for call in chosen) <= models.QUICK_TOKENS
    assert len(list(models.calls(Session(device=CPU), MODELS))) == len(CALLS)


def test_an_unknown_model_is_refused(capsys):
    assert main(["bench", "models", "--only", "gpt-5"]) == 2
    assert "models has no part 'gpt-5'; choose from: llama3-8b" in capsys.readouterr().err


@pytest.fixture
def rows(took):
    calls = [find("llama3-8b", way) for way in ("forward", "decode")]
    calls.append(find("deepseek-v3", "forward"))
    return [row for call in calls for row in models.measure(Session(device=CPU), call)]


def test_the_tables_have_models_down_and_passes_across(rows, tmp_path, monkeypatch):
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (folder / "h200-models.json").write_text(json.dumps(document(rows, {"device": "a GPU"})))
    text = tables.table("bench:h200-models:passes", tmp_path)
    assert "| llama3-8b | 8/2 x 128 | 1.10 fa4 | | | 1.10 fa4 |" in text
    assert "| deepseek-v3 | 2 x 192/128 | 1.10 fa4 | | | |" in text
    assert "`python -m benchmarks models --json benchmarks/results/h200-models.json`" in text
    text = tables.table("bench:h200-models:refusals", tmp_path)
    assert "| efficient | SDPA has no kernel for it | llama3-8b (forward, decode) |" in text
    missing = tables.table("bench:h200-models:passes", tmp_path / "nowhere")
    assert missing.startswith("Not measured yet: `python -m benchmarks models")


def test_every_model_is_a_bar(rows, tmp_path):
    plots.draw(document(rows, {"device": "a GPU"}), tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    words = ("llama3-8b", "deepseek-v3", "forward", "decode", "FlashAttention-4", "a GPU")
    assert all(word in text for word in words)
    with pytest.raises(ValueError, match="no models with a peer"):
        plots.model_ratios([row | {"ratio": None} for row in rows])


def test_the_legend_has_the_colours_of_the_bars(rows):
    """Also of a peer that is the best of one pass alone."""
    row = next(row for row in rows if row["ratio"] is not None)
    chosen = [row | {"pass": "forward", "best_peer": "fa3"}]
    chosen += [row | {"pass": "decode", "best_peer": "cudnn"}]
    (legend,) = plots.model_ratios(chosen).legends
    labels = [text.get_text() for text in legend.get_texts()]
    colours = [to_hex(patch.get_facecolor()) for patch in legend.get_patches()]
    assert list(zip(labels, colours, strict=True)) == [PEERS["fa3"], PEERS["cudnn"]]
