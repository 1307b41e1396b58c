"""Products of few rows against fp64, fused forms against the launches that they replace, decoders
with them against decoders without: by Triton's interpreter on the CPU, and on a GPU where there is
one.
"""

import pytest
import torch

from onchip.kernels import tiles
from onchip.kvcache import KVCache
from onchip.models import decoder, pointwise, positions_of, products, random_model
from tests.interpreted import DEVICE, INTERPRETED, interpreted_or_gpu, mark_slow_except
from tests.kernels.llm.test_pointwise import config_of, exact_norm, randn, steps

pytest.importorskip("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP32) if INTERPRETED else (BF16, FP16, FP32)
SHAPES = [  # rows, columns, width
    (1, 1, 1),
    (1, 40, 100),
    (3, 65, 700),
    (8, 7, 257),
    (16, 70, 1100),
    *([] if INTERPRETED else [(1, 4096, 1024), (7, 1024, 3072), (16, 6144, 4096), (1, 999, 14336)]),
]
LARGE = [] if INTERPRETED else [(1, 4096, 1024), (16, 6144, 1024), (4, 6144, 4096)]
GATES = [] if INTERPRETED else [(1, 3072, 1024), (4, 14336, 4096)]


@pytest.fixture
def kernels():
    from onchip.kernels.llm import products as kernels

    with torch.no_grad():
        yield kernels


@pytest.fixture
def small_tiles(monkeypatch):
    """Rows of the weight take several tiles, as those of large models do. A tile has at least one
    line of each row, also with four programs on a processor.
    """
    flight_bytes = 2048 if INTERPRETED else 16384
    row = tiles.ProductRow((32, 16, 8), flight_bytes, (1024, 1024))
    rows = dict.fromkeys(tiles.TRITON_PRODUCT, row)
    monkeypatch.setattr(tiles, "TRITON_PRODUCT", rows)


def between_nans(*shape, dtype):
    """Random values in the middle of NaN. They are in memory: a kernel reads its weight before it
    waits for the launch before it.
    """
    x = randn(*shape, dtype=dtype)
    around = torch.full((x.numel() + 128,), float("nan"), dtype=dtype, device=DEVICE)
    around[64:-64] = x.flatten()
    if not INTERPRETED:
        torch.cuda.synchronize()
    return around[64:-64].view(x.shape)


def assert_is_product(out, x, weight, bias=None):
    """Within one rounding of the exact product, and the error of fp32 sums."""
    x, weight = x.double(), weight.double()
    exact = x @ weight.T if bias is None else x @ weight.T + bias.double()
    unit = 0.51 * torch.finfo(out.dtype).eps * exact.abs()
    assert out.shape == exact.shape
    assert ((out.double() - exact).abs() <= unit + 1e-6 * (x.abs() @ weight.abs().T + 1)).all()


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(kernels, dtype, shape):
    rows, columns, width = shape
    x, weight, bias = (
        between_nans(*s, dtype=dtype) for s in ((rows, width), (columns, width), (columns,))
    )
    assert_is_product(kernels.product(x, weight), x, weight)
    assert_is_product(kernels.product(x, weight, bias), x, weight, bias)


@interpreted_or_gpu
@pytest.mark.parametrize("rows", range(1, 17))
def test_every_number_of_rows_over_several_tiles(kernels, small_tiles, rows):
    x, weight = between_nans(rows, 150, dtype=BF16), between_nans(26, 150, dtype=BF16)
    assert_is_product(kernels.product(x, weight), x, weight)


@interpreted_or_gpu
def test_strided_rows_and_no_rows(kernels):
    wide, weight = between_nans(3, 2, 200, dtype=BF16), between_nans(9, 200, dtype=BF16)[:, :90]
    x, y = wide[..., :90], wide[..., 110:]
    assert_is_product(kernels.product(x, weight), x, weight)
    total, out = kernels.norm_product(x, y, randn(90, dtype=BF16), (1e-6, 0.0), weight)
    assert torch.equal(total, x + y) and out.shape == (3, 2, 9)
    assert kernels.product(x[:0], weight).shape == (0, 2, 9)


@interpreted_or_gpu
def test_a_row_of_nan_changes_no_other_row(kernels):
    x, weight = between_nans(5, 100, dtype=BF16), between_nans(30, 100, dtype=BF16)
    norm, rest = randn(100, dtype=BF16), ((1e-6, 0.0), weight)
    before = kernels.product(x, weight), kernels.norm_product(x, x, norm, *rest)[1]
    x[2] = float("nan")
    after = kernels.product(x, weight), kernels.norm_product(x, x, norm, *rest)[1]
    others = [0, 1, 3, 4]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[others], new[others]) and new[2].isnan().all()


