"""Cascade: reading shared pages once changes the bytes read, never the result."""

from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import onchip
from onchip.core import dispatch, functional
from onchip.core.device import DeviceInfo
from onchip.core.problem import Problem, SMPartition, Tensors, has_uniform_lengths
from onchip.cost.prefixes import Occupancy, PrefixCosts, costs
from onchip.fold import cascade
from onchip.testing import assert_accurate

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 16, 4
FREE = PrefixCosts(page=100, query=1, partial=1, level=0)


@st.composite
def tries(draw):
    """Page tables (as lists) of sequences that fork from one another, in any order, and their
    lengths: 1 to 3 levels, runs of 0 to 3 pages, partial last pages.
    """
    fresh = iter(range(10_000))
    run = lambda low=0: [next(fresh) for _ in range(draw(st.integers(low, 3)))]
    tables = [
        run()
    ]  # every sequence of a level continues as one to three sequences, each with its own run
    for _ in range(draw(st.integers(1, 3))):
        tables = [t + run() for t in tables for _ in range(draw(st.integers(1, 3)))]
    tables = draw(st.permutations([t + run(low=1) for t in tables]))
    short = st.integers(0, PAGE - 1)
    return tables, [len(t) * PAGE - draw(short) for t in tables]


def cache(tables, lengths, dtype=torch.float64):
    """Pages in a random order, NaN in every slot without a token; the padded tables."""
    used = max(max(t) for t in tables) + 1
    place = torch.randperm(used + 2)
    pages = torch.full((2, used + 2, PAGE, KV_HEADS, DIM), float("nan"), dtype=dtype)
    table = torch.full((len(tables), max(map(len, tables)) + 1), -1, dtype=torch.int32)
    for b, (t, n) in enumerate(zip(tables, lengths, strict=True)):
        table[b, : len(t)] = place[torch.tensor(t)].int()
        for i in range(len(t)):
            slots = pages[:, table[b, i], : min(PAGE, n - i * PAGE)]
            slots.copy_(torch.where(slots.isnan(), torch.randn(slots.shape, dtype=dtype), slots))
    return tuple(pages), table, torch.tensor(lengths, dtype=torch.int32)


def count_calls(attend):
    """attend, and the list of its calls' q."""
    calls = []

    def call(q, *args, **options):
        calls.append(q)
        return attend(q, *args, **options)

    return call, calls


def cascaded(q, pages, table, seqlens, plan, **options):
    return cascade.run(plan, onchip.paged_attention, q, pages, plan.own(table, seqlens), **options)


@settings(max_examples=100)
@given(tries(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**20))
def test_equals_the_plain_call_for_any_trie(trie, seqlen_q, levels, seed):
    torch.manual_seed(seed)
    tables, lengths = trie
    lengths = [max(n, seqlen_q) for n in lengths]
    pages, table, seqlens = cache(tables, lengths)
    q = torch.randn(len(tables), seqlen_q, HEADS, DIM, dtype=torch.float64)
    plan = cascade.plan(table, seqlens, PAGE, FREE, seqlen_q=seqlen_q, max_levels=levels)
    attend, calls = count_calls(onchip.paged_attention)
    options = {"sinks": torch.randn(HEADS, dtype=torch.float64), "softcap": 3.0}
    got = cascade.run(plan, attend, q, pages, plan.own(table, seqlens), **options)
    want = onchip.paged_attention(q, *pages, table, seqlens, return_lse=True, **options)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert len(calls) == len(plan.levels) + 1 <= levels + 1


@settings(max_examples=100)
@given(tries(), st.integers(0, 2**20))
def test_packed_queries_of_unequal_number(trie, seed):
    torch.manual_seed(seed)
    tables, lengths = trie
    pages, table, seqlens = cache(tables, lengths)
    lengths_q = torch.minimum(torch.randint(0, 4, (len(tables),)), seqlens)
    cu = torch.cat([torch.zeros(1), lengths_q.cumsum(0)]).int()
    packing = {"cu_seqlens_q": cu, "max_seqlen_q": int(lengths_q.max())}
    q = torch.randn(int(cu[-1]), HEADS, DIM, dtype=torch.float64)
    plan = cascade.plan(table, seqlens, PAGE, FREE, cu_seqlens_q=cu)
    got = cascaded(q, pages, table, seqlens, plan)
    want = onchip.paged_attention(q, *pages, table, seqlens, return_lse=True, **packing)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@settings(max_examples=200)
@given(tries(), st.integers(0, 400), st.integers(0, 40))
def test_no_choice_of_groups_saves_more(trie, level_bytes, query_bytes):
    """The plan's saving is the sum of its levels' savings and beats every other set of groups (by
    brute force over all subsets of the trie); every level pays for itself.
    """
    tables, lengths = trie
    _, table, seqlens = cache(tables, lengths, torch.float32)
    model = PrefixCosts(100, query_bytes, 7, level_bytes)
    plan = cascade.plan(table, seqlens, PAGE, model)
    once = 7 * len(tables) if plan.levels else 0
    assert plan.saved == sum(level.saved for level in plan.levels) - once
    assert all(level.saved >= 0 for level in plan.levels)
    assert plan.saved == brute_force(tables, lengths, model)


