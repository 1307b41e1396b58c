"""The page in a real browser: every figure is driven, and what it shows is what Python computes."""

import math
import random
import re

import pytest
import torch

import onchip
from benchmarks.ring_timeline import Timeline
from onchip.core import state
from onchip.cost import make_problem, roofline
from onchip.cost.hardware import TABLE
from onchip.lab import papers, record
from onchip.lab.playground import Playground
from onchip.lab.published.ledger import ledger
from onchip.models import builtin
from onchip.parallel.simulate import LAYOUTS, RingStep

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
UNITS |= {"µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}


def number(text):
    """What a text on the page says: "2.82 GB", "−0.5", "∞"."""
    text = text.replace("−", "-").replace(",", "").replace("∞", "inf")
    amount, *unit = text.split()
    return float(amount) * (UNITS[unit[0]] if unit else 1)


def numbers(text):
    return [number(one) for one in text.split()]


def slide(tab, name, value):
    """Move a range, as a hand does."""
    tab.locator(f"#{name}").evaluate(
        "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', { bubbles: true })); }",
        str(value),
    )


def choose(tab, name, value):
    tab.locator(f'input[name="{name}"][value="{value}"]').check(force=True)


def fact(tab, figure, name):
    return tab.locator(f'#{figure} [data-fact="{name}"]').text_content()


class TestFrame:
    def test_it_is_one_small_file_that_names_no_other(self, site):
        text = site.read_text(encoding="utf-8")
        assert site.stat().st_size < 1_500_000 and list(site.parent.iterdir()) == [site]
        assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", text)
        assert "connect-src 'none'" in text and "unsafe" not in text

    def test_it_is_ready_within_a_second_of_a_cold_start(self, chromium, site):
        """The best of three, each in a profile of its own: others compute here, too."""
        took = []
        for _ in range(3):
            context = chromium.new_context()
            tab = context.new_page()
            tab.goto(site.as_uri())
            tab.wait_for_selector("html[data-ready]", state="attached")
            took.append(int(tab.locator("html").get_attribute("data-ready")))
            context.close()
        assert min(took) < 1_000, took

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", [390, 1280])
    def test_every_screen_sees_all_of_it(self, opened, site, width, scheme):
        tab = opened(site.as_uri(), width, scheme, has_touch=width < 600)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(251, 251, 249)", "dark": "rgb(18, 21, 24)"}[scheme]
        for figure in record.FIGURES:
            panel = tab.locator(f'[data-figure="{figure}"]')
            assert panel.bounding_box()["height"] > 300
            assert panel.evaluate("(e) => e.scrollWidth <= e.clientWidth + 1"), figure

    def test_a_window_that_changes_keeps_everything_inside(self, opened, site):
        tab = opened(site.as_uri())
        for width in (1000, 768, 500, 320, 1440):
            tab.set_viewport_size({"width": width, "height": 900})
            tab.wait_for_timeout(100)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width

    def test_everything_that_can_be_used_has_a_name(self, opened, site):
        tab = opened(site.as_uri())
        nameless = tab.evaluate(
            """[...document.querySelectorAll('button, input, canvas, [role=slider], [role=img]')]
              .filter((e) => !e.getAttribute('aria-label') && !e.textContent.trim())
              .filter((e) => !e.labels?.length).map((e) => e.outerHTML)"""
        )
        assert nameless == []
        assert tab.locator("section.figure h2").count() == len(record.FIGURES)

    def test_the_theme_can_be_switched_and_is_kept(self, opened, site):
        tab = opened(site.as_uri(), scheme="light")
        tab.click("#theme")
        dark = "rgb(18, 21, 24)"
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == dark
        tab.wait_for_timeout(500)  # the browser keeps what a page stores a moment later
        tab.reload()
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == dark

    def test_keys_alone_play_step_and_scrub(self, opened, site):
        tab = opened(site.as_uri(), reduced_motion="reduce")
        tab.focus("#tiles-step-next")
        before = int(tab.input_value("#tiles-step"))
        tab.keyboard.press("Enter")
        tab.focus("#tiles-step")
        tab.keyboard.press("ArrowRight")
        assert int(tab.input_value("#tiles-step")) == before + 2
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert tab.evaluate(outline) != "none"
        tab.focus("#tiles-step-play")
        tab.keyboard.press("Space")
        tab.wait_for_function(
            "(n) => document.querySelector('#tiles-step').value > n", arg=before + 3
        )
        tab.keyboard.press("Space")
        assert tab.locator("#tiles-step-play").get_attribute("aria-label") == "Play"


class TestBytes:
    @pytest.mark.parametrize("name", papers.KERNELS)
    def test_totals_are_those_of_a_ledger(self, tab, name):
        slide(tab, "bytes-time", 359)
        for place, seqlen in ((1, 512), (2, 1024)):
            slide(tab, "bytes-length", place)
            q, k, v = torch.randn(3, 1, seqlen, 1, 64, dtype=torch.float16)
            with ledger(51_200, scratch=torch.float16) as book:
                onchip.attention(q, k, v, kernel=papers.KERNELS[name])
            assert tab.evaluate(f"lab.figures.bytes.total('{name}')") == book.hbm_bytes
            shown = tab.locator(f'[data-bytes="{name}"]').text_content()
            assert number(shown) == pytest.approx(book.hbm_bytes, rel=5e-3)

    def test_all_algorithms_move_bytes_at_one_rate(self, tab):
        """As long as none has ended all have moved as much; at the end, each its own."""
        slide(tab, "bytes-time", 8)
        early = [number(tab.locator(f'[data-bytes="{n}"]').text_content()) for n in papers.KERNELS]
        assert early[0] == early[1] == early[2] > 0
        slide(tab, "bytes-time", 359)
        late = [number(tab.locator(f'[data-bytes="{n}"]').text_content()) for n in papers.KERNELS]
        assert late[0] > late[1] > late[2]
        choose(tab, "bytes-device", 0)
        total = tab.evaluate("lab.figures.bytes.total('v2')")
        took = tab.locator('#bytes [data-bytes="v2"] >> xpath=../../span[@class="note"]')
        shown = number(took.text_content().removeprefix("done after "))
        assert shown == pytest.approx(total / TABLE[0].memory.bytes_s, rel=5e-3)


class TestAlgebra:
    def check(self, tab, scores, cut, data):
        s = torch.tensor(scores, dtype=torch.float64)
        v = torch.tensor(data["algebra"]["values"], dtype=torch.float64)
        parts = state.lift(s[:cut], v[:cut]), state.lift(s[cut:], v[cut:])
        both = state.merge(*parts)
        out, lse = state.finalize(both)
        for kind, one in zip(("side-a", "side-b", "both"), (*parts, both), strict=True):
            card = tab.locator(f"#algebra .state.{kind}")
            read = lambda name, card=card: card.locator(f'[data-value="{name}"]').text_content()
            assert number(read("m")) == float(one.m)
            assert number(read("l")) == pytest.approx(float(one.l), abs=5.1e-4)
            assert numbers(read("acc")) == pytest.approx(one.acc.tolist(), abs=5.1e-4)
            if kind == "both":
                assert numbers(read("out")) == pytest.approx(out.tolist(), abs=5.1e-4)
                assert number(read("lse")) == pytest.approx(float(lse), abs=5.1e-4)

    def test_dragged_scores_merge_as_states_do(self, tab, data):
        tab.click("#algebra button")  # as recorded
        scores = list(data["algebra"]["scores"])
        slide(tab, "algebra-cut", 4)
        self.check(tab, scores, 4, data)
        bar = tab.locator('#algebra [data-key="2"] .knob')
        bar.scroll_into_view_if_needed()
        box = bar.bounding_box()
        tab.mouse.move(box["x"] + 9, box["y"] + 9)
        tab.mouse.down()
        tab.mouse.move(box["x"] + 9, box["y"] - 60, steps=4)
        tab.mouse.up()
        dragged = tab.evaluate("lab.figures.algebra.scores[2]")
        assert dragged > scores[2] + 3
        scores[2] = dragged
        self.check(tab, scores, 4, data)

    def test_a_finger_drags_a_score_off_the_bottom(self, opened, site, data):
        tab = opened(site.as_uri(), 390, has_touch=True)
        knob = tab.locator('#algebra [data-key="4"] .knob')
        knob.scroll_into_view_if_needed()
        box, touch = knob.bounding_box(), tab.context.new_cdp_session(tab)
        point = lambda dy: [{"x": box["x"] + 9, "y": box["y"] + 9 + dy}]
        finger = lambda kind, at: touch.send(
            "Input.dispatchTouchEvent", {"type": kind, "touchPoints": at}
        )
        finger("touchStart", point(0))
        for dy in (40, 120, 240):
            finger("touchMove", point(dy))
        finger("touchEnd", [])
        scores = list(data["algebra"]["scores"])
        scores[4] = -math.inf
        self.check(tab, scores, 4, data)

    @pytest.mark.parametrize("cut", [0, 1, 7, 8])
    def test_an_empty_side_and_masked_keys_change_nothing(self, tab, data, cut):
        tab.click("#algebra button")  # as recorded
        scores = list(data["algebra"]["scores"])
        slide(tab, "algebra-cut", cut)
        tab.focus('#algebra [data-key="0"]')
        tab.keyboard.press("Home")  # masked
        tab.focus('#algebra [data-key="5"]')
        tab.keyboard.press("ArrowUp")
        scores[0], scores[5] = -math.inf, round(scores[5] + 0.5, 1)
        self.check(tab, scores, cut, data)

    def test_a_row_that_sees_nothing_gives_zero(self, tab, data):
        slide(tab, "algebra-cut", 4)
        tab.evaluate("for (let j = 0; j < 8; j++) lab.figures.algebra.put(j, -Infinity)")
        self.check(tab, [-math.inf] * 8, 4, data)


class TestTiles:
    @pytest.mark.parametrize("mask", papers.MASKS)
    @pytest.mark.parametrize("order", ["v1", "v2"])
    def test_the_shown_state_is_that_of_the_keys_visited_so_far(self, tab, order, mask):
        """Compared in fp64 with state.lift over exactly the visible keys of the tiles visited."""
        choose(tab, "tiles-order", order)
        choose(tab, "tiles-mask", mask)
        q, k, v = (x[0, :, 0].double() for x in papers.inputs(papers.SEQLEN, papers.HEAD_DIM))
        visible = visible_keys(mask)
        steps = tab.evaluate("lab.figures.tiles.run.steps")
        rng = random.Random(order + mask)
        for frame in (*rng.sample(range(len(steps)), 3), len(steps) - 1):
            place = rng.randrange(len(papers.WATCHED))
            row = papers.WATCHED[place]
            slide(tab, "tiles-step", frame)
            slide(tab, "tiles-row", place)
            visited = torch.zeros(papers.SEQLEN, dtype=torch.bool)
            for i, j, *_ in steps[: frame + 1]:
                if i == row // papers.TILE:
                    visited[j * papers.TILE : (j + 1) * papers.TILE] = True
            s = (q[row] @ k.mT / papers.HEAD_DIM**0.5).masked_fill(
                ~(visited & visible[row]), -math.inf
            )
            one = state.lift(s, v)
            out = state.finalize(one)[0][: papers.NUMBERS]
            read = lambda name: tab.locator(f'#tiles [data-value="{name}"]').text_content()
            assert number(read("m")) == pytest.approx(float(one.m), abs=1e-4)
            assert number(read("l")) == pytest.approx(float(one.l), abs=1e-4)
            assert numbers(read("out")) == pytest.approx(out.tolist(), abs=1e-4)
            acc = out if order == "v1" else one.acc[: papers.NUMBERS]
            assert numbers(read("acc")) == pytest.approx(acc.tolist(), abs=1e-4)
        assert numbers(read("finally")) == pytest.approx(
            exact(q, k, v, visible, row).tolist(), abs=1e-4
        )

    def test_bytes_at_the_end_are_the_ledgers(self, tab):
        x = torch.randn(3, 1, papers.SEQLEN, 1, papers.HEAD_DIM)
        for order, mask in (("v1", "none"), ("v2", "window"), ("v2", "blocks")):
            choose(tab, "tiles-order", order)
            choose(tab, "tiles-mask", mask)
            slide(tab, "tiles-step", 63)
            with ledger(tiles=(papers.TILE, papers.TILE)) as book:
                onchip.attention(*x, kernel=papers.KERNELS[order], **papers.MASKS[mask])
            total = tab.locator(f'#tiles [data-total="{order}"]').text_content()
            assert number(total) == pytest.approx(book.hbm_bytes, rel=5e-3)
            assert number(fact(tab, "tiles", "read")) == pytest.approx(book.read_bytes, rel=5e-3)


def visible_keys(mask):
    """The dense (query, key) visibility."""
    q, k = torch.arange(papers.SEQLEN)[:, None], torch.arange(papers.SEQLEN)[None]
    if mask == "none":
        return torch.ones(papers.SEQLEN, papers.SEQLEN, dtype=torch.bool)
    if mask == "blocks":
        built = onchip.masks.build(onchip.masks.butterfly(), 1, 1, papers.SEQLEN, papers.SEQLEN)
        return built.to_dense()[0, 0]
    return (k <= q) & (q - k <= (papers.WINDOW if mask == "window" else papers.SEQLEN))


def exact(q, k, v, visible, row):
    s = (q[row] @ k.mT / papers.HEAD_DIM**0.5).masked_fill(~visible[row], -math.inf)
    return (s.softmax(-1) @ v)[: papers.NUMBERS]


class TestLength:
    def test_least_times_are_the_rooflines(self, tab):
        rng = random.Random(3)
        for _ in range(6):
            n, d, heads = rng.randrange(13), rng.randrange(3), rng.randrange(13)
            dtype, device = rng.randrange(2), rng.randrange(len(TABLE))
            slide(tab, "length-n", n)
            slide(tab, "length-heads", heads)
            choose(tab, "length-d", d)
            choose(tab, "length-dtype", dtype)
            choose(tab, "length-device", device)
            size = {"head_dim": papers.HEAD_DIMS[d], "dtype": papers.DTYPES[dtype]}
            problem = make_problem(papers.CONTEXTS[n], num_heads=papers.HEADS[heads], **size)
            for kind, extra in (("flash", 0), ("standard", scores_bytes(problem))):
                moved = least_bytes(problem) + 2 * extra  # written, and read once more
                line = roofline.bound(problem, TABLE[device], problem.flops, moved)
                shown = number(fact(tab, "length", f"{kind}-time"))
                assert shown == pytest.approx(line.seconds, rel=5.1e-3), (problem, kind)
                beside = out_bytes(problem) + extra
                assert number(fact(tab, "length", f"{kind}-memory")) == pytest.approx(
                    beside, rel=5.1e-3
                )

    def test_measured_points_are_the_benchmarks(self, tab):
        choose(tab, "length-device", 2)
        choose(tab, "length-d", 1)
        points = tab.evaluate("lab.figures.length.measured()")
        heads = papers.HEADS[tab.evaluate("lab.figures.length.chosen.heads")]
        flops = 4 * 16384**2 * 128 * heads
        assert points[-1][1] == pytest.approx(flops / 751.7e12, rel=1e-3)
        choose(tab, "length-device", 0)
        assert tab.evaluate("lab.figures.length.measured()") == []


def out_bytes(problem):
    """Of out and lse."""
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    return rows * (problem.head_dim_v * problem.dtype.itemsize + 4)


def least_bytes(problem):
    """q, k, v, out and lse, each once."""
    inputs = 3 * problem.num_heads * problem.seqlen_q * problem.head_dim * problem.dtype.itemsize
    return inputs + out_bytes(problem)


def scores_bytes(problem):
    """Of S and P together."""
    return 2 * problem.num_heads * problem.seqlen_q**2 * problem.dtype.itemsize


class TestPages:
    def tables(self, tab):
        rows = tab.locator("#pages .table").all()
        return {
            row.get_attribute("data-name"): [
                int(p) for p in row.locator(".where i").all_inner_texts()
            ]
            for row in rows
        }

    def test_buttons_do_what_the_python_pool_does(self, tab):
        play = Playground()
        tab.click("#pages-reset")
        prompt = "the river bank is the place where we swim"
        for what in (prompt, prompt, "every page"):
            tab.fill("#pages-text", what)
            tab.click("#pages-add")
            play.do({"do": "add", "text": what})
        for name, who in (("fork", "A"), ("beam", "B"), ("beam", "B"), ("truncate", "A")):
            tab.click(f'[data-act="{name} {who}"]')
            play.do({"do": name, "name": who, "count": 1})
        tab.click("#pages-generate")
        play.do({"do": "generate", "name": None})
        tab.click('[data-act="free C"]')
        sentence = play.do({"do": "free", "name": "C"})["say"]
        want = play.state()
        tab.wait_for_function(
            "(say) => document.querySelector('#pages-say').textContent === say", arg=sentence
        )
        assert self.tables(tab) == {t["name"]: t["pages"] for t in want["tables"]}
        assert fact(tab, "pages", "used") == f"{24 - want['free']} of 24"
        assert fact(tab, "pages", "shared") == str(want["shared"])
        assert tab.locator("#pages .page.many").count() == sum(refs > 1 for refs in want["refs"])
        assert tab.locator("#pages .page.cached").count() == want["cached"]

    def test_the_story_plays_until_another_control_is_used(self, tab):
        tab.click("#pages-story")
        assert tab.locator("#pages-story").text_content() == "Stop"
        tab.wait_for_selector('#pages [data-name="B"]')
        tab.click("#pages-reset")
        assert tab.locator("#pages-story").text_content() == "Show me"
        assert tab.locator("#pages .table").count() == 0

    def test_a_full_pool_shows_a_message(self, tab):
        tab.click("#pages-reset")
        for letters in ("abcdefghijkl", "mnopqrstuvwx"):
            tab.fill("#pages-text", " ".join(f"{c}{i}" for c in letters for i in range(4)))
            tab.click("#pages-add")
        tab.fill("#pages-text", "one more")
        tab.click("#pages-add")
        tab.wait_for_selector("#pages-say.bad")
        assert "0 are free" in tab.locator("#pages-say").text_content()


class TestRing:
    def test_events_are_those_of_the_simulation(self, tab):
        kinds = {"kernel": "kernel", "merge": "merge", "kv": "K, V", "dkv": "dK, dV"}
        rng = random.Random(5)
        for _ in range(12):
            layout, fabric, back = rng.randrange(3), rng.randrange(5), rng.randrange(2)
            devices, length = rng.randrange(3), rng.randrange(8)
            for name, value in (("layout", layout), ("fabric", fabric), ("pass", back)):
                choose(tab, f"ring-{name}", value)
            choose(tab, "ring-devices", devices)
            slide(tab, "ring-length", length)
            step = RingStep(
                record.LENGTHS[length], record.DEVICES[devices], LAYOUTS[layout], True, bool(back)
            )
            line = Timeline(step, record.FABRICS[fabric])
            assert number(fact(tab, "ring", "seconds")) == pytest.approx(line.seconds, rel=5.1e-3)
            assert number(fact(tab, "ring", "busy")) == pytest.approx(line.busy, rel=5.1e-3)
            shown = fact(tab, "ring", "exposed")
            exposed = 0.0 if shown == "nothing" else number(shown)
            assert exposed == pytest.approx(line.exposed, rel=5.1e-3, abs=1e-6 * line.seconds)
            want = {
                (s.device, s.what, s.round): (s.start, s.end)
                for device in range(step.num_devices)
                for s in line.events.spans(device)
            }
            got = {
                (s["device"], kinds[s["what"]], s["round"]): (s["start"], s["end"])
                for s in tab.evaluate("lab.figures.ring.line.spans")
            }
            assert got.keys() == want.keys()
            for key, span in want.items():
                assert got[key] == pytest.approx(span, rel=1e-5, abs=1e-9), key


class TestRows:
    def test_weights_are_the_softmax_of_the_models_own_scores(self, tab, data):
        weights = {}

        def attend(layer, q, k, v, softmax_scale=None, **options):
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
            s = torch.einsum("bqhd,bkhd->bhqk", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
            hidden = torch.ones_like(s, dtype=torch.bool).triu(1)
            weights[layer] = p = s.masked_fill(hidden, -math.inf).softmax(-1)
            return torch.einsum("bhqk,bkhd->bqhd", p, v)

        tokens = torch.tensor([list(record.SENTENCE.encode())])
        with torch.no_grad():
            builtin.tiny().run(tokens, torch.arange(tokens.shape[1])[None], attend)
        ends = [m.end() - 1 for m in re.finditer(r"\S+", record.SENTENCE)]
        starts = [0, *(end + 1 for end in ends)]
        opened = [
            number(x.removesuffix(" %")) for x in tab.locator("#rows small").all_inner_texts()
        ]
        assert record.SENTENCE.split()[opened.index(max(opened))] == "river"
        for layer, head, word in ((0, 0, 10), (3, 2, 10), (1, 3, 4)):
            choose(tab, "rows-layer", layer)
            choose(tab, "rows-head", head)
            tab.click(f'#rows [data-word="{word}"]')
            row = weights[layer][0, head, ends[word]]
            for other in range(word + 1):
                share = 100 * row[starts[other] : ends[other] + 1].sum()
                shown = tab.locator(f'#rows [data-word="{other}"] small').text_content()
                assert number(shown.removesuffix(" %")) == pytest.approx(float(share), abs=0.06)
        assert builtin.ABOUT[1:] in tab.locator("#rows-note").text_content()