def compare_to_launches(kernels, out, x, norm, eps_offset, weight, bias=None, activation=None):
    """Bit for bit the norm, product and gate of separate launches, unless the last bit of a sum of
    squares, added in another order, rounds an element of the norm up instead of down.
    """
    from onchip.kernels.llm import pointwise as separate

    normed = separate.add_rms_norm(x, None, norm, *eps_offset)[1]
    theirs = kernels.product(normed, weight, bias)
    if activation is not None:
        theirs = separate.gated_activation(theirs, activation)
    close = 1e-5 if out.dtype == FP32 else 4 * torch.finfo(out.dtype).eps
    torch.testing.assert_close(out, theirs, rtol=close, atol=close * float(theirs.abs().mean()))
    assert out.dtype == FP32 or (out != theirs).float().mean() < 0.02


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 33, 100), (5, 40, 321), *LARGE], ids=str)
@pytest.mark.parametrize("is_tiled", [False, True], ids=["one tile", "tiles"])
def test_sum_norm_and_product(kernels, request, dtype, shape, is_tiled):
    if is_tiled:
        request.getfixturevalue("small_tiles")
    rows, columns, width = shape
    x, y = (between_nans(rows, width, dtype=dtype) for _ in range(2))
    norm, bias = between_nans(width, dtype=dtype), between_nans(columns, dtype=dtype)
    weight = between_nans(columns, width, dtype=dtype)
    rest = norm, (1e-5, 1.0), weight, bias
    total, out = kernels.norm_product(x, y, *rest)
    assert torch.equal(total, x + y)
    compare_to_launches(kernels, out, x + y, *rest)
    same, out = kernels.norm_product(x, None, *rest)
    assert same is x
    compare_to_launches(kernels, out, x, *rest)
    exact = exact_norm(x, norm, 1e-5, 1.0)
    normed = exact.to(dtype)  # rounded where a tensor would be stored
    # In fp32 the norm is off, too: rsqrt by 2**-22.9 (PTX), the mean and two products by 2**-24.
    roundings = 4 if dtype == FP32 else 1
    reach = (exact.abs() @ weight.double().abs().T + 1) * roundings * torch.finfo(dtype).eps
    assert (
        (out.double() - normed.double() @ weight.double().T - bias.double()).abs() < reach
    ).all()


@interpreted_or_gpu
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 37, 100), *GATES], ids=str)
def test_gates(kernels, name, shape):
    """Of a weight whose second half has the rows of up."""
    rows, inner, width = shape
    for dtype in DTYPES:
        x, norm = between_nans(rows, width, dtype=dtype), between_nans(width, dtype=dtype)
        weight, bias = between_nans(2 * inner, width, dtype=dtype), randn(2 * inner, dtype=dtype)
        rest = norm, (1e-6, 0.0), weight, bias, name
        out = kernels.norm_product(x, x, *rest)[1]
        assert out.shape == (rows, inner)
        compare_to_launches(kernels, out, x + x, *rest)


@interpreted_or_gpu
def test_rows_of_zeros_and_of_huge_elements_stay_finite(kernels):
    x = torch.stack([torch.full((63,), 3e4), torch.zeros(63)]).to(DEVICE, FP16)
    ones = torch.ones(63, dtype=FP16, device=DEVICE)
    out = kernels.norm_product(x, None, ones, (1e-6, 0.0), ones.expand(5, 63).contiguous())[1]
    assert out.tolist() == [[63.0] * 5, [0.0] * 5]


