import re
from html.parser import HTMLParser

import pytest
import torch

from onchip.cli import demo, main, report
from onchip.cli.bench.patterns import causal
from onchip.cli.demo import METHODS, Measurement, Results
from tests.cli.parsing import parse

VOID = {"meta", "br", "link", "img", "use", "path", "rect"}


@pytest.fixture(scope="module")
def results():
    """The quick demo with a budget under which standard attention is refused at its last length."""
    patch = pytest.MonkeyPatch()
    patch.setattr(demo, "QUICK_LENGTHS", (64, 129, 512))
    patch.setattr(demo, "QUICK_MASKED_LENGTH", 640)
    patch.setattr(demo, "MEMORY_CAP_BYTES", 2 * 4 * 4 * 500**2)
    progress = []
    record = lambda title, done: progress.append((title, done))
    measured = demo.run(quick=True, report_progress=record)
    patch.undo()
    return measured, progress


def test_every_method_is_measured_at_every_length(results):
    measured, _ = results
    assert [(m.seqlen, m.method) for m in measured.lengths] == [
        (n, m) for n in (64, 129, 512) for m in METHODS
    ]
    for m in measured.lengths + measured.masked:
        if m.refused_bytes is None:
            assert m.time_s > 0 and 0 <= m.error < 1e-5


def test_what_does_not_fit_is_refused_with_its_size(results):
    measured, _ = results
    refused = [m for m in measured.lengths if m.refused_bytes is not None]
    assert [(m.method, m.seqlen) for m in refused] == [("standard", 512)]
    assert refused[0].refused_bytes == 2 * demo.NUM_HEADS * 512 * 512 * 4
    assert refused[0].time_s is None
    assert f"{refused[0].refused_bytes:,} bytes" in report.refusals(measured)[0]


def test_the_masks_are_compared_with_a_dense_one(results):
    measured, _ = results
    assert {(m.mask, m.method) for m in measured.masked} == {
        (mask, m) for mask in ("window 256", "16 documents") for m in ("sdpa", "onchip")
    }
    assert set(report.masked_speedups(measured)) == {"window 256", "16 documents"}


def test_cut_keys_merge(results):
    measured, _ = results
    assert sum(measured.merge_cut) == 320
    assert 0 < measured.merge_gap < 1e-5


def test_memory_below_the_resolution_is_marked_in_table_and_plot():
    """A reading of 0 B is no measurement: a call holds its result at least."""
    measured = Results("machine", "float32", 1000)
    sizes = {64: (0, 65536), 128: (200_000, 131072), 256: (600_000, 262144)}
    measured.lengths = [
        Measurement("onchip", n, "causal", 1e-3, peak, 1e-7, least_bytes=least)
        for n, (peak, least) in sizes.items()
    ]
    measured.masked = [Measurement(m, 64, "window", 1e-3, 1, 1e-7) for m in ("sdpa", "onchip")]
    assert [report.cells(m)[1] for m in measured.lengths] == ["≥ 65.5 kB", "200 kB", "600 kB"]
    text = report.page(measured)
    assert "0 B<" not in text and "≥ 65.5 kB" in text and "hollow point" in text
    line = re.search(r'<path d="M[^"]*" [^>]*stroke: var\(--onchip\)[^>]*stroke-width: 1.8', text)
    assert line and line[0].count("L ") == 2  # three points in a line


def test_a_call_holds_what_it_must(results):
    for m in results[0].lengths + results[0].masked:
        assert m.refused_bytes or m.held_bytes >= 4 * m.seqlen * demo.NUM_HEADS * demo.HEAD_DIM


def test_every_cell_of_the_report_names_its_column(results):
    """On a phone the table is a list: the header is not shown."""
    text = report.page(results[0])
    rows = text[text.index("<tbody>") : text.index("</tbody>")]
    assert rows.count("<td") == rows.count("data-name=") > 0
    assert all(f'data-name="{name}"' in rows for name in report.COLUMNS)


def test_progress_only_grows_and_ends(results):
    shares = [share for _, share in results[1]]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_lengths_that_would_take_too_long_are_left_out(monkeypatch):
    monkeypatch.setattr(demo, "QUICK_LENGTHS", (64, 128))
    monkeypatch.setattr(demo, "QUICK_MASKED_LENGTH", 256)
    monkeypatch.setattr(demo, "TIME_BUDGET_S", -1.0)
    measured = demo.run(quick=True)
    assert (measured.lengths, measured.omitted) == ([], [64, 128])
    assert "64, 128 tokens" in report.omissions(measured)[0]
    report.page(measured)


