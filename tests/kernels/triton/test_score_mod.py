"""score_mod in the portable kernels: the emitted functions against torch, and attention with them
against fp64. Interpreted here, compiled on a GPU.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onchip
import onchip.testing as ot
from onchip import masks
from onchip.core import dispatch
from onchip.core.device import DeviceInfo
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.cost import make_problem
from onchip.kernels.cpu.score_mod import ModifiedTile
from onchip.kernels.tiles import TritonConfig
from onchip.kernels.triton import entry, indices
from onchip.score_mods import trace
from onchip.score_mods.evaluate import Cells
from tests.interpreted import DEVICE, INTERPRETED, interpreted, interpreted_or_gpu, mark_slow_except
from tests.score_mods.functions import RandomFunction

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from onchip.kernels.triton import score_mod  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
INF, NAN = math.inf, math.nan
TILE = 32
BATCH, HEAD, FIRST = 1, 2, 3  # of the tile: its batch entry, its head, its first query


@triton.jit
def tile_kernel(
    score_ptr, out_ptr, by_score_ptr, floats_ptr, integers_ptr, b, h, first,
    size_0, size_1, size_2, size_3, TILE: tl.constexpr, SCORE_MOD: tl.constexpr,
):  # fmt: skip
    """A score function on a tile of TILE queries and keys."""
    i, j = first + tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    cells = (i - first) * TILE + j
    sizes = (size_0, size_1, size_2, size_3)
    s = tl.load(score_ptr + cells)
    s, by_score = SCORE_MOD(s, b, h, i, j, floats_ptr, integers_ptr, sizes)
    tl.store(out_ptr + cells, s)
    tl.store(by_score_ptr + cells, tl.zeros([TILE, TILE], tl.float32) + by_score)


def _run_tile(mod, score: Tensor) -> tuple[Tensor, Tensor]:
    """The score after `mod` and its derivative, by the emitted function."""
    floats, integers = (None if t is None else t.to(DEVICE) for t in mod.flatten())
    sizes = [n for t in mod.tensors for n in t.shape]
    out, by_score = (torch.full(score.shape, NAN, device=DEVICE) for _ in range(2))
    function = score_mod.score_function(mod.text)
    tile_kernel[(1,)](
        score.to(DEVICE), out, by_score, floats, integers, BATCH, HEAD, FIRST,
        *sizes, *(None,) * (4 - len(sizes)), TILE=TILE, SCORE_MOD=function,
    )  # fmt: skip
    return out.cpu(), by_score.cpu()


def _compute_tile(mod, score: Tensor) -> tuple[Tensor, Tensor]:
    """The same by torch (kernels/cpu/score_mod.py), in the precision of `score`."""
    floats, integers = mod.flatten()
    b, h = (torch.tensor([n]).view(1, 1, 1, 1) for n in (BATCH, HEAD))
    q, k = (torch.arange(n, n + TILE) for n in (FIRST, 0))
    hidden = torch.zeros(1, 1, TILE, TILE, dtype=torch.bool)  # an index may be out of range
    cells = Cells(b, h, q.view(1, 1, -1, 1), k.view(1, 1, 1, -1), hidden)
    x = Tensors(score, score, score, captured=floats, captured_ints=integers)
    tile = ModifiedTile(mod.text, x, score[None, None], cells)
    return tile.scores()[0, 0], tile.score_gradient(torch.ones_like(score[None, None]))[0, 0]


VECTOR, MATRIX = torch.linspace(-2, 2, 17), torch.linspace(-1, 1, 35).view(5, 7)
NUMBERS, FLAGS = torch.arange(40) * 7 % 11 - 5, torch.arange(9) % 3 == 0
BIG = 1 << 40
OPERATIONS = {
    "add": lambda s, b, h, q, k: s + 0.5 + q - k,
    "neg": lambda s, b, h, q, k: -s * 2 + -(q - k),
    "div": lambda s, b, h, q, k: s / 3 + 1 / (1 + s * s) + q / (k + 1),
    "exp": lambda s, b, h, q, k: torch.exp(s) + torch.exp2(s - 1),
    "log": lambda s, b, h, q, k: torch.log(s * s + 1) + torch.log2(s.abs() + 0.1),
    "sqrt": lambda s, b, h, q, k: torch.sqrt(s.abs() + 1) + torch.rsqrt(s * s + 2),
    "tanh": lambda s, b, h, q, k: torch.tanh(s) + torch.sigmoid(3 * s),
    "sin": lambda s, b, h, q, k: torch.sin(s * 5) + torch.cos(q * 1.5) * s,
    "erf": lambda s, b, h, q, k: torch.erf(s),
    "floor": lambda s, b, h, q, k: torch.floor(s) + 2 * torch.ceil(s) + 3 * torch.trunc(s * 2),
    "round": lambda s, b, h, q, k: torch.round(s * 3) + torch.round((q - k) / 2),
    "abs": lambda s, b, h, q, k: s.abs() + (q - k).abs() - torch.abs(-q),
    "sign": lambda s, b, h, q, k: torch.sign(s) * s + torch.sign(q - k),
    "max": lambda s, b, h, q, k: torch.maximum(s, s * s) + torch.minimum(q, k),
    "clamp": lambda s, b, h, q, k: torch.clamp(s, -0.5, 0.5) + torch.clamp(q - k, -3, 3),
    "power": lambda s, b, h, q, k: (s * s + 0.1) ** 1.7 + 1.3**s + s**3,
    "power of a negative": lambda s, b, h, q, k: torch.pow(-2.0, (q - k) // 8) * s,
    "floordiv": lambda s, b, h, q, k: s + (q - k) // 3 + (q - k) // -4 + k // 5,
    "mod": lambda s, b, h, q, k: s + (q - k) % 3 + (q - k) % -5 + k % 4,
    "floordiv of floats": lambda s, b, h, q, k: s + (s * 4) // 1.5 + (q - 9.0) // -2.0,
    "mod of floats": lambda s, b, h, q, k: s + (s * 4) % 1.5 + (q - 9.0) % -2.0,
    "exact quotients": lambda s, b, h, q, k: s + torch.floor(q / 3) + torch.where(k / 7 >= 2, 1, 0),
    "shift": lambda s, b, h, q, k: s + (q << 2) + ((q - k) >> 1) + (q << (k - 20)) * 1e-9,
    "logic": lambda s, b, h, q, k: s + (q & 5) + (q | k) + ((q - k) ^ 3) + ~k,
    "bools": lambda s, b, h, q, k: torch.where(
        (q > k) & ~(s > 0) | (s < -1), s, (q >= k) ^ (k == 3)
    ),
    "comparisons": lambda s, b, h, q, k: s * (q != k) + (q <= 9) * 2 + ((s > 0) == (q > k)),
    "wide integers": lambda s, b, h, q, k: s + (q * 2654435761 + k * BIG) % 1000003 * 1e-3,
    "where": lambda s, b, h, q, k: torch.where(q - k > 4, -INF, s),
    "hidden infinity": lambda s, b, h, q, k: torch.where(q > k, torch.log(q - k), s),
    "constant": lambda s, b, h, q, k: 1.5,
    "indices": lambda s, b, h, q, k: s + 100 * b + 10 * h,
    "load": lambda s, b, h, q, k: s * VECTOR[h] + MATRIX[h, k % 7],
    "load from the end": lambda s, b, h, q, k: s + VECTOR[-1 - (k % 9)] + MATRIX[-1, k % 7 - 7],
    "load out of range": lambda s, b, h, q, k: s + VECTOR[k * 2] + VECTOR[q - 50],
    "load of integers": lambda s, b, h, q, k: s + NUMBERS[q] * 0.5 + VECTOR[NUMBERS[k] + 5],
    "load of bools": lambda s, b, h, q, k: torch.where(FLAGS[k % 9], s, VECTOR[h + b]),
    "load of a scalar": lambda s, b, h, q, k: s * VECTOR[3] + VECTOR[h],
}


@interpreted_or_gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_emitted_function_computes_what_torch_computes(name):
    mod = trace(OPERATIONS[name])
    score = torch.randn(TILE, TILE, generator=torch.Generator().manual_seed(5))
    got, expected = _run_tile(mod, score), _compute_tile(mod, score)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, equal_nan=True)


@interpreted_or_gpu
@pytest.mark.parametrize("seeds", mark_slow_except((0,), [range(12), range(12, 300)]))
def test_random_functions_compute_what_torch_computes(seeds):
    """Within four times the error of torch in fp32, and 1e-4."""
    for seed in seeds:
        function, generator = RandomFunction(seed), torch.Generator().manual_seed(seed)
        table = torch.randn(40, 5, generator=generator)
        function.tensors = torch.randn(3, generator=generator), table, torch.arange(40) % 5
        mod, score = trace(function), torch.randn(TILE, TILE, generator=generator)
        exact, rounded = (_compute_tile(mod, x) for x in (score.double(), score))
        for x, y, z in zip(_run_tile(mod, score), exact, rounded, strict=True):
            bound = 1e-4 * (1 + y.abs()) + 4 * (z - y).abs()
            assert ((x - y).abs() <= bound).all(), seed


@interpreted_or_gpu
def test_a_program_serves_every_size():
    """The source has no size, and its function is the same object: the key of Triton's cache."""
    functions = set()
    for n in (17, 31, 64):
        table = torch.linspace(0, 1, n)
        mod = trace(lambda s, b, h, q, k, table=table: s * table[k % 16] + table[q - k])
        functions.add(score_mod.score_function(mod.text))
        score = torch.ones(TILE, TILE)
        torch.testing.assert_close(_run_tile(mod, score), _compute_tile(mod, score))
    assert len(functions) == 1


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Much smaller tiles than on a GPU, so that short sequences have several."""
    if INTERPRETED:
        from onchip.kernels.triton import launch

        config = lambda kernel, use: TritonConfig(32, 64 if use.has_mask else 32, 4, 1)
        monkeypatch.setattr(launch, "triton_config", config)


def _draw(*shape: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return x.to(DEVICE)


def _ids(n: int, of: int) -> Tensor:
    return (torch.arange(n) // of).to(DEVICE)


def _buckets(distance: int) -> Tensor:
    """Buckets of T5 of the distances from -distance to distance."""
    d = torch.arange(-distance, distance + 1)
    far = (8 + torch.log(d.abs().clamp(min=8) / 8) * 3).to(torch.int64).clamp(max=15)
    return (torch.where(d.abs() < 8, d.abs(), far) + 16 * (d > 0)).to(DEVICE)


def alibi(slopes):
    return lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()


def softcap():
    return lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0)


def bias(bias):
    return lambda s, b, h, q, k: s + bias[h, q, k]


def keys_and_queries(of_keys, of_queries):
    return lambda s, b, h, q, k: s * torch.sigmoid(of_queries[b, q]) + of_keys[k]


def transposed(bias, scale):
    return lambda s, b, h, q, k: s + bias[k, b, q, -1] * scale


def relative(table, buckets):
    distance = buckets.shape[0] // 2
    return lambda s, b, h, q, k: s + table[buckets[k - q + distance], h]


def temperature(t):
    return lambda s, b, h, q, k: s * torch.exp(t[h])


def decay():
    return lambda s, b, h, q, k: s - torch.log(1.0 + (q - k).abs()) * (h + 1)


def documents(ids):
    return lambda s, b, h, q, k: torch.where(ids[q] == ids[k], s, -INF)


def waves(phase):
    return lambda s, b, h, q, k: torch.erf(s) + torch.sin(phase[h] * q) * torch.cos(phase[h] * k)


def hidden_infinities(scale):
    """Where q < k the derivative is infinite or NaN: hidden by causal."""
    return lambda s, b, h, q, k: s + torch.sqrt((q - k) * 1.0) / scale[h] + torch.log(1.0 + q - k)


def decomposed(rows, columns):
    return lambda s, b, h, q, k: s + rows[h, q, k // 8] + columns[h, q, k % 8]


def per_entry(weight):
    return lambda s, b, h, q, k: s + weight[b, h] * (k % 2)


GQA = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "head_dim_v": 24}
D64, D40 = {"num_heads": 2, "head_dim": 64}, {"num_heads": 3, "num_kv_heads": 1, "head_dim": 40}
MOD = masks.mod(lambda b, h, q, k: (q + 2 * k + 3 * h + 5 * b) % 4 != 0)
CAUSAL, WINDOW = {"causal": True}, {"window_size": (40, 3)}
CASES = {  # (function, tensors, lengths, sizes, dtype, options)
    "alibi": (alibi, lambda: (_draw(2).abs(),), (63, 63), D64, BF16, CAUSAL),
    "softcap": (softcap, tuple, (1, 111), GQA, FP32, {}),
    "bias": (bias, lambda: (_draw(2, 63, 50),), (63, 50), GQA, FP32, {"alibi": True}),
    "gate": (keys_and_queries, lambda: (_draw(63), _draw(2, 40)), (40, 63), GQA, FP32, CAUSAL),
    "transposed": (
        transposed,
        lambda: (_draw(50, 2, 33, 3), torch.tensor(0.7, device=DEVICE)),
        (33, 50),
        GQA,
        FP32,
        {},
    ),
    "relative": (relative, lambda: (_draw(32, 2), _buckets(70)), (50, 70), GQA, FP32, {}),
    "temperature": (temperature, lambda: (_draw(3),), (50, 40), D40, FP32, {"softcap": 4.0}),
    "decay": (decay, tuple, (63, 63), D40, BF16, WINDOW),
    "documents": (documents, lambda: (_ids(111, 13),), (111, 111), GQA, FP32, {"sinks": True}),
    "waves": (waves, lambda: (_draw(2),), (40, 63), GQA, FP32, {}),
    "hidden infinities": (
        hidden_infinities,
        lambda: (_draw(2).exp(),),
        (63, 63),
        GQA,
        FP32,
        CAUSAL,
    ),
    "decomposed": (
        decomposed,
        lambda: (_draw(2, 40, 8), _draw(2, 40, 8)),
        (40, 63),
        GQA,
        FP32,
        {"bias": True},
    ),
    "everything": (
        alibi,
        lambda: (_draw(2),),
        (140, 150),
        GQA,
        FP32,
        {"mask": MOD, "causal": True, "window_size": (90, None), "dropout_p": 0.2, "softcap": 5.0},
    ),
    "statistics": (per_entry, lambda: (_draw(2, 2),), (33, 40), GQA, FP32, {"return_stats": True}),
}


def _options(options: dict, heads: int, lengths: tuple[int, int]) -> tuple[dict, object]:
    """The options with their tensors, for the oracle, and the mask of the call."""
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = _draw(heads).abs() / 4
    if options.pop("bias", False):
        options["bias"] = _draw(1, 1, *lengths).requires_grad_()
    if options.pop("sinks", False):
        options["sinks"] = _draw(heads).requires_grad_()
    if "dropout_p" in options:
        options["dropout_seed"] = 2**40 + 17
    mask = options.pop("mask", None)
    if mask is not None:
        mask = masks.build(mask, 2, heads, *lengths, DEVICE)
        options["mask"] = mask.to_dense()
    return options, mask


@interpreted_or_gpu
@pytest.mark.parametrize("name", mark_slow_except((3, 5, 10), CASES))
def test_attention_and_its_gradients(name):
    make, tensors, lengths, sizes, dtype, options = CASES[name]
    q, k, v = (
        ot.poison_neighbours(x.to(DEVICE)) for x in ot.make_qkv(2, *lengths, dtype=dtype, **sizes)
    )
    options, mask = _options(options, q.shape[2], lengths)
    function = make(*tensors())

    def attention(q, k, v, **options):
        options["mask"] = mask
        return onchip.attention(q, k, v, kernel="triton", return_lse=True, **options)

    ot.assert_accurate(attention, q, k, v, grad=True, score_mod=function, **options)


def _captured_gradients(case, kernel: str, dtype, **more) -> list[Tensor]:
    """The gradients of the captured floats for given cotangents."""
    make, tensors, lengths, sizes, _, options = case
    device = "cpu" if kernel == "tiled" else DEVICE
    q, k, v = (x.to(device, dtype) for x in ot.make_qkv(2, *lengths, dtype=FP32, **sizes))
    options, mask = _options(options, q.shape[2], lengths)
    options = {n: x.detach().to(device) if isinstance(x, Tensor) else x for n, x in options.items()}
    if mask is not None:
        options["mask"] = masks.build(MOD, 2, q.shape[2], *lengths, device)
    captured = [t.to(device, dtype if t.is_floating_point() else None) for t in tensors()]
    leaves = [t.requires_grad_() for t in captured if t.is_floating_point()]
    more |= {"kernel": kernel, "return_lse": True, "score_mod": make(*captured)}
    out, lse = onchip.attention(q, k, v, **options, **more)[:2]
    dout = torch.linspace(-1, 2, out.numel()).view(out.shape).to(out)
    dlse = torch.linspace(1, -1, lse.numel()).view(lse.shape).to(lse)
    return [g.cpu().double() for g in torch.autograd.grad([out, lse], leaves, [dout, dlse])]


LEARNED = [name for name in CASES if name not in ("softcap", "decay", "documents")]


@interpreted_or_gpu
@pytest.mark.parametrize("name", mark_slow_except((2, 4), LEARNED))
def test_gradients_of_captured_tensors(name):
    case = CASES[name]
    got, expected = (
        _captured_gradients(case, kernel, dtype)
        for kernel, dtype in (("triton", FP32), ("tiled", torch.float64))
    )
    for x, y in zip(got, expected, strict=True):
        assert x.isfinite().all() and y.abs().max() > 0
        torch.testing.assert_close(x, y, rtol=2e-5, atol=1e-5 * y.abs().max().item())


PACKED = [
    ([63, 1, 0, 40], [63, 1, 7, 40], {"causal": True}),
    ([5, 30, 1, 7], [63, 50, 0, 3], {"window_size": (16, 2), "softcap": 5.0}),
]


def _varlen(packed, captured, kernel: str, dtype, **options) -> list[Tensor]:
    """out and all gradients of a packed call whose score_mod reads its tensors by every index."""
    device = "cpu" if kernel == "tiled" else DEVICE
    qkv = [x.to(device, dtype).requires_grad_() for x in packed[:3]]
    leaves = [t.detach().to(device, dtype).requires_grad_() for t in captured]
    of_keys, of_queries, weight, table = leaves

    def function(s, b, h, q, k):
        s = s * torch.exp(of_queries[q] / 4) + of_keys[k]
        return s + weight[b, h] * (k % 3) + table[torch.clamp(q - k, -9, 9) + 9]

    moved = lambda x: x.to(device) if isinstance(x, Tensor) else x
    options |= {name: moved(x) for name, x in packed.options.items()}
    out = onchip.varlen_attention(*qkv, kernel=kernel, score_mod=function, **options)
    dout = torch.linspace(-1, 2, out.numel()).view(out.shape).to(out)
    grads = torch.autograd.grad(out, (*qkv, *leaves), dout)
    return [x.detach().cpu().double() for x in (out, *grads)]


@interpreted_or_gpu
@pytest.mark.parametrize("case", mark_slow_except((1,), PACKED))
def test_packed_sequences_have_indices_of_their_own(case):
    """Also sequences without queries or without keys."""
    seqlens_q, seqlens_k, options = case
    packed = ot.make_packed(seqlens_q, seqlens_k, dtype=FP32, **GQA)
    captured = _draw(64), _draw(64), _draw(4, 2), _draw(19)
    got = _varlen(packed, captured, "triton", FP32, **options)
    expected = _varlen(packed, captured, "tiled", torch.float64, **options)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=1e-5 * y.abs().max().item())


@interpreted_or_gpu
def test_heads_of_a_part_of_a_call_have_their_numbers_in_the_whole():
    """first_head, in the scores and in the gradient of what they index."""
    weight = _draw(3)
    mod = trace(lambda s, b, h, q, k: s * torch.exp(weight[h]) + h * (k % 5))
    q, k, v = (x.to(DEVICE) for x in ot.make_qkv(1, 20, 33, dtype=FP32, **GQA))
    x = Tensors(q, k, v, captured=mod.flatten()[0])
    problem = describe(x, Options(score_mod=mod.text))._replace(first_head=1)
    results = []
    for backend in (entry.backend, dispatch.get_backend("tiled")):
        out, lse, _ = backend.forward(problem, x)
        dout = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out)
        grads = backend.backward(problem, x, out, lse, dout, None)
        results.append((out, lse, grads.dq, grads.dcaptured))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert results[0][3][0] == 0 and (results[0][3][1:] != 0).all()


@interpreted
def test_an_index_out_of_range_reads_no_other_memory():
    """tests/bounds.py reports every access outside of the tensors of a launch."""
    table = torch.rand(5)
    function = lambda s, b, h, q, k: s + table[q * k] + table[-1 - k] + table[k << 40]
    q, k, v = ot.make_qkv(1, 40, 63, dtype=FP32, **GQA)
    table.requires_grad_()
    out = onchip.attention(q, k, v, score_mod=function, kernel="triton")
    assert out.isfinite().all()
    assert torch.autograd.grad(out.sum(), table)[0].isfinite().all()


@interpreted
@pytest.mark.parametrize("sizes", [(30, 40), (33, 45)], ids=str)
def test_q_and_k_out_of_range_read_zero(sizes):
    """As from tensors padded with zeros: not the tensor behind them in the same memory."""
    tensors = torch.ones(sizes), torch.full((9,), 7.0), torch.full(sizes[1:], 0.5)
    q, k, v = ot.make_qkv(1, 40, 63, dtype=FP32, **GQA)
    leaves, results = [t.requires_grad_() for t in (q, *tensors)], []
    for keys, rows in ((0, 0), (63 - sizes[1], 40 - sizes[0])):
        bias, row = F.pad(tensors[0], (0, keys, 0, rows)), F.pad(tensors[2], (0, keys))
        function = lambda s, b, h, q, k, bias=bias, row=row: s * row[k] + bias[q, k] + tensors[1][h]
        out = onchip.attention(q, k, v, score_mod=function, kernel="triton")
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@interpreted_or_gpu
def test_gradients_in_a_fixed_order_are_the_same_bits():
    case = CASES["statistics"]
    first, second = (_captured_gradients(case, "triton", FP32, deterministic=True) for _ in "ab")
    assert all(map(torch.equal, first, second))


@interpreted
def test_constant_tensors_have_no_gradient_computed(monkeypatch):
    """The same backward is then deterministic, whatever the indices."""
    from onchip.kernels.triton import backward

    q, k, v = ot.make_qkv(1, 40, num_heads=2, head_dim=16)
    q.requires_grad_()
    table = torch.randn(2, 81, generator=torch.Generator().manual_seed(0))
    mod = lambda s, b, h, q, k: s + table[h, q - k + 40]
    loss = lambda **o: onchip.attention(q, k, v, score_mod=mod, kernel="triton", **o).sum()
    (expected,) = torch.autograd.grad(loss(), q)
    monkeypatch.setattr(backward, "captured_gradient", None)
    assert torch.equal(torch.autograd.grad(loss(deterministic=True), q)[0], expected)
    table.requires_grad_()
    with pytest.raises(TypeError):  # now the stand-in is called
        torch.autograd.grad(loss(), (q, table))


GPU = DeviceInfo("cuda", "", (9, 0))


def _problem(function, **options):
    return make_problem(64, num_heads=2, head_dim=64, dtype=BF16)._replace(
        score_mod=trace(function).text, **options
    )


def test_deterministic_gradients_of_computed_indices_are_left_to_tiled():
    table = torch.rand(127)
    problem = _problem(lambda s, b, h, q, k: s + table[q - k + 63], deterministic=True)
    assert entry.backend.supports(problem, GPU) is None
    reason = entry.backend.supports_backward(problem, GPU)
    assert "computed indices in any order, which deterministic=True excludes" in (reason or "")
    for change in ({"deterministic": False}, {"captured_is_constant": True}):
        assert entry.backend.supports_backward(problem._replace(**change), GPU) is None
    assert dispatch.plan(problem, GPU).kernel == "triton"
    assert dispatch.plan(problem, GPU, backward=True).kernel == "tiled"
    with pytest.raises(onchip.UnsupportedError, match="'triton' cannot .* in any order"):
        dispatch.plan(problem, GPU, "triton", backward=True)
    plain = _problem(lambda s, b, h, q, k: s + table[q] * table[3], deterministic=True)
    assert entry.backend.supports_backward(plain, GPU) is None


def test_tensors_that_kernels_do_not_take_are_refused_in_a_sentence():
    many = [torch.rand(1, 1, 1, 1, 1) for _ in range(3)]
    problem = _problem(lambda s, b, h, q, k: s + sum(t[b, h, q, k, 0] for t in many))
    reason = entry.backend.supports(problem, GPU)
    assert reason == "has score_mod with tensors of 12 dimensions in all, this one indexes 15"
    empty = torch.rand(0, 5)
    problem = _problem(lambda s, b, h, q, k: s + empty[q, k])
    assert "empty tensor" in (entry.backend.supports(problem, GPU) or "")


def test_the_order_of_a_gradient_by_its_indices():
    t = torch.rand(4, 4)
    orders = {
        "plain": lambda s, b, h, q, k: s + t[h, 3],
        "twice": lambda s, b, h, q, k: s + t[q, q],
        "computed": lambda s, b, h, q, k: s + t[h, q + 1],
        "by a tensor": lambda s, b, h, q, k: s + t[NUMBERS[q], h],
        "without a gradient": lambda s, b, h, q, k: torch.where(t[q - k, h] > 0, s, 0.0),
    }
    got = {name: indices.has_any_order(trace(f).text) for name, f in orders.items()}
    assert got == {
        "plain": False,
        "twice": True,
        "computed": True,
        "by a tensor": True,
        "without a gradient": False,
    }


def test_calls_of_few_queries_have_no_kernel_that_ignores_score_mod():
    from onchip.kernels.triton import decode

    problem = _problem(lambda s, b, h, q, k: s + q)._replace(seqlen_q=1)
    assert not decode.serves(problem) and decode.serves(problem._replace(score_mod=None))
