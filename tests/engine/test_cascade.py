"""Shared prefixes in the engine: the groups of a step, and outputs that do not depend on them."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from onchip.cost import hardware
from onchip.cost.prefixes import costs
from onchip.engine import ByteTokenizer, Engine, ExecutionConfig, Limits, SamplingParams
from onchip.engine import cascade as cascades
from onchip.engine.cascade import BatchRows, CascadePlanner, make_planner
from onchip.engine.cuda_graphs import RecordedGraph, StepGraphs, shared_sizes
from onchip.kvcache import KVCache, Spec
from onchip.models import ModelConfig, builtin, random_model
from tests.engine.test_random_events import SHAPES, run

PREFIX = "a system prompt of some forty characters, "


class FakeModel:
    """The sizes of a model, for a planner."""

    def __init__(self, num_heads=1, dtype=torch.float32):
        self.config, self.dtype = SimpleNamespace(num_heads=num_heads), dtype


def make_cache(num_pages=400, max_seqs=32):
    return KVCache(Spec(1, 1, 4, 4, 4, torch.float32, "cpu"), num_pages, max_seqs=max_seqs)


def open_computed(cache, tokens):
    sequence = cache.open(tokens)
    cache.append(sequence, tokens[sequence.length :])
    cache.commit(sequence)
    return sequence


def rows_of(sequences, counts=None):
    counts = counts or [1] * len(sequences)
    return BatchRows(sequences, counts, (len(sequences), sum(counts)))


def unpack(step, num_seqs):
    """(leaders, pages, rows, row_index, own_from) of a step's numbers."""
    num_tokens = len(step.numbers) - step.shape.num_numbers(num_seqs, 0)
    return [t.tolist() for t in step.numbers.split(step.shape.sizes(num_seqs, num_tokens))]


def planner_of(cache, mode="always"):
    return CascadePlanner(FakeModel(), cache, mode)


def test_one_level_of_the_groups_that_save_most():
    """Four pages are shared by all, eight more by half of them: 3 * 12 + 3 * 4 > 7 * 4. With two
    more sequences of the first four pages alone, the same groups leave these two out.
    """
    cache = make_cache()
    common, ends = list(range(16)), [[100 + i for i in range(32)], [200]]
    deep = [open_computed(cache, common + ends[0])]
    deep += [cache.fork(deep[0]) for _ in range(3)]
    flat = [open_computed(cache, common + [300 + i] * 9) for i in range(4)]
    batch = rows_of([deep[0], flat[0], deep[1], deep[2], flat[1], deep[3]])
    step = planner_of(cache).plan(batch)
    _, pages, _, row_index, own_from = unpack(step, 6)
    assert own_from == [12, 0, 12, 12, 0, 12] and set(pages) == {12}
    assert sorted(row_index) == [-1, -1, 0, 1, 2, 3] and step.unread_tokens == 3 * 12 * 4
    many = rows_of([*flat, deep[0], deep[1]])
    step = planner_of(cache).plan(many)
    assert unpack(step, 6)[-1] == [4] * 6 and step.unread_tokens == 5 * 4 * 4


