"""Explanations of calls: the blocks of masks; the pages that paged calls read, their splits, and
the time that sharing saves.
"""

from importlib.util import find_spec

import pytest
import torch

import onchip
from onchip import explain, masks
from onchip.core.dispatch import get_backend
from onchip.core.explain import Explanation, ServedPart
from onchip.cost import make_problem, roofline
from onchip.cost.hardware import H200, HOST
from onchip.cost.prefixes import Occupancy, costs, moved
from onchip.cost.roofline import human_time
from onchip.fold import cascade
from onchip.kernels.hopper.key_splits import plan_ranges
from onchip.kernels.triton.key_splits import count_splits
from tests.interpreted import interpreted

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 32, 16
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2  # keys and values of one token, bf16


def call(lengths, shared=0, seqlen_q=1, extra=2):
    """Tensors of a paged call. All sequences begin with the same `shared` pages. The keys are one
    row, expanded with strides of zero.
    """
    width = -(-max(lengths) // PAGE) + extra
    table = torch.arange(len(lengths) * width, dtype=torch.int32).view(-1, width)
    table[:, :shared] = table[0, :shared]
    row = torch.empty(DIM, dtype=torch.bfloat16)
    pages = row.expand(table.numel(), PAGE, KV_HEADS, DIM)
    q = row.expand(len(lengths), seqlen_q, HEADS, DIM)
    return q, pages, pages, table, torch.tensor(lengths, dtype=torch.int32)


def test_pages_bytes_and_flops_follow_the_lengths():
    x = onchip.explain(*call([100, 1, 33]), kernel="aten_cpu")
    assert x.pages[:4] == (PAGE, 7 + 1 + 3, 11, 0)
    assert x.pages.gathered_bytes == 134 * TOKEN_BYTES
    assert x.min_bytes == 134 * TOKEN_BYTES + 3 * HEADS * (2 * DIM * 2 + 4)
    assert x.flops == 4 * HEADS * DIM * 134 and x.splits is x.sharing is x.roofline is None
    assert "first: aten_cpu does not read pages" in str(x) and "backward" not in str(x)


def test_latent_pages_are_read_once():
    q, k, _, *tables = call([100, 1, 33])
    x = onchip.explain(q, k, None, *tables, latent=DIM // 2, kernel="aten_cpu")
    keys = 134 * TOKEN_BYTES // 2
    assert x.problem.head_dim_v == DIM // 2 and x.pages.gathered_bytes == keys
    assert x.min_bytes == keys + 3 * HEADS * (DIM * 2 + DIM + 4)
    with pytest.raises(ValueError, match="v_pages is None"):
        onchip.explain(q, k, None, *tables)


def test_the_residual_of_precise_delta():
    q = torch.zeros(2, 50, HEADS, DIM, dtype=torch.bfloat16)
    plain, precise = (onchip.explain(q, q, q, precise_delta=p) for p in (False, True))
    assert precise.residual_bytes == q.numel() * 2 and not plain.residual_bytes
    assert precise.min_bytes == plain.min_bytes + precise.residual_bytes
    assert "residual    51.2 kB of out" in str(precise) and "residual" not in str(plain)
    cu = torch.tensor([0, 1, 50], dtype=torch.int32)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 49, "max_seqlen_k": 49}
    explanation = onchip.explain(q[0], q[0], q[0], precise_delta=True, **packed)
    assert explanation.residual_bytes == q[0].numel() * 2
    with pytest.raises(TypeError, match="paged_attention.. has no option 'precise_delta'"):
        onchip.explain(*call([100]), precise_delta=True)


def test_a_mask_has_its_expression_and_its_blocks():
    x = torch.zeros(1, 2048, 2, 64)
    mask = masks.dilated(2, 300) | masks.causal()
    built = mask.build(1, 1, 2048, 2048)
    given = {"(dilated(2, 300) | causal())": mask, "BlockMask": built, "dense": built.to_dense()}
    blocks = f"{built.num_full} FULL and {built.num_partial} PARTIAL of 256 blocks"
    for text, value in given.items():
        line = next(x for x in str(explain(x, x, x, mask=value)).splitlines() if "  mask " in x)
        assert line.startswith(f"  mask        {text}") and f": {blocks} (" in line


def test_flops_are_counted_in_cells_or_in_blocks_of_a_mask():
    x = torch.zeros(1, 2048, 2, 64)
    cells, blocks = explain(x, x, x, causal=True), explain(x, x, x, mask=masks.causal())
    both = explain(x, x, x, mask=masks.causal(), causal=True)
    assert both.flops == cells.flops < blocks.flops
    assert [e._counted for e in (cells, both)] == ["visible cells"] * 2
    assert "over whole blocks of the mask" in str(blocks)
    assert "mask" not in str(cells) and "over visible cells" in str(cells)


def test_packed_queries_follow_cu_seqlens():
    q, *rest = call([100, 20], seqlen_q=10)
    cu = torch.tensor([0, 1, 20], dtype=torch.int32)
    x = onchip.explain(q.flatten(0, 1), *rest, cu_seqlens_q=cu, max_seqlen_q=19)
    assert x.flops == 4 * HEADS * DIM * (100 + 19 * 20 - 19 * 18 // 2)


def mixed(lengths, counts):
    """A packed call with seqlens_q[b] queries of sequence b."""
    _, *rest = call(lengths)
    q = torch.zeros(sum(counts), HEADS, DIM, dtype=torch.bfloat16)
    cu = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return [q, *rest], {"cu_seqlens_q": cu, "max_seqlen_q": max(counts)}


def test_a_mixed_batch_on_the_cpu_is_explained_as_two_parts(monkeypatch):
    """The kernels that run, and their sequences, are as explained. Only the second part gathers."""
    lengths, counts = [100, 7, 33, 250, 64, 111], [1, 7, 1, 1, 31, 1]
    tensors, packing = mixed(lengths, counts)
    x = onchip.explain(*tensors, **packing)
    assert x.parts == (ServedPart("pages_cpu", 4, 4, 494), ServedPart("aten_cpu", 2, 38, 71))
    assert x.pages.gathered_bytes == (7 + 64) * TOKEN_BYTES
    text = str(x)
    assert "served by   pages_cpu: 4 sequences, 4 queries, 494 keys" in text
    assert "served by   aten_cpu: 2 sequences, 38 queries, 71 keys" in text
    assert "not by      pages_cpu" not in text and "not by      tiled" in text
    called = []
    for name in ("pages_cpu", "aten_cpu"):
        backend = get_backend(name)
        hear = lambda p, y, name=name, f=backend.forward: called.append((name, p.batch)) or f(p, y)
        monkeypatch.setattr(backend, "forward", hear)
    onchip.paged_attention(*tensors, **packing)
    assert called == [(part.kernel, part.sequences) for part in x.parts]


def test_a_batch_that_is_not_split_is_explained_as_one():
    lengths = [100, 7, 33, 250, 64]
    for counts, options in (
        ([1, 1, 1, 9, 9], {}),  # too few with one query
        ([1, 1, 1, 1, 9], {"deterministic": True}),
        ([1, 1, 1, 1, 9], {"kernel": "tiled"}),
    ):
        tensors, packing = mixed(lengths, counts)
        x = onchip.explain(*tensors, **packing, **options)
        assert x.parts == () and f"served by   {x.plan.kernel}\n" in str(x)


def test_pages_before_the_window():
    x = onchip.explain(*call([200, 40]), window_size=(50, None))
    assert x.pages.read == (13 - 9) + 3 and x.pages.left_behind == 9
    assert x.min_bytes == (51 + 40) * TOKEN_BYTES + 2 * HEADS * (2 * DIM * 2 + 4)
    assert "9 before the window" in str(x)


def test_sharing_is_planned_where_pages_repeat():
    arguments = call([6000] * 20, shared=350)
    x = onchip.explain(*arguments)
    page_bytes, own = PAGE * TOKEN_BYTES, 375 - 350
    assert (x.pages.read, x.pages.distinct) == (20 * 375, 350 + 20 * own)
    assert x.sharing.plain_bytes == 20 * 375 * page_bytes
    n, model = moved(*arguments[:3]), costs(*arguments[:3])
    partials = 20 * (n.query + n.partial)
    assert x.sharing.cascade_bytes == (350 + 20 * own) * page_bytes + partials
    seconds = (x.sharing.plain_bytes - x.sharing.cascade_bytes) / HOST.memory_bytes_s  # no L2
    assert x.sharing.plan.saved == pytest.approx(seconds - model.level)
    assert x.sharing.plain_s == pytest.approx(model.call + 20 * 375 * model.page)
    assert x.sharing.cascade_s == pytest.approx(x.sharing.plain_s - x.sharing.plan.saved)
    assert "20 sequences in 1 group read 350 pages, saves" in str(x)
    assert f"{human_time(x.sharing.cascade_s)} with a level" in str(x)


def test_a_plan_of_the_caller_is_explained():
    arguments = call([100] * 3, shared=4)
    free = costs(*arguments[:3])._replace(level=0, query=0, partial=0)
    plan = cascade.plan(*arguments[3:], PAGE, free)
    assert onchip.explain(*arguments, plan=plan).sharing.plan is plan
    refused = onchip.explain(*arguments)
    assert "no level of shared pages saves" in str(refused) and "with the best level" in str(
        refused
    )
    level = HOST.call_s - 2 * 4 * PAGE * TOKEN_BYTES / HOST.memory_bytes_s
    assert refused.sharing.cascade_s - refused.sharing.plain_s == pytest.approx(level, rel=0.1)
    assert onchip.explain(*arguments, window_size=(20, None)).sharing is None


def test_segments_of_a_level():
    arguments = call([600] * 4, shared=32)
    model = costs(*arguments[:3])
    cut = Occupancy(num_programs=8, num_kv_heads=KV_HEADS, tile_queries=4)
    plan = cascade.plan(*arguments[3:], PAGE, model._replace(level=0, occupancy=cut))
    x = onchip.explain(*arguments, plan=plan)
    segments = 8 // KV_HEADS
    assert f"4 sequences in 1 group read 32 pages in {segments} segments" in str(x)
    pages = 32 + 4 * (38 - 32)
    n = moved(*arguments[:3])
    queries = 4 * (n.query + (segments - 1) * n.segment + n.partial)
    assert x.sharing.cascade_bytes == pages * PAGE * TOKEN_BYTES + queries


def test_a_level_that_runs_at_once_with_the_rest():
    """A plan by the costs of an H200."""
    empty = {"dtype": torch.bfloat16, "device": "meta"}
    model = costs(torch.empty(64, 1, 32, 128, **empty), *torch.empty(2, 1, 16, 8, 128, **empty))
    arguments = call([8448] * 64, shared=512)
    plan = lambda **options: cascade.plan(*arguments[3:], PAGE, model, **options)
    ask = lambda **options: str(onchip.explain(*arguments, plan=plan(**options)))
    line = "at once     64 programs read the pages that are not shared, 64 the level"
    assert line in ask() and "at once" not in ask(cu_seqlens_q=list(range(65)))


def test_time_names_the_bottleneck():
    x: Explanation = onchip.explain(*call([4096] * 99))
    on_gpu = x._replace(hardware=H200)
    bytes_s = H200.memory_bytes_s
    assert x.roofline is None and "time" not in str(x)
    assert on_gpu.roofline.binds == "HBM" and on_gpu.backward_roofline is None
    assert on_gpu.roofline.seconds == pytest.approx(x.min_bytes / bytes_s)
    assert f"time        at least {on_gpu.roofline.seconds * 1e6:.3g} us: HBM needs" in str(on_gpu)
    busy = on_gpu._replace(flops=2000 * x.min_bytes)
    assert busy.roofline.binds == "exp unit"  # head_dim 32


def test_time_of_a_modelled_kernel():
    q = torch.empty(1, 4096, 16, 128, dtype=torch.bfloat16)
    x = onchip.explain(q, q, q, causal=True)
    x = x._replace(hardware=H200, plan=x.plan._replace(kernel="hopper"))
    predicted = roofline.predict(x.problem, H200, "hopper")
    assert x.roofline.modelled and x.roofline.seconds == pytest.approx(predicted.seconds)
    assert x.backward_roofline.seconds > 2 * x.roofline.seconds
    assert "time        135 us: tensor cores need" in str(x) and "  backward " in str(x)


def test_another_device():
    q = torch.empty(1, 4096, 16, 128, dtype=torch.bfloat16)
    v = torch.empty(1, 4096, 16, 64, dtype=torch.bfloat16)
    x = onchip.explain(q, q, q, causal=True, on="H200")
    assert (x.plan.kernel, x.device.name) == ("hopper", "NVIDIA H200")
    assert "time        135 us: tensor cores need" in str(x)
    older = onchip.explain(q, q, v, on="A100")
    assert older.plan.kernel == "triton" and not older.roofline.modelled
    assert f"{older.flops * 512 / 192:.3e} backward" in str(older)  # 6 d + 4 dv over 2 d + 2 dv
    with pytest.raises(ValueError, match="on='H20' is unknown; known are NVIDIA A100, "):
        onchip.explain(q, q, q, on="H20")


def test_wide_heads():
    q, k = (torch.empty(1, 4096, heads, 512, dtype=torch.bfloat16) for heads in (8, 1))
    x = onchip.explain(q, k, k, causal=True, on="A100")
    assert x.plan.kernel == "triton" and "TRITON_WIDE['forward', 512]" in str(x)
    x = onchip.explain(q[:, :1], k, k, causal=True, on="H200")
    assert x.plan.kernel == "triton" and "has tiles of up to 256 columns" in str(x)
    latent = torch.empty(1, 4096, 8, 576, dtype=torch.bfloat16)
    x = onchip.explain(latent, latent[:, :, :1], k, causal=True, on="H200")
    assert x.plan.kernel == "tiled" and "has tiles of up to 512 columns of bfloat16" in str(x)


def test_options_and_launch_are_printed():
    q = torch.empty(2, 4096, 16, 128, dtype=torch.bfloat16)
    x = onchip.explain(q, q, q, causal=True, on="H200")
    assert "options     causal\n" in str(x)
    assert "launch      132 programs for 1024 tiles: 2 x 64 queries, 128 keys at a time" in str(x)
    slopes = torch.ones(16)
    x = onchip.explain(q, q, q, softcap=30.0, alibi_slopes=slopes, softmax_scale=0.5, on="A100")
    assert "options     softmax_scale 0.5, softcap 30.0, alibi\n" in str(x)
    assert (x.launch == "") == (find_spec("triton") is None)
    assert "options" not in str(onchip.explain(q, q, q))


def test_few_queries_have_splits_and_no_tiles():
    q, k = (torch.empty(1, n, 16, 128, dtype=torch.bfloat16) for n in (1, 4096))
    x = onchip.explain(q, k, k, on="H200")
    assert x.launch == "" and x.splits is not None


def test_pages_on_another_device():
    """Kernel, splits and levels are chosen for that device, wherever the tensors are."""
    empty = {"dtype": torch.bfloat16}
    q, pages = torch.empty(4, 1, 32, 128, **empty), torch.empty(1024, 16, 8, 128, **empty)
    table = torch.arange(1024, dtype=torch.int32).view(4, 256)
    args = q, pages, pages, table, torch.full((4,), 4096, dtype=torch.int32)
    x = onchip.explain(*args, on="H200")
    assert (x.plan.kernel, x.device.name, x.parts) == ("hopper", "NVIDIA H200", ())
    cut = plan_ranges(x.problem, [(1, 4096)] * 4, H200)
    assert x.splits == cut and f"predicted   {human_time(cut.seconds)}, " in str(x)
    assert x.roofline.seconds * H200.memory_bytes_s == pytest.approx(
        x.min_bytes + cut.scratch_bytes
    )
    table[:, :200] = torch.arange(200)
    shared = onchip.explain(*args, on="H200")
    once = 3 * 200 * 16 * 8 * 2 * 128 * 2
    assert x.min_bytes - shared.min_bytes == once
    model = costs(*args[:3], H200)
    assert shared.sharing.plain_s == pytest.approx(model.one_call(1024, 424))
    assert str(shared).count("predicted") == 1
    if find_spec("triton"):
        older = onchip.explain(*args, on="A100")
        assert older.plan.kernel == "triton" and "(108 processors)" in str(older)


@pytest.mark.parametrize(
    ("cut", "tiles", "counts"),
    [
        ((None, None, None), [5, 900], [1, 1]),
        ((33, 4, None), [256], [32]),  # 8 tiles each
        ((33, 4, None), [2000, 1, 0, 16], [33, 1, 1, 1]),
        ((33, 4, None), [9, 3], [3, 1]),  # 4 at least
        ((1, 1, 16), [256, 17, 16, 0], [16, 2, 1, 1]),
    ],
)
def test_splits_of_known_lengths(cut, tiles, counts):
    assert count_splits(cut, [1] * len(tiles), tiles) == counts


def test_many_queries_are_not_split_at_fixed_positions():
    assert count_splits((1, 1, 16), [2, 1], [40, 40]) == [1, 3]


def test_predicted_times_with_and_without_splits():
    """The ranges of the Hopper kernel on an H200: 16 for each of 8 kv heads."""
    problem = make_problem(1, 4096, batch=2, num_heads=32, num_kv_heads=8, dtype=torch.bfloat16)
    ranges = plan_ranges(problem, [(1, 4096), (1, 1024)], H200)
    assert (ranges.counts, ranges.programs, ranges.tile_n) == ((13, 4), 128, 64)
    step = 64 * 2 * problem.head_dim * 2 * 132 / H200.memory_bytes_s
    assert ranges.seconds == pytest.approx(H200.call_s + 5 * step)
    assert ranges.uncut_s == pytest.approx(H200.call_s + 64 * step)
    x = onchip.explain(*call([4096, 1024]))._replace(splits=ranges)
    times = f"{human_time(ranges.seconds)}, {human_time(ranges.uncut_s)} without splits"
    assert f"predicted   {times}" in str(x._replace(hardware=H200)) and times not in str(x)


def test_pages_of_8_bits_have_twice_the_ranges():
    """Two programs on a processor share its memory bandwidth."""
    problem = make_problem(1, 1 << 17, num_heads=32, num_kv_heads=8, dtype=torch.bfloat16)
    problem = problem._replace(page_size=16, page_dtype=torch.int8)
    ranges = plan_ranges(problem, [(1, 1 << 17)], H200)
    assert (ranges.counts, ranges.programs) == ((33,), 264)
    step = 64 * 2 * (problem.head_dim + 4) * 132 / H200.memory_bytes_s
    assert ranges.seconds == pytest.approx(H200.call_s + 2 * 63 * step)


def test_invalid_calls_are_refused_as_by_the_call():
    arguments = call([100])
    with pytest.raises(ValueError, match="cache_seqlens"):
        onchip.explain(*arguments[:4], None)
    with pytest.raises(ValueError, match="is not in"):
        onchip.explain(*arguments[:3], arguments[3] + 10**6, arguments[4])
    with pytest.raises(TypeError, match="not cu_seqlens_k"):
        onchip.explain(*arguments, max_seqlen_k=100)
    for option in ("bias", "dropout_p"):
        with pytest.raises(TypeError, match=f"has no option '{option}'"):
            onchip.explain(*arguments, **{option: None})


@interpreted
class TestKernel:
    """The explained splits equal the splits that the kernel makes on the device."""

    @pytest.mark.parametrize("deterministic", (False, True))
    @pytest.mark.parametrize(
        ("lengths", "seqlen_q", "window"),
        [([500, 3, 260], 1, None), ([700, 40], 2, 200), ([64] * 5, 1, None), ([333], 40, None)],
    )
    def test_splits_equal_the_records_of_the_kernel(
        self, monkeypatch, lengths, seqlen_q, window, deterministic
    ):
        scratch = self.watch_scratch(monkeypatch)
        q, k, v, *tables = call(lengths, seqlen_q=seqlen_q)
        options = {"window_size": (window, None), "deterministic": deterministic}
        options |= {"kernel": "triton"}
        arguments = q.contiguous(), torch.zeros(k.shape, dtype=k.dtype), v.contiguous(), *tables
        x = onchip.explain(*arguments, **options)
        onchip.paged_attention(*arguments, **options)
        records = scratch[0][2]
        counts = [] if records is None else self.counts_of(records.view(-1, 8))
        tiles_q = -(-seqlen_q * HEADS // KV_HEADS // min(32, max(16, seqlen_q * 4)))
        assert [n for n in x.splits.counts if n > 1] == counts[::tiles_q]
        assert ("merged" in str(x)) == bool(counts)

    @pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"window_size": (100, None)}])
    def test_splits_of_a_call_without_pages(self, monkeypatch, options):
        scratch = self.watch_scratch(monkeypatch)
        q, k = torch.zeros(1, 1, HEADS, DIM), torch.zeros(1, 333, KV_HEADS, DIM)
        options = {"causal": True, "kernel": "triton"} | options
        x = onchip.explain(q, k, k, **options)
        onchip.attention(q, k, k, **options)
        assert [*x.splits.counts] == self.counts_of(scratch[0][2].view(-1, 8)) != [1]
        assert x.splits.programs == KV_HEADS * sum(x.splits.counts) and x.pages is None
        many = onchip.explain(k.repeat(1, 1, 2, 1), k, k, **options)
        assert many.splits is None and "splits" not in str(many)

    @staticmethod
    def watch_scratch(monkeypatch):
        """Small tiles, so that few keys are split, and a list of the scratch of each launch."""
        from onchip.kernels.tiles import TritonConfig
        from onchip.kernels.triton import decode, launch

        monkeypatch.setattr(launch, "triton_config", lambda *_: TritonConfig(32, 32, 4, 1))
        monkeypatch.setattr(decode, "SPLIT_KEYS", 32)
        monkeypatch.setattr(decode, "FIXED_KEYS", 64)
        launches, make_scratch = [], decode.make_scratch

        def record(*args):
            launches.append(make_scratch(*args))
            return launches[-1]

        monkeypatch.setattr(decode, "make_scratch", record)
        return launches

    @staticmethod
    def counts_of(records):
        return records[1 : 1 + int(records[0, 0]), 4].tolist()