def brute_force(tables, lengths, model):
    prefixes = {}
    for b, (t, n) in enumerate(zip(tables, lengths, strict=True)):
        for i in range(1, (n - 1) // PAGE + 1):
            prefixes.setdefault(tuple(t[:i]), set()).add(b)
    longest = {}
    for prefix, members in sorted(prefixes.items(), key=lambda x: len(x[0])):
        if len(members) > 1:
            longest[frozenset(members)] = len(prefix)
    nodes = list(longest.items())
    assume(len(nodes) <= 10)
    return max(saving(nodes, bits, len(tables), model) for bits in range(1 << len(nodes)))


def saving(nodes, bits, batch, model):
    chosen = [node for i, node in enumerate(nodes) if bits >> i & 1]
    depth = lambda node: sum(node[0] < other[0] for other in chosen)
    start = lambda node: max((n for other, n in chosen if node[0] < other), default=0)
    total = sum((len(m) - 1) * (n - start((m, n))) * model.page for m, n in chosen)
    total -= sum(len(m) for m, _ in chosen) * model.query
    levels = max((depth(node) + 1 for node in chosen), default=0)
    if levels > cascade.MAX_LEVELS:
        return 0
    return total - levels * model.level - (batch * model.partial if chosen else 0)


def three_levels():
    """Six sequences: all share 2 pages, the even ones 3 more, two of these 1 more; interleaved."""
    system, even, twins = [90, 91], [80, 81, 82], [70]
    own = [[10 * b + i for i in range(3)] for b in range(6)]
    middle = [even + twins, [], even, [], even + twins, []]
    return [system + m + o for m, o in zip(middle, own, strict=True)]


def groups_of(plan):
    return [[tuple(group) for group in level.groups] for level in plan.levels]


class TestPlan:
    tables = three_levels()
    lengths = tuple(len(t) * PAGE - 1 for t in tables)
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(t) for t in tables], True, -1).tolist()

    def test_finds_known_groups(self):
        plan = cascade.plan(self.padded, self.lengths, PAGE, FREE)
        everyone, evens, twins = (0, 1, 2, 3, 4, 5), (0, 2, 4), (0, 4)
        assert groups_of(plan) == [[(everyone, 0, 2)], [(evens, 2, 5)], [(twins, 5, 6)]]
        assert plan.shared == (6, 2, 5, 2, 6, 2)
        assert plan.levels[1].page_table.tolist() == [[80, 81, 82]]
        assert plan.levels[1].seqlens.tolist() == [3 * PAGE]
        assert plan.levels[0].rows == slice(0, 6)  # in order already: no copy of the queries
        assert plan.levels[1].rows.tolist() == [0, 2, 4]

    def test_a_level_left_out_is_read_by_the_next(self):
        """With one level allowed, the even sequences also read the pages that all share."""
        plan = cascade.plan(self.padded, self.lengths, PAGE, FREE, max_levels=1)
        assert groups_of(plan) == [[((0, 2, 4), 0, 5)]]
        assert plan.saved == 2 * 5 * 100 - 3 - 6  # three queries in the level, six of partials

    def test_pages_must_be_full_and_before_the_queries(self):
        table = [[1, 2, 3], [1, 2, 4]]
        pages = lambda seqlens, n=1: cascade.plan(table, seqlens, PAGE, FREE, seqlen_q=n).shared
        assert pages([9, 9]) == (2, 2)
        assert pages([8, 9]) == (1, 1)  # the last token of page 2 is a query of the first
        assert pages([12, 9], 5) == (1, 1)
        assert pages([4, 9]) == (0, 0)

    def test_the_same_page_after_other_pages_is_not_shared(self):
        plan = cascade.plan([[1, 7, 8], [2, 7, 9]], [12, 12], PAGE, FREE)
        assert plan.levels == ()

    def test_groups_of_one_level_are_one_call(self):
        """Four pairs with nothing in common: one level of four groups."""
        table = [[b // 2, 10 + b] for b in range(8)]
        plan = cascade.plan(table, [7] * 8, PAGE, FREE)
        assert len(plan.levels) == 1 and len(plan.levels[0].groups) == 4
        assert plan.levels[0].rows == slice(0, 8)

    @pytest.mark.parametrize("batch", [0, 1])
    def test_a_batch_without_shared_pages(self, batch):
        table = torch.zeros(batch, 3, dtype=torch.int32)
        assert cascade.plan(table, [5] * batch, PAGE, FREE).levels == ()

    def test_a_thousand_forks_one_after_another(self):
        """The deepest trie: each sequence leaves the common path one page later."""
        path = torch.arange(1001, dtype=torch.int32).expand(1000, -1)
        leaves = torch.arange(1001) > torch.arange(1000)[:, None]
        table = torch.where(leaves, path + 1000 * (1 + torch.arange(1000)[:, None]), path).int()
        plan = cascade.plan(table, [4004] * 1000, PAGE, FREE)
        assert 0 < len(plan.levels) <= cascade.MAX_LEVELS


def prefixed(batch, shared_tokens, own_tokens=256, **changes):
    """The plan of a GQA 32/8 model on a GPU, 16 tokens a page; changes: of its occupancy."""
    width, shared = (shared_tokens + own_tokens) // 16, shared_tokens // 16
    table = torch.arange(batch * width, dtype=torch.int32).view(batch, width)
    table[:, :shared] = table[0, :shared]
    model = TestModel.model()
    model = model._replace(occupancy=model.occupancy._replace(**changes))
    return cascade.plan(table, [shared_tokens + own_tokens] * batch, 16, model)


class TestModel:
    """Calls one after the other."""

    @staticmethod
    def model():
        q = torch.empty(64, 1, 32, 128, dtype=torch.bfloat16, device="meta")
        pages = torch.empty(1, 16, 8, 128, dtype=torch.bfloat16, device="meta")
        return costs(q, pages, pages)

    @staticmethod
    def plan(batch, shared_tokens):
        return prefixed(batch, shared_tokens, own_queries=0)

    @pytest.mark.parametrize("batch, tokens", [(64, 8192), (16, 4096), (256, 512)])
    def test_long_prefixes_are_worth_it(self, batch, tokens):
        plan = self.plan(batch, tokens)
        assert len(plan.levels) == 1 and plan.saved > 0

    @pytest.mark.parametrize("batch, tokens", [(64, 32), (2, 2048), (8, 256), (8, 2048)])
    def test_tiny_prefixes_are_not(self, batch, tokens):
        assert self.plan(batch, tokens).levels == ()

    def test_one_unrelated_sequence_does_not_add_a_level(self):
        """63 sequences share 8k tokens, another one only the first page: not worth a call."""
        table = torch.arange(64 * 528, dtype=torch.int32).view(64, 528)
        table[:63, :512] = table[0, :512]
        table[63, 0] = table[0, 0]
        q = torch.empty(64, 1, 32, 128, dtype=torch.bfloat16, device="meta")
        pages = torch.empty(1, 16, 8, 128, dtype=torch.bfloat16, device="meta")
        plan = cascade.plan(table, [8448] * 64, 16, costs(q, pages, pages))
        assert groups_of(plan) == [[(tuple(range(63)), 0, 512)]]

    @pytest.mark.parametrize(
        "batch, tokens, segments",
        [
            (64, 8192, 8),
            (60, 8192, 8),
            (32, 8192, 16),
            (128, 8192, 4),
            (64, 4096, 8),
            (512, 4096, 1),
        ],
    )
    def test_segments_fill_the_processors_once(self, batch, tokens, segments):
        """132 processors, 8 kv heads, tiles of 32 queries with their 4 heads."""
        (level,) = self.plan(batch, tokens).levels
        assert level.segments == segments
        assert level.seqlens.tolist() == [tokens // segments] * segments
        assert segments == 1 or 66 < segments * 8 * -(-batch // 32) <= 132

    @pytest.mark.parametrize("batch, tokens", [(64, 2048), (20, 16384), (16, 8192)])
    def test_runs_too_short_to_fill_half_the_processors_are_not_cut(self, batch, tokens):
        """Too few keys for segments of 512, or too few queries for a tile."""
        (level,) = self.plan(batch, tokens).levels
        assert level.segments == 1 and level.seqlens.tolist() == [tokens]

    @pytest.mark.parametrize("groups", [1, 2, 4])
    @pytest.mark.parametrize("batch", [26, 32, 33, 60, 64, 100, 130, 250])
    def test_segments_are_for_kernels_that_do_not_split_keys(self, batch, groups):
        """Cut runs use hopper, in calls that are packed (several groups) or not."""
        members = batch // groups
        table = torch.arange(members * groups * 528, dtype=torch.int32).view(groups, members, 528)
        table[:, :, :512] = table[:, :1, :512].clone()
        q = torch.empty(members * groups, 1, 32, 128, dtype=torch.bfloat16, device="meta")
        pages = torch.empty(1, 16, 8, 128, dtype=torch.bfloat16, device="meta")
        lengths = [8448] * members * groups
        cu = range(members * groups + 1)
        model = costs(q, pages, pages)
        plan = cascade.plan(table.flatten(0, 1), lengths, 16, model, cu_seqlens_q=list(cu))
        (level,) = plan.levels
        assert len(level.groups) == groups and plan.together is None
        rows = level.segments * groups, level.max_seqlen_q, level.page_table.shape[1] * 16
        types = {"dtype": torch.bfloat16, "out_dtype": torch.float32, "softmax_scale": 0.1}
        call = Problem(*rows, 32, 8, 128, 128, **types, packed=groups > 1, page_size=16)
        queries = q[:, 0].repeat(level.segments, 1, 1)
        call = call._replace(
            uniform_lengths=has_uniform_lengths(call, Tensors(queries, pages, pages))
        )
        kernel = dispatch.plan(call, DeviceInfo("cuda", "H200", (9, 0))).kernel
        assert level.segments == 1 or kernel == "hopper"
        assert level.segments > 1 or members < 24 or groups * -(-members // 32) > 8

    def test_segments_cost_what_they_move(self):
        """8 segments write the queries of 64 sequences and their fp32 results 8 times; 2 tiles of
        queries are multiplied with every page, which hides the time to read it.
        """
        plan = self.plan(64, 8192)
        model = self.model()
        queries = 64 * (model.query + 7 * model.segment)
        products = 512 * (2 * model.products - model.first)
        saved = 63 * 512 * model.page - queries - products - model.level
        assert products > 0 and plan.levels[0].saved == pytest.approx(saved)
        assert plan.saved == pytest.approx(saved - 64 * model.partial)

    def test_a_segment_too_many_is_not_taken_for_free(self):
        """Where one more partial state costs more than all the pages, nothing is shared."""
        model = FREE._replace(segment=10_000, occupancy=CUT)
        table = [[1, 2, 3, 4, 10 + b] for b in range(3)]
        assert cascade.plan(table, [17] * 3, PAGE, model._replace(segment=10)).levels
        assert cascade.plan(table, [17] * 3, PAGE, model).levels == ()


class TestTogether:
    """A level concurrent with the own call: the model chooses it, kernels must support it."""

    def test_both_calls_end_at_the_same_time(self):
        """On an H200 (2026-11-16) 3 segments beside 80 programs took 55.5 us, 4 beside 64 49.9."""
        plan = prefixed(64, 8192)
        assert plan.together[:3] == (64, 64, 4) and plan.levels[0].segments == 4
        assert plan.levels[0].seqlens.tolist() == [128 * 16] * 4
        longer = prefixed(64, 32768)  # more to compute, as much to read
        assert longer.together[:3] == (32, 96, 6)
        alone = prefixed(64, 8192, own_tokens=2048)  # more to read, as much to compute
        assert alone.together.own_programs > 80

    def test_the_saving_is_the_predicted_time(self):
        for shape in ((64, 8192), (64, 32768), (48, 4096)):
            both, turns = prefixed(*shape), prefixed(*shape, own_queries=0)
            assert turns.together is None and both.saved > turns.saved
            model = TestModel.model()
            batch, shared = shape
            pages = batch * 16, shared // 16
            one = model.one_call(pages[0] + batch * pages[1], sum(pages))
            assert one - both.saved == pytest.approx(both.together.seconds)

    def test_no_cascade_in_turn_means_none_together(self):
        plan = prefixed(8, 2048, 64)
        assert plan.levels == () and plan.together is None and plan.saved == 0

    def test_calls_run_in_turn_where_they_cannot_overlap(self):
        """Several levels or groups, queries that must be copied, packed or too many queries."""
        model = TestModel.model()
        table = torch.arange(64 * 528, dtype=torch.int32).view(64, 528)
        table[:, :512] = table[0, :512]
        one = partial(cascade.plan, cache_seqlens=[8448] * 64, page_size=16, model=model)
        assert one(table).together is not None
        assert one(table, cu_seqlens_q=list(range(65))).together is None
        few = partial(cascade.plan, table[:16], [8448] * 16, 16, model)
        assert few(seqlen_q=4).together is not None
        assert few(seqlen_q=5).levels and few(seqlen_q=5).together is None  # 20 rows of a kv head
        two = table.clone()
        two[1::2, :512] = two[1, :512] + 100_000
        assert [len(level.groups) for level in one(two).levels] == [2]
        assert one(two).together is None
        apart = table.clone()
        apart[5] += 100_000
        assert not isinstance(one(apart).levels[0].rows, slice) and one(apart).together is None
        first = table.clone()
        first[0] += 100_000  # the other sequences are adjacent
        assert one(first).together is not None and one(first).levels[0].row_index is not None

    @pytest.mark.parametrize("can", [True, False, None])
    def test_calls_run_at_once_where_supported(self, can):
        tables = [[1, 2, 3, 4, 10 + b] for b in range(5)]
        pages, table, seqlens = cache(tables, [17] * 5)
        model = FREE._replace(level=200.0, call=100.0, first=1.0, products=1.0)
        cut = Occupancy(16, KV_HEADS, tile_queries=5, segment_pages=1, own_queries=1)
        plan = cascade.plan(table, seqlens, PAGE, model._replace(occupancy=cut))
        own, level, segments, _ = plan.together
        assert own + level <= 16 and level == segments * KV_HEADS
        attend, calls = count_calls(onchip.paged_attention)
        partitions = []

        def at_once(*calls):
            partitions.extend(call.options.pop("sm_partition") for call in calls)
            made = [onchip.paged_attention(*call.args, **call.options) for call in calls]
            return made if can else None

        q = torch.randn(5, 1, HEADS, DIM, dtype=torch.float64)
        tables, kernels = (table, seqlens), {} if can is None else {"at_once": at_once}
        got = cascade.run(plan, attend, q, pages, plan.own(*tables), **kernels)
        want = onchip.paged_attention(q, *pages, *tables, return_lse=True)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        both = [SMPartition(own, second=False), SMPartition(level, second=True)]
        assert partitions == ([] if can is None else both)
        assert len(calls) == (0 if can else 2)


class TestServing:
    """Dispatch decides at every call whether hopper serves both calls."""

    @staticmethod
    def calls(seqlen_q=1, dim_v=128, level_programs=48, **options):
        half = {"dtype": torch.bfloat16}
        options = {"softmax_scale": None, "softcap": 0.0, "kernel": None, **options}
        options |= {"out_dtype": torch.float32, "return_lse": True, "k_scales": None}
        pages = torch.zeros(4, 16, 8, 128, **half), torch.zeros(4, 16, 8, dim_v, **half)
        q = torch.zeros(64, seqlen_q, 32, 128, **half)
        tables = lambda n, width: (torch.zeros(n, width).int(), torch.zeros(n).int())
        own = cascade.AttendCall((q, *pages, *tables(64, 20)), {**options, "causal": True})
        rows = q.flatten(0, 1).expand(3, -1, -1, -1)
        level = cascade.AttendCall((rows, *pages, *tables(3, 171)), {**options, "causal": False})
        return own.on_partition(80, second=False), level.on_partition(level_programs, second=True)

    @staticmethod
    def serves(*calls):
        """Whether both would be served, without computing anything."""
        return functional._can_run_at_once(
            *[functional._prepare_pages(*call.args, **call.options) for call in calls]
        )

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch):
        pytest.importorskip("triton")
        monkeypatch.setattr(functional, "device_info", lambda _: DeviceInfo("cuda", "H200", (9, 0)))

    def test_both_calls_are_served(self):
        assert self.serves(*self.calls()) and self.serves(*self.calls(softcap=20.0))
        assert self.serves(*self.calls(kernel="hopper"))
        own, level = self.calls()
        sinks = {"sinks": torch.zeros(32)}
        assert self.serves(cascade.AttendCall(own.args, {**own.options, **sinks}), level)

    @pytest.mark.parametrize(
        "changed",
        [
            {"kernel": "triton"},
            {"seqlen_q": 5},  # too many for the one kernel
            {"dim_v": 64},
            {"level_programs": 47},  # a tile would have to wait for a program
        ],
        ids=str,
    )
    def test_one_call_is_not_served(self, changed):
        assert not self.serves(*self.calls(**changed))

    @pytest.mark.parametrize("heads", [(32, 8), (16, 16), (64, 8), (24, 6), (32, 2)])
    @pytest.mark.parametrize("dim, page_size", [(64, 16), (128, 64), (256, 32)])
    def test_a_planned_level_is_served(self, heads, dim, page_size):
        """The model counts the level's tiles as the kernel does: one program for each."""
        num_heads, num_kv_heads = heads
        width, run, served = 9000 // page_size, 8192 // page_size, []
        for batch in (5, 17, 40, 64, 97, 128):
            q = torch.empty(batch, 1, num_heads, dim, dtype=torch.bfloat16, device="meta")
            pages = q.new_empty(2, 1, page_size, num_kv_heads, dim)
            table = torch.arange(batch * width, dtype=torch.int32).view(batch, width)
            table[:, :run] = table[0, :run]
            plan = cascade.plan(table, [8900] * batch, page_size, costs(q, *pages)).to("meta")
            if plan.together is None:
                continue
            options, own = {"kernel": None}, plan.own(table.to("meta"), table[:, 0].to("meta"))
            calls = [cascade._own_call(plan, q, pages, own, options)]
            calls += [cascade._level_call(plan.levels[0], q[:, 0], pages, options)]
            cascade._run_both(plan, calls, lambda *both: served.append(self.serves(*both)))
        assert served and all(served)

    def test_deterministic_calls_are_not_served_at_once(self):
        torch.use_deterministic_algorithms(True)
        try:
            assert not self.serves(*self.calls())
        finally:
            torch.use_deterministic_algorithms(False)

    def test_other_devices_do_not_serve_both(self, monkeypatch):
        monkeypatch.setattr(functional, "device_info", lambda _: DeviceInfo("cuda", "A100", (8, 0)))
        assert not self.serves(*self.calls())

    def test_compiled_and_packed_calls_are_not_served_at_once(self, monkeypatch):
        own, level = self.calls()
        packed = cascade.AttendCall(
            own.args, {**own.options, "cu_seqlens_q": torch.arange(65).int()}
        )
        assert functional._attend_at_once(packed, level) is None
        monkeypatch.setattr(functional, "is_eager", lambda _: False)
        assert functional._attend_at_once(own, level) is None

    def test_both_calls_are_made_in_order(self, monkeypatch):
        made = []
        answer = lambda question, x, kernel: (
            made.append((question.problem, kernel)) or (x.q, x.q, None)
        )
        monkeypatch.setattr(functional.torch_op, "attend", answer)
        own, level = self.calls()
        assert functional._attend_at_once(own, level) == [(own.args[0],) * 2, (level.args[0],) * 2]
        assert [problem.sm_partition for problem, _ in made] == [
            SMPartition(80, False),
            SMPartition(48, True),
        ]
        assert functional._attend_at_once(*self.calls(kernel="triton")) is None and len(made) == 2

    def test_swapped_calls_are_refused(self):
        own, level = self.calls()
        assert not self.serves(level, own)


CUT = Occupancy(num_programs=12, num_kv_heads=KV_HEADS, tile_queries=1, segment_pages=1)
MANY = FREE._replace(occupancy=CUT._replace(num_programs=64))  # every page is a segment


class TestSegments:
    """Cutting a run changes the programs that compute, never the result."""

    @settings(max_examples=100)
    @given(tries(), st.integers(1, 60), st.integers(0, 4), st.integers(0, 2**20))
    def test_equals_the_plain_call_for_any_trie(self, trie, programs, seqlen_q, seed):
        """seqlen_q 0: packed queries of unequal number."""
        torch.manual_seed(seed)
        tables, lengths = trie
        pages, table, seqlens = cache(tables, [max(n, seqlen_q) for n in lengths])
        lengths_q = torch.minimum(torch.randint(1, 4, (len(tables),)), seqlens)
        if seqlen_q:
            lengths_q = torch.full_like(seqlens, seqlen_q)
        cu = torch.cat([torch.zeros(1), lengths_q.cumsum(0)]).int()
        packing = {"cu_seqlens_q": cu, "max_seqlen_q": int(lengths_q.max())}
        q = torch.randn(int(cu[-1]), HEADS, DIM, dtype=torch.float64)
        model = FREE._replace(occupancy=CUT._replace(num_programs=programs))
        plan = cascade.plan(table, seqlens, PAGE, model, cu_seqlens_q=cu)
        options = {"sinks": torch.randn(HEADS, dtype=torch.float64), "softcap": 3.0}
        got = cascaded(q, pages, table, seqlens, plan, **options)
        args = (q, *pages, table, seqlens)
        want = onchip.paged_attention(*args, return_lse=True, **packing, **options)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

    def test_runs_of_different_lengths_are_cut_alike(self):
        """Pairs that share 5, 1 and 3 pages, one level: each has as many segments as the longest,
        of equal numbers of pages as far as possible, and the last segments are empty.
        """
        runs = [[100, 101, 102, 103, 104], [110], [120, 121, 122]]
        tables = [runs[b // 2] + [b] for b in range(6)]
        lengths = [len(t) * PAGE for t in tables]
        pages, table, seqlens = cache(tables, lengths)
        plan = cascade.plan(table, seqlens, PAGE, MANY)
        (level,) = plan.levels
        assert (level.segments, len(level.groups)) == (5, 3)
        assert level.seqlens.view(5, 3).T.tolist() == [
            [PAGE] * 5,
            [PAGE, 0, 0, 0, 0],
            [PAGE, PAGE, PAGE, 0, 0],
        ]
        assert level.page_table.view(5, 3)[:, 0].tolist() == table[0, :5].tolist()
        assert level.cu_seqlens_q.tolist() == [*range(0, 31, 2)]
        q = torch.randn(6, 1, HEADS, DIM, dtype=torch.float64)
        got = cascaded(q, pages, table, seqlens, plan)
        want = onchip.paged_attention(q, *pages, table, seqlens, return_lse=True)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

    def test_each_level_is_cut_separately(self):
        tables = three_levels()
        pages, table, seqlens = cache(tables, [len(t) * PAGE - 1 for t in tables])
        plan = cascade.plan(table, seqlens, PAGE, FREE._replace(occupancy=CUT))
        assert [level.segments for level in plan.levels] == [1, 2, 1]
        attend, calls = count_calls(onchip.paged_attention)
        q = torch.randn(6, 1, HEADS, DIM, dtype=torch.float64)
        got = cascade.run(plan, attend, q, pages, plan.own(table, seqlens))
        want = onchip.paged_attention(q, *pages, table, seqlens, return_lse=True)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        assert [tuple(x.shape[:2]) for x in calls] == [(6, 1), (1, 6), (2, 3), (1, 2)]

    def test_a_plan_stays_valid_while_sequences_grow(self):
        tables = three_levels()
        pages, table, seqlens = cache(tables, [len(t) * PAGE - 6 for t in tables])
        pages = tuple(torch.randn_like(p) for p in pages)
        plan = cascade.plan(table, seqlens, PAGE, FREE._replace(occupancy=CUT))
        assert max(level.segments for level in plan.levels) > 1
        q = torch.randn(6, 1, HEADS, DIM, dtype=torch.float64)
        for grown in range(6):
            got = cascaded(q, pages, table, seqlens + grown, plan)
            want = onchip.paged_attention(q, *pages, table, seqlens + grown, return_lse=True)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

    def test_a_nan_query_does_not_spread(self):
        """It is the first row of a level; sequences outside of that level must not read it."""
        tables = three_levels()
        pages, table, seqlens = cache(tables, [len(t) * PAGE - 1 for t in tables])
        plan = cascade.plan(table, seqlens, PAGE, FREE._replace(occupancy=CUT))
        q = torch.randn(6, 1, HEADS, DIM, dtype=torch.float64)
        q[0] = torch.nan
        out, lse = cascaded(q, pages, table, seqlens, plan)
        assert out[0].isnan().all() and not out[1:].isnan().any() and not lse[1:].isnan().any()


class TestRun:
    def setup_method(self):
        torch.manual_seed(0)
        self.tables = three_levels()
        lengths = [len(t) * PAGE - 6 for t in self.tables]
        self.pages, self.table, self.seqlens = cache(self.tables, lengths)
        self.q = torch.randn(6, 1, HEADS, DIM, dtype=torch.float64)
        self.plan = cascade.plan(self.table, self.seqlens, PAGE, FREE)

    def test_a_plan_stays_valid_while_sequences_grow(self):
        pages = tuple(torch.randn_like(p) for p in self.pages)
        for grown in range(6):
            seqlens = self.seqlens + torch.tensor([1, 0, 1, 1, 0, 1]).int() * grown
            got = cascaded(self.q, pages, self.table, seqlens, self.plan)
            want = onchip.paged_attention(self.q, *pages, self.table, seqlens, return_lse=True)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

    def test_queries_in_order_are_not_copied(self):
        attend, calls = count_calls(onchip.paged_attention)
        own = self.plan.own(self.table, self.seqlens)
        cascade.run(self.plan, attend, self.q, self.pages, own)
        addresses = [q.data_ptr() == self.q.data_ptr() for q in calls]
        assert addresses == [True, True, False, False]  # own, all six, evens, twins

    def test_a_common_prefix_leaves_a_view_of_the_table(self):
        table = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]], dtype=torch.int32)
        plan = cascade.plan(table, [13, 15], PAGE, FREE)
        own, seqlens = plan.own(table, torch.tensor([13, 15], dtype=torch.int32))
        assert own.tolist() == [[3, 4], [5, 6]] and seqlens.tolist() == [5, 7]
        assert own.data_ptr() == table[:, 2:].data_ptr()

    def test_a_merge_function_of_the_caller_is_used(self):
        used = []

        def merge(own, parts, out_dtype):
            used.append([tuple(out.shape) for out, *_ in (own, *parts)] + [out_dtype])
            return cascade.merge_levels(own, parts, out_dtype)

        got = cascaded(self.q, self.pages, self.table, self.seqlens, self.plan, merge=merge)
        want = cascaded(self.q, self.pages, self.table, self.seqlens, self.plan)
        torch.testing.assert_close(got, want)
        rows = [(1, n, HEADS, DIM) for n in (6, 3, 2)]
        assert used == [[(6, HEADS, DIM), *rows, torch.float64]]

    @pytest.mark.parametrize("segments", [1, 7])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_accuracy_contract(self, dtype, segments):
        """64 rows of one chunk over a shared prefix, against fp64: partials are not rounded."""
        k, v = torch.randn(2, 1, 512, KV_HEADS, 64).to(dtype)
        q = torch.randn(1, 64, HEADS, 64).to(dtype)
        pages = tuple(x[0].unflatten(0, (-1, 16)) for x in (k, v))
        table = torch.arange(32, dtype=torch.int32)[None].repeat(2, 1)
        seqlens = torch.tensor([512, 512], dtype=torch.int32)
        cut = Occupancy(segments, tile_queries=128)
        model = FREE._replace(query=0, occupancy=cut)
        plan = cascade.plan(table, seqlens, 16, model, seqlen_q=64)
        assert plan.shared == (28, 28) and plan.levels[0].segments == segments

        def attention(q, k, v, **options):
            del k, v, options
            out, lse = cascaded(q.repeat(2, 1, 1, 1), pages, table, seqlens, plan)
            assert out[0].equal(out[1])
            return out[:1], lse[:1]

        assert_accurate(attention, q, k, v, causal=True, grad=False)

    def test_without_levels_it_is_the_plain_call(self):
        plan = cascade.plan(self.table, self.seqlens, PAGE, FREE, max_levels=0)
        attend, calls = count_calls(onchip.paged_attention)
        own = plan.own(self.table, self.seqlens)
        got = cascade.run(plan, attend, self.q, self.pages, own, causal=True)
        args = (*self.pages, self.table, self.seqlens)
        want = onchip.paged_attention(self.q, *args, return_lse=True)
        assert len(calls) == 1 and all(a.equal(b) for a, b in zip(got, want, strict=True))

    @pytest.mark.parametrize("option", ["window_size", "alibi_slopes", "return_stats", "scale"])
    def test_refuses_what_depends_on_the_distance_to_the_prefix(self, option):
        with pytest.raises(onchip.UnsupportedError, match=f"does not take {option}: "):
            cascaded(self.q, self.pages, self.table, self.seqlens, self.plan, **{option: None})

    def test_a_plan_for_other_tables_is_refused(self):
        moved = self.table.clone()
        moved[2, 1] = 5
        short = self.seqlens.clone()
        short[4] = 6 * PAGE
        for tables in ((moved, self.seqlens), (self.table, short)):
            with pytest.raises(ValueError, match="plan again when the batch changes"):
                self.plan.own(*tables)
        self.table[0, 0] += 1  # the tensor itself that was planned
        with pytest.raises(ValueError, match="sequence 0 must begin with the 6 pages"):
            self.plan.own(self.table, self.seqlens)
        with pytest.raises(ValueError, match="plan is on cpu, page_table on meta: plan.to"):
            self.plan.own(self.table.to("meta"), self.seqlens.to("meta"))
        with pytest.raises(ValueError, match="plan is for page_table"):
            self.plan.own(self.table[:4], self.seqlens[:4])

    def test_other_queries_are_refused(self):
        own = self.plan.own(self.table, self.seqlens)
        run = partial(cascade.run, self.plan, onchip.paged_attention)
        with pytest.raises(ValueError, match="must hold the 6 queries of the plan"):
            run(self.q[:5], self.pages, own)
        with pytest.raises(ValueError, match="page_size=4 slots a page"):
            run(self.q, tuple(p[:, :2] for p in self.pages), own)

    @pytest.mark.parametrize("place, name", [(0, "q"), (1, "k_pages"), (2, "v_pages")])
    @pytest.mark.parametrize("planned", [True, False])
    def test_an_argument_that_is_not_a_tensor_is_named(self, place, name, planned):
        args = [self.q, *self.pages]
        args[place] = None
        plan = self.plan if planned else None
        sentence = (
            "v_pages is None" if place == 2 else f"{name} must be a torch.Tensor, got NoneType"
        )
        with pytest.raises(ValueError, match=sentence):
            onchip.cascade_attention(*args, self.table, self.seqlens, plan=plan)


@pytest.mark.parametrize(
    "match, args",
    [
        ("rank 2", ([1, 2], [4])),
        ("2 sequences, cache_seqlens 1", ([[1], [2]], [4])),
        (r"cache_seqlens\[1\]=9 .* fit into 2 pages of 4", ([[1, 2], [1, 3]], [8, 9])),
        (r"cache_seqlens\[0\]=0 must hold the 1 queries", ([[1, 2], [1, 3]], [0, 8])),
        ("negative page id", ([[1, -1, 2], [1, 3, 4]], [12, 9])),
        ("page_table is on meta", (torch.empty(2, 3, device="meta"), [4, 4])),
    ],
)
def test_bad_tables_are_refused(match, args):
    with pytest.raises(ValueError, match=match):
        cascade.plan(*args, PAGE, FREE)


@pytest.mark.gpu
class TestOnTheGpu:
    """The same calls on a device: the host never waits, and a graph follows growing sequences."""

    def setup_method(self):
        torch.manual_seed(0)
        self.tables = three_levels()
        self.lengths = [len(t) * PAGE - 6 for t in self.tables]
        pages, table, seqlens = cache(self.tables, self.lengths, torch.float16)
        self.pages = tuple(torch.randn_like(p).cuda() for p in pages)
        self.table, self.seqlens = table.cuda(), seqlens.cuda()
        self.q = torch.randn(6, 1, HEADS, DIM, dtype=torch.float16, device="cuda")
        self.plan = cascade.plan(table, seqlens, PAGE, FREE).to("cuda")

    def both(self):
        args = self.q, self.pages, self.table, self.seqlens, self.plan
        got = cascaded(*args)
        want = onchip.paged_attention(
            self.q, *self.pages, self.table, self.seqlens, return_lse=True
        )
        return got, want

    def test_equals_the_plain_call_without_waiting(self):
        self.both()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            got, want = self.both()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)

    def test_a_graph_follows_the_lengths(self):
        self.both()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got, want = self.both()
        for _ in range(5):
            graph.replay()
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
            self.seqlens += 1


@pytest.mark.hopper
class TestSegmentsOnTheGpu:
    """Prefixes long enough that segments of them fill the processors."""

    @pytest.mark.parametrize("runs", [(4096,), (4096, 1504)])
    @pytest.mark.parametrize("seqlen_q", [1, 3])
    def test_equals_the_plain_call_in_a_graph_too(self, runs, seqlen_q):
        batch, own = 48, 5
        width = max(runs) // 16 + own
        table = torch.arange(batch * width, dtype=torch.int32).view(batch, width)
        for b in range(batch):
            shared = runs[b % len(runs)] // 16
            table[b, :shared] = table[b % len(runs), :shared]
        seqlens = torch.tensor([runs[b % len(runs)] + 7 + b % 60 for b in range(batch)]).int()
        q = torch.randn(batch, seqlen_q, 32, 128, dtype=torch.bfloat16, device="cuda")
        pages = torch.randn(2, batch * width, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
        model = costs(q, *pages)._replace(level=0)
        model = model._replace(occupancy=model.occupancy._replace(own_queries=0))  # in turn
        plan = cascade.plan(table, seqlens, 16, model, seqlen_q=seqlen_q)
        assert len(plan.levels) == 1 and plan.levels[0].segments > 1
        plan, tables = plan.to("cuda"), (table.cuda(), seqlens.cuda())
        options = {"sinks": torch.randn(32, device="cuda"), "softcap": 20.0, "return_lse": True}
        call = lambda: onchip.cascade_attention(q, *pages, *tables, plan=plan, **options)
        want = onchip.paged_attention(q, *pages, *tables, out_dtype=torch.float32, **options)
        call(), call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        graph.replay()
        for out, lse in (call(), captured):
            torch.testing.assert_close(out.float(), want[0], rtol=1e-2, atol=2e-3)
            torch.testing.assert_close(lse, want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.hopper
class TestTogetherOnTheGpu:
    """A level concurrent with the own call gives the result of one call, every time."""

    @staticmethod
    def case(own, shared=8192, seqlen_q=1, head_dim=128, first=0):
        """(q, pages, tables, plan) of sequences with so many own tokens, with space to grow;
        sequences before `first` share nothing.
        """
        batch, run = len(own), shared // 16
        width = run + -(-max(own) // 16) + 4
        table = torch.randperm(batch * width, dtype=torch.int32).view(batch, width)
        table[first:, :run] = table[first, :run]
        seqlens = torch.tensor([shared + n for n in own], dtype=torch.int32)
        half = {"dtype": torch.bfloat16, "device": "cuda"}
        q = torch.randn(batch, seqlen_q, 32, head_dim, **half)
        pages = torch.randn(2, batch * width, 16, 8, head_dim, **half)
        plan = cascade.plan(table, seqlens, 16, costs(q, *pages), seqlen_q=seqlen_q)
        assert plan.together is not None
        return q, pages, (table.cuda(), seqlens.cuda()), plan.to("cuda")

    @staticmethod
    def calls(case, **options):
        q, pages, tables, plan = case
        options = {"out_dtype": torch.float32, "return_lse": True, **options}
        together = lambda: onchip.cascade_attention(q, *pages, *tables, plan=plan, **options)
        one = lambda: onchip.paged_attention(q, *pages, *tables, **options)
        return together, one

    @staticmethod
    def assert_close(got, want):
        torch.testing.assert_close(got[0], want[0], rtol=0, atol=2e-3)
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-4)

    ODD = [1 + (37 * b) % 300 for b in range(64)]
    CASES = {
        "even": {"own": [256] * 64},
        "odd": {"own": ODD},
        "three queries": {"own": [n + 3 for n in ODD[:20]], "seqlen_q": 3},
        "head_dim 64": {"own": ODD, "head_dim": 64},
        "head_dim 256": {"own": ODD, "head_dim": 256},
        "an unrelated sequence first": {"own": ODD, "first": 1},
        "one tile": {"own": ODD[:27], "shared": 16384},
        "long": {"own": ODD, "shared": 32768},
    }

    @pytest.fixture
    def launched(self, monkeypatch):
        """Whether each launch of the forward was a second one."""
        launches, launch = [], hopper_launch().is_second
        note = lambda problem: launches.append(launch(problem)) or launches[-1]
        monkeypatch.setattr(hopper_launch(), "is_second", note)
        return launches

    @pytest.mark.parametrize("name", CASES)
    def test_equals_one_call(self, name, launched):
        torch.manual_seed(1)
        sinks = torch.randn(32, device="cuda")
        together, one = self.calls(self.case(**self.CASES[name]), sinks=sinks, softcap=20.0)
        want = one()
        for _ in range(3):  # compiled, recorded, replayed
            self.assert_close(together(), want)
        assert launched and all(launched)

    @pytest.mark.parametrize("own", [[256] * 64, ODD], ids=["even", "odd"])
    def test_the_same_bits_every_time(self, own):
        torch.manual_seed(2)
        together, one = self.calls(self.case(own))
        first = [t.clone() for t in together()]
        self.assert_close(first, one())
        changed = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(200):
            for a, b in zip(together(), first, strict=True):
                changed += (a != b).any()
        assert int(changed) == 0

    def test_back_to_back_in_a_graph_with_queries_and_keys_made_just_before(self):
        """20 calls without a gap, each over queries and a shared page that the preceding launch has
        written.
        """
        torch.manual_seed(3)
        q, pages, tables, plan = self.case(self.ODD)
        queries = torch.randn(20, *q.shape, dtype=q.dtype, device="cuda")
        keys = torch.randn(20, *pages[:, 0].shape, dtype=q.dtype, device="cuda")
        shared = int(tables[0][0, 100])
        together, one = self.calls((q, pages, tables, plan))

        def all_of(call):
            results = []
            for i in range(20):
                pages[:, shared].copy_(keys[i])
                q.copy_(queries[i])
                results.append(call())
            return results

        wants = all_of(one)
        all_of(together), all_of(together)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = all_of(together)
        for _ in range(5):
            graph.replay()
            for got, want in zip(results, wants, strict=True):
                self.assert_close(got, want)

    def test_a_graph_follows_growing_sequences(self):
        torch.manual_seed(4)
        case = self.case(self.ODD)
        together, one = self.calls(case)
        together(), together()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = together()
        for grown in (1, 15, 40):
            case[2][1].add_(grown)
            graph.replay()
            self.assert_close(got, one())

    def test_memory_in_use_by_the_own_call_is_not_written(self):
        """The allocator may reuse the own call's scratch memory once it is launched: for the
        level's results, for example.
        """
        torch.manual_seed(5)
        case = self.case([2000] * 64)
        assert case[3].together.segments == 1  # so much to read that the level ends first
        together, one = self.calls(case)
        want = one()
        together(), together()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for _ in range(20):
            self.assert_close(together(), want)


def hopper_launch():
    from onchip.kernels.hopper import launch

    return launch