def test_two_groups_have_slots_of_their_own():
    cache = make_cache()
    groups = []
    for first, count in ((1, 3), (50, 2)):
        leader = open_computed(cache, list(range(first, first + 21)))
        groups.append([leader, *(cache.fork(leader) for _ in range(count - 1))])
    mixed = [groups[1][0], groups[0][0], groups[0][1], groups[1][1], groups[0][2]]
    step = planner_of(cache).plan(rows_of(mixed))
    leaders, pages, rows, row_index, own_from = unpack(step, 5)
    assert own_from == [5] * 5 and pages == [5, 5]
    per_slot = step.shape.rows
    for token, row in enumerate(row_index):
        assert rows[row] == token
        same = mixed[token].table[0] == mixed[leaders[row // per_slot]].table[0]
        assert same


def test_sequences_with_many_new_tokens_stay_alone():
    cache = make_cache()
    leader = open_computed(cache, list(range(21)))
    sequences = [leader, cache.fork(leader), cache.fork(leader)]
    planner = planner_of(cache)
    step = planner.plan(rows_of(sequences, [3, cascades.MOST_ROWS + 1, 1]))
    *_, rows, row_index, own_from = unpack(step, 3)
    assert own_from == [5, 0, 5]
    assert row_index == [0, 1, 2, *[-1] * (cascades.MOST_ROWS + 1), 3]
    assert planner.plan(rows_of(sequences[1:], [cascades.MOST_ROWS + 1, 1])) is None


def test_a_graph_with_too_few_slots_leaves_members_out():
    """Slots for one group, then for several; the last shape takes what it can hold."""
    cache = make_cache()
    sequences = []
    for first in (1, 50, 90, 130, 170, 210):
        leader = open_computed(cache, list(range(first, first + 9 + first // 10)))
        sequences += [leader, cache.fork(leader)]
    planner = planner_of(cache)
    shapes = planner.graph_shapes(12)
    batch = rows_of(sequences)._replace(padded=(16, 16))
    step = planner.plan(batch, shapes)
    assert step.shape == shapes[-1] and len(unpack(step, 16)[3]) == 16
    own_from = unpack(step, 16)[-1]
    assert [n > 0 for n in own_from] == [False] * 4 + [True] * 8 + [False] * 4
    alone = rows_of(sequences[:2])._replace(padded=(16, 16))
    assert planner.plan(alone, shapes).shape == shapes[0]


def test_many_small_groups_give_way_to_their_common_prefix():
    """12 pairs share 10 pages each, all of them the first 4: 12 * 10 > 23 * 4, but only some pairs
    have a slot.
    """
    cache = make_cache(num_pages=900)
    sequences = []
    for i in range(12):
        leader = open_computed(cache, [*range(16), *[100 + i] * 25])
        sequences += [leader, cache.fork(leader)]
    planner = planner_of(cache)
    shapes = planner.graph_shapes(24)
    step = planner.plan(rows_of(sequences)._replace(padded=(32, 32)), shapes)
    assert unpack(step, 32)[-1] == [4] * 24 + [0] * 8 and step.shape == shapes[0]
    assert unpack(planner_of(cache).plan(rows_of(sequences)), 24)[-1] == [10] * 24


def test_a_step_with_the_same_sequences_plans_nothing(monkeypatch):
    """Sequences grow; groups change when one enters, leaves or loses pages."""
    cache = make_cache()
    leader = open_computed(cache, list(range(21)))
    sequences = [leader, *(cache.fork(leader) for _ in range(5))]
    planner = planner_of(cache)
    planned, added = [], []
    plan, add = CascadePlanner._plan, cache.prefix_tree.add
    monkeypatch.setattr(CascadePlanner, "_plan", lambda *args: planned.append(1) or plan(*args))
    monkeypatch.setattr(cache.prefix_tree, "add", lambda *args: added.append(1) or add(*args))
    for _ in range(30):
        cache.reserve_each(sequences)
        step = planner.plan(rows_of(list(sequences)))
        cache.commit_all(sequences, [s.length for s in sequences])
    assert len(planned) == 1 and len(added) == 6 and step.unread_tokens == 5 * 5 * 4
    cache.free(sequences.pop())
    assert planner.plan(rows_of(sequences)).unread_tokens == 4 * 5 * 4
    cache.truncate(sequences[-1], 18)
    assert planner.plan(rows_of(sequences)).unread_tokens in (3 * 5 * 4, 4 * 4 * 4)
    assert len(planned) == 3 and len(added) == 7


def price_on_h200(monkeypatch, num_heads=16, num_kv_heads=8, page_size=16):
    """A planner for Qwen3-0.6B on an H200, over sequences on the CPU."""
    q = torch.empty(1, num_heads, 128, dtype=torch.bfloat16, device="meta")
    pages = torch.empty(9, page_size, num_kv_heads, 128, dtype=torch.bfloat16, device="meta")
    price = costs(q, pages, pages, hardware.H200)
    monkeypatch.setattr(cascades, "_find_costs", lambda *args: price)


@pytest.mark.parametrize(
    ("num_samples", "num_tokens", "pays"),
    [(64, 16384, True), (64, 1024, True), (2, 16384, False), (2, 512, False), (64, 16, False)],
)
def test_the_cost_model_decides(monkeypatch, num_samples, num_tokens, pays):
    price_on_h200(monkeypatch)
    cache = KVCache(Spec(1, 1, 4, 4, 16, torch.float32, "cpu"), 4000, max_seqs=64)
    leader = open_computed(cache, list(range(num_tokens)))
    sequences = [leader, *(cache.fork(leader) for _ in range(num_samples - 1))]
    planner = planner_of(cache, "auto")
    batch = rows_of(sequences)._replace(padded=(64, 64))
    step = planner.plan(batch, planner.graph_shapes(64))
    assert (step is not None) == pays
    if pays:
        assert step.unread_tokens == (num_samples - 1) * num_tokens
        assert step.shape == planner.graph_shapes(64)[0] and step.shape.segments == 16


def test_sizes_of_graphs_are_bounded():
    assert shared_sizes(256) == [8, 16, 32, 64, 128, 256]
    assert shared_sizes(5) == [5] and shared_sizes(100) == [8, 16, 32, 64, 100]


def test_an_unknown_mode_is_refused(tiny):
    with pytest.raises(ValueError, match="cascade='maybe' must be one of 'auto', 'off', 'always'"):
        tiny.engine(cascade="maybe")


WAYS = {
    "plain": {},
    "overlap": {"overlap": True},
    "few_pages": {"num_pages": 40},
    "few_pages_and_a_host": {"num_pages": 40, "host_pages": 200},
    "no_prefix_caching": {"prefix_caching": False},
    "small_chunks": {"budget": 13},
    "large_pages": {"page_size": 16, "num_pages": 90},
    "single_tokens": {"page_size": 1, "num_pages": 1200},
    "fp8": {"kv_dtype": "fp8"},
    "int8": {"kv_dtype": "int8"},
}


@pytest.mark.parametrize("way", WAYS)
def test_outputs_do_not_depend_on_the_cascade(tiny, way):
    """All sampling parameters, beams and forks, in fp32; `drain` checks the cache after each
    step.
    """
    outputs = []
    for mode in ("off", "always"):
        with tiny.engine(cascade=mode, **WAYS[way]) as one:
            if one.tier:
                one.costs.link_bytes_per_s = 1e30
            tiny.ask(one)
            outputs.append(tiny.visible(tiny.drain(one)[0]))
            stats = one.stats()
            assert (stats.cascade_steps > 5 and stats.tokens_unread > 100) == (mode == "always")
            if one.tier:
                assert stats.preempted_by_swap
    assert outputs[0] == outputs[1]


def serve(model, mode, prompts, params, **options):
    options = {"num_pages": 300, "page_size": 4, "seed": 1} | options
    limits = Limits(256, 64, 16)
    execution = ExecutionConfig(cascade=mode)
    with Engine(model, ByteTokenizer(), limits=limits, execution=execution, **options) as one:
        requests = [one.add(prompt, params) for prompt in prompts]
        while one.has_work:
            one.step()
            one.scheduler.check()
            one.cache.check()
        return [[o.token_ids for o in r.output().outputs] for r in requests], one.stats()


def both(model, prompts, params, **options):
    """The outputs with a cascade, which equal the outputs without, and the statistics."""
    (plain, _), (shared, stats) = (
        serve(model, mode, prompts, params, **options) for mode in ("off", "always")
    )
    assert plain == shared
    return stats


def test_greedy_outputs_of_the_builtin_model():
    """A system prompt, and several samples of one prompt, token for token."""
    model = builtin.tiny(dtype=torch.float32)
    prompts = [PREFIX + tail for tail in ("And", "He said", "In the", "Then")]
    greedy = SamplingParams(temperature=0, max_tokens=24, n=2, ignore_eos=True)
    stats = both(model, prompts, greedy)
    assert stats.cascade_steps > 20 and stats.tokens_unread > 20 * 7 * 40


@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_windows_and_softcap(family):
    """gemma2: every second layer has a window of 8, and scores are capped. mistral: every layer has
    one, so no step has a cascade.
    """
    fields = {
        "model_type": family,
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "sliding_window": 8,
    }
    if family == "gemma2":
        fields |= {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}
        fields |= {"final_logit_softcapping": 10.0}
    model = random_model(ModelConfig.from_hf(fields))
    greedy = SamplingParams(temperature=0, max_tokens=12, n=2, ignore_eos=True)
    prompts = [PREFIX + tail for tail in "abc"]
    if family == "mistral":
        assert all(layer.window for layer in model.config.layers)
        assert serve(model, "always", prompts, greedy)[1].cascade_steps == 0
    else:
        assert both(model, prompts, greedy).cascade_steps > 8


def test_drafts():
    """Several rows of a request are rows of its group, and rejected ones leave no trace."""
    from onchip.engine.speculation.config import SpeculativeConfig

    config = SpeculativeConfig(4, prompt_lookup_max=3, prompt_lookup_min=1)
    model = builtin.tiny(dtype=torch.float32)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [PREFIX + "He said unto him, He said unto" + tail for tail in ("", " the", " him")]
    stats = both(model, prompts, greedy, speculative_config=config)
    assert stats.cascade_steps > 5 and stats.speculation.num_accepted_tokens > 2


def test_steps_that_read_host_memory_have_no_cascade():
    """Long requests with their first pages on the host; ordinary ones share pages between their
    steps.
    """
    model = builtin.tiny(dtype=torch.float32)
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [PREFIX + "a", "b" * 150, PREFIX + "c", PREFIX + "d"]
    stats = both(model, prompts, greedy, num_pages=41, offload_pages=200)
    assert stats.pages_streamed and stats.cascade_steps


GREEDY = [SamplingParams(temperature=0, max_tokens=n, n=n % 3 + 1) for n in (3, 7, 12, 16)]


@pytest.fixture(scope="module")
def expected(tiny):
    """The outputs of each prompt with each of GREEDY, alone and without a cascade."""
    outputs = {}
    with tiny.engine(cascade="off", overlap=False) as one:
        for prompt in set(tiny.PROMPTS):
            for how in GREEDY:
                one.add(prompt, how, request_id="request-0")
                (outputs[prompt, how.max_tokens],) = tiny.visible(tiny.drain(one)[0])
    return outputs


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(tiny, expected, seed):
    """Requests arrive, are cancelled, preempted and swapped at random: requests that finish give
    what they give alone.
    """
    draw, left = random.Random(seed), 40
    options = {"num_pages": 60, "host_pages": 100, "overlap": draw.random() < 0.5}
    with tiny.engine(cascade="always", **options) as one:
        one.costs.link_bytes_per_s = 1e30 if seed % 2 else 1.0
        running, finished = {}, 0
        while left or one.has_work:
            if left and draw.random() < 0.6:
                prompt, how = draw.choice(tiny.PROMPTS), draw.choice(GREEDY)
                running[one.add(prompt, how).request_id] = prompt, how
                left -= 1
            if running and draw.random() < 0.05:
                name = draw.choice(list(running))
                assert one.cancel(name)
                del running[name]
            if one.scheduler.running and draw.random() < 0.1 and one._in_flight is None:
                one.scheduler.preempt(draw.choice(one.scheduler.running))
            for output in one.step():
                if output.finished:
                    prompt, how = running.pop(output.request_id)
                    (got,) = tiny.visible({"request-0": output})
                    assert got == expected[prompt, how.max_tokens]
                    finished += 1
            tiny.check(one)
        tiny.check_empty(one)
        assert finished > 25 and one.stats().cascade_steps > 10


class Checked:
    """Checks the cascade of each step of a hash engine: two calls read the pages of every sequence,
    in order.
    """

    def compute(self, step):
        if not hasattr(self, "planner"):
            self.planner, self.num_shared = planner_of(self.cache), 0
        counts = [chunk.num_tokens for chunk in step.chunks]
        reads_host = any(s.host_tokens for s in step.sequences)
        batch = rows_of(step.sequences, counts)
        shared = None if reads_host or not step.chunks else self.planner.plan(batch)
        if shared is not None:
            self.num_shared += 1
            self.check_tables(step, counts, shared)
        return super().compute(step)

    def check_tables(self, step, counts, shared):
        size = self.cache.spec.page_size
        view = self.cache.view(step.sequences, extra=shared.numbers)
        tables = view.share(view.extra, shared.shape, size).shared
        slots, per_slot, segments, _ = shared.shape
        owners = [i for i, count in enumerate(counts) for _ in range(count)]
        for token, row in enumerate(tables.row_index.tolist()):
            owner = owners[token]
            entries = [row // per_slot + k * slots for k in range(segments)] if row >= 0 else []
            pages = [
                page
                for entry in entries
                for page in tables.page_table[entry][: tables.seqlens[entry] // size].tolist()
            ]
            assert len(pages) * size <= step.chunks[owner].start
            own = -(-int(tables.own_seqlens[owner]) // size)
            pages += tables.own_table[owner][:own].tolist()
            assert pages == step.sequences[owner].table.pages_from(0)
            assert row < 0 or tables.rows[row] == token


QUICK_SHAPES = ("tight", "ahead_late", "drafts", "draft_model_trees", "long_trees")


@pytest.mark.parametrize(
    "shape",
    [s if s in QUICK_SHAPES else pytest.param(s, marks=pytest.mark.slow) for s in SHAPES],
)
def test_shared_pages_over_random_events(engine, alone, shape):
    engines = []

    class CheckedEngine(Checked, engine):
        def __init__(self, **options):
            super().__init__(**options)
            engines.append(self)

    run(CheckedEngine, alone, SHAPES[shape], 2, 150)
    assert engines[0].num_shared > 3


class Again(NamedTuple):
    replay: Callable


class Replayed(StepGraphs):
    """Graphs on the CPU: a replay computes the static batch, with its padding. Only tokens that
    belong to no sequence are left out: values are checked on the CPU.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.used = []

    def _record(self, shape):
        batch, shared = self._cache.static_batch(shape, self._table), self._shared_shapes.get(shape)
        hidden = torch.full((shape.num_seqs, self._model.config.hidden_size), float("nan"))

        def replay():
            self.used.append((shape.num_tokens, shape.max_seqlen_q > 1, shared))
            got = self._compute(batch, shared) if shared else self._forward(self._cut(batch))
            hidden.fill_(float("nan"))
            hidden[: len(got)] = got

        return RecordedGraph(Again(replay), batch, hidden)

    def _compute(self, batch, shared):
        if batch.max_seqlen_q == 1:
            return self._forward(batch, shared)
        num_numbers = shared.num_numbers(batch.shape.num_seqs, batch.shape.num_tokens)
        numbers = batch.extra[-num_numbers:]
        whole = batch.share(numbers, shared, self._cache.spec.page_size)
        cut = self._cut(whole._replace(extra=batch.extra[:-num_numbers]))
        row_index = whole.shared.row_index[: len(cut.slot_mapping)]
        assert (whole.shared.row_index[len(cut.slot_mapping) :] == -1).all()
        return self._forward(cut._replace(shared=whole.shared._replace(row_index=row_index)))

    def _cut(self, batch):
        if batch.max_seqlen_q == 1:
            return batch
        tokens = int(batch.cu_seqlens_q[-1])
        extra = torch.cat([batch.extra[:tokens], batch.extra[batch.shape.num_tokens :]])
        return batch._replace(slot_mapping=batch.slot_mapping[:tokens], extra=extra)


@pytest.mark.parametrize("overlap", [False, True])
def test_static_batches_give_what_eager_steps_give(tiny, monkeypatch, overlap):
    """All graphs are recorded at the start; slots, rows and sequences are padded."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    outputs, used = [], []
    for mode in ("off", "always"):
        options = {"overlap": overlap, "num_pages": 60, "host_pages": 90, "budget": 13}
        with tiny.engine(cascade=mode, **options) as one:
            if mode == "always":
                runner = one._runner
                runner._graphs = Replayed(
                    one.model, one.cache, runner._last_tokens, runner._cascade
                )
                runner._graphs.record_all(one.limits.max_num_batched_tokens)
                monkeypatch.setattr(Replayed, "_record", None)
            tiny.ask(one)
            outputs.append(tiny.visible(tiny.drain(one)[0]))
            used = runner._graphs.used if mode == "always" else []
    assert outputs[0] == outputs[1]
    kinds = {(tokens, mixed) for tokens, mixed, shared in used if shared is not None}
    assert {(12, False), (64, True)} <= kinds


def test_a_planner_of_no_layer(tiny):
    with tiny.engine() as one:
        assert make_planner(one.model, one.cache, "off") is None
        assert make_planner(one.model, one.cache, "auto") is not None


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["graphs", "eager", "few_pages", "fp8"])
def test_graphs_and_eager_steps_on_a_gpu(tiny, way):
    """In fp32, against steps without a cascade."""
    options = {
        "graphs": {},
        "eager": {"graphs": False},
        "few_pages": {"num_pages": 40, "host_pages": 200},
        "fp8": {"kv_dtype": "fp8"},
    }[way]
    outputs = []
    for mode in ("off", "always"):
        with tiny.engine("cuda", cascade=mode, **options) as one:
            one.warm_up()
            tiny.ask(one)
            outputs.append(tiny.visible(tiny.drain(one)[0]))
            assert (one.stats().cascade_steps > 5) == (mode == "always")
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
def test_a_cascade_does_not_synchronize_and_records_nothing_later(tiny, monkeypatch):
    with tiny.engine("cuda", cascade="always") as one:
        one.warm_up()
        tiny.ask(one)
        tiny.drain(one)  # everything is compiled
        tiny.ask(one)
        monkeypatch.setattr(StepGraphs, "_record", None)
        before = one.stats().cascade_steps
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            while one.has_work:
                one.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert one.stats().cascade_steps > before