def test_the_check_is_exact_attention():
    q, k, v = (torch.randn(1, 37, 2, 8) for _ in range(3))
    rows = torch.tensor([0, 5, 36])
    exact = demo.exact_rows(q, k, v, rows, causal(37).visible(rows))
    wrong = exact.clone()
    wrong[0, 1, 1, 3] += 0.5
    out = torch.zeros(1, 37, 2, 8, dtype=torch.float64).index_copy(1, rows, wrong)
    assert demo.max_error(out, exact, rows) == pytest.approx(0.5)
    alone = exact[0, 0]  # the first row sees the first key only
    assert torch.allclose(alone, v[0, 0].double())


class _Page(HTMLParser):
    """Checks that tags close, and collects ids and links."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs[x] for x in ("src", "href", "xlink:href") if x in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_report_is_one_file_without_links(results):
    text = report.page(results[0])
    page = _Page(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)|@import|<script", text)
    assert not re.search(r"\$[a-z_]+", text)
    assert text.count("<svg") == 4


def test_the_pictures_take_their_colours_from_the_page(results):
    text = report.page(results[0])
    assert not any(mark in text for mark in report.PLACEHOLDERS)
    for colour in ("--standard", "--sdpa", "--onchip", "--grid"):
        assert f"var({colour})" in text
    assert "prefers-color-scheme: dark" in text


def test_the_report_escapes_html():
    measured = Results("<b>machine & co</b>", "float32", 1000)
    measured.lengths = [Measurement("onchip", 64, "causal", 1e-3, 1000, 1e-7)]
    measured.masked = [
        Measurement("sdpa", 64, "a<b", 2e-3, 1, 1e-7),
        Measurement("onchip", 64, "a<b", 1e-3, 1, 1e-7),
    ]
    text = report.page(measured)
    assert "&lt;b&gt;machine &amp; co" in text
    assert "a<b" not in text


def test_the_next_steps_are_commands_that_exist():
    for command, _ in report.NEXT_STEPS:
        parse(command.split())


@pytest.mark.parametrize(
    ("called", "shown"),
    [
        ("/usr/bin/onchip", "onchip"),
        ("/src/onchip/__main__.py", "python -m onchip"),
        (".venv/bin/onchip", ".venv/bin/onchip"),
    ],
)
def test_the_next_steps_can_be_copied(called, shown, monkeypatch):
    monkeypatch.setattr("sys.argv", [called])
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/onchip")
    assert report.program() == shown


def test_the_command_writes_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "QUICK_LENGTHS", (64,))
    monkeypatch.setattr(demo, "QUICK_MASKED_LENGTH", 256)
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail("no screen to open it on"))
    path = tmp_path / "report.html"
    assert main(["demo", "--quick", "--report", str(path)]) == 0
    assert path.read_text().startswith("<!doctype html>")
    out = capsys.readouterr().out
    for word in ("torch SDPA", "onchip", "Try next", "merge_states", "report.html"):
        assert word in out.replace("\n", "")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (2.16e9, "2.16 GB"),
        (5e12, "5 TB"),
        (None, "n/a"),
    ],
)
def test_human_bytes(value, text):
    assert report.human_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(2e-6, "2 us"), (0.0123, "12.3 ms"), (2.5, "2.5 s"), (None, "n/a")]
)
def test_human_time(value, text):
    assert report.human_time(value) == text


@pytest.mark.slow
def test_the_whole_demo(tmp_path, monkeypatch):
    """As `make demo` runs it on a slow machine, where it leaves out the longest sequences; every
    answer is within fp32 reach of fp64.
    """
    monkeypatch.setattr(demo, "TIME_BUDGET_S", 25.0)
    results = demo.run()
    assert set(demo.LENGTHS) == {m.seqlen for m in results.lengths} | {*results.omitted}
    report.write_html(results, tmp_path / "report.html")
    measured = [m for m in results.lengths + results.masked if m.refused_bytes is None]
    assert {m.seqlen for m in measured} >= {512, 1024, 2048, 4096}
    assert all(m.error < (1e-5 if results.dtype == "float32" else 5e-2) for m in measured)