@pytest.fixture
def as_on_gpu(kernels, monkeypatch):
    """The decoder finds fused kernels for all tensors. The kernels that `products` calls, by name
    and number of rows.
    """
    from onchip.kernels.llm import pointwise as module

    for room in (pointwise, decoder, products):
        monkeypatch.setattr(room, "fused", lambda *tensors: module)
    calls = []
    for name in ("product", "norm_product"):
        run = getattr(kernels, name)
        record = lambda x, *rest, run=run, name=name: (
            calls.append((name, x.numel() // x.shape[-1])) or run(x, *rest)
        )
        monkeypatch.setattr(kernels, name, record)
    return calls


FORMS = {  # family: calls of norm_product and of product in a layer of a step
    "qwen3": (2, 2),
    "gemma2": (2, 2),  # post norms, offset 1
    "qwen2": (2, 2),  # biases
    "phi3": (2, 2),
    "qwen2_moe": (1, 5),  # of the experts only the router and the shared one
    "gpt2": (0, 4),  # LayerNorm, no gate
}
FEW_FORMS = ("qwen3", "gemma2", "qwen2_moe", "gpt2") if INTERPRETED else tuple(FORMS)


@interpreted_or_gpu
@pytest.mark.parametrize("family", mark_slow_except((0, 2), FEW_FORMS))
def test_decoders_equal_those_without(as_on_gpu, family):
    model = random_model(config_of(family), seed=3, device=DEVICE)
    states = []
    for enabled in (False, True):
        with products.fuse_products(enabled):
            states.append(steps(model, 4))
            states.append(model.logits(states[-1][-2:]))
        assert enabled or not as_on_gpu
    assert as_on_gpu.pop() == ("product", 2)  # of the logits
    names = [name for name, _ in as_on_gpu]
    # The first step has 10 rows, which are left to torch.
    expected = tuple(model.config.num_layers * count for count in FORMS[family])
    assert (names.count("norm_product"), names.count("product")) == expected
    for ours, theirs in ((0, 2), (1, 3)):
        torch.testing.assert_close(states[theirs], states[ours], rtol=0, atol=5e-5)


@interpreted_or_gpu
def test_pages_of_8_bits_get_the_same_keys(as_on_gpu):
    model = random_model(config_of("qwen3"), seed=3, device=DEVICE)
    written = []
    for enabled in (False, True):
        cache = KVCache(model.cache_spec(4, "int8"), 9)
        sequence = cache.open()
        cache.append_all([sequence], [[*range(7)]])
        batch = cache.view([sequence])
        with products.fuse_products(enabled):
            model(torch.arange(7, device=DEVICE), positions_of(batch), batch, cache)
        slots = batch.slot_mapping.long()
        pages = (*cache.layer(1), *cache.scales(1).values())
        written.append([t.flatten(0, 1)[slots].float() for t in pages])
    assert as_on_gpu
    for i, (one, other) in enumerate(zip(*written, strict=True)):
        # Integers of keys and values may be rounded to their neighbours; then come the scales.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1.0 if i < 2 else 0.0)


@interpreted_or_gpu
def test_hooks_of_outputs_run(as_on_gpu):
    """The ranks of tensor parallelism add these outputs (parallel/tensor_parallel.py)."""
    model, hooked = random_model(config_of("qwen3"), seed=3, device=DEVICE), []
    for block in model.layers:
        for module in (block.attention.out, block.mlp.down):
            module.register_forward_hook(lambda module, inputs, out: hooked.append(out.shape[0]))
    with products.fuse_products():
        steps(model, 4)
    assert hooked == [10] * 4 + [2] * 4


@interpreted_or_gpu
def test_steps_of_many_rows_and_long_rows_have_launches_of_their_own(as_on_gpu, monkeypatch):
    x, norm = randn(9, 16), pointwise.RMSNorm(randn(16), 1e-6)
    weight, bias = randn(12, 16), randn(12)
    with products.fuse_products(), torch.no_grad():
        products.norm_product(x, x, norm, weight, bias, "silu")
        assert not as_on_gpu
        products.norm_product(x[:8], x[:8], norm, weight, bias, "silu")
        assert as_on_gpu == [("norm_product", 8)]
        monkeypatch.setattr("onchip.kernels.llm.products.PRODUCT_NORM_ELEMENTS", 127)
        products.norm_product(x[:8], x[:8], norm, weight, bias, "silu")
        assert as_on_gpu.pop() == ("product", 8)
        products.norm_product(x[:7], None, norm, weight, bias)
        assert as_on_gpu.pop() == ("norm_product", 7)
        products.product(x[:2], randn(16, 12).T)
        with monkeypatch.context() as patch:
            most = weight.numel() * weight.element_size() - 1
            patch.setattr("onchip.kernels.llm.products.PRODUCT_MOST_BYTES", most)
            products.product(x[:2], weight)
        assert len(as_on_gpu) == 1
    products.product(x[:2], weight)
    assert len(as_on_gpu) == 1
