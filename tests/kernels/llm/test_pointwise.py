"""Fused norms, rotations, page writes and activations against their definitions in torch, judged by
fp64; by Triton's interpreter on the CPU, and on a GPU where there is one.
"""

import pytest
import torch

from onchip.kvcache import KVCache
from onchip.models import ModelConfig, decoder, pointwise, positions_of, random_model
from onchip.models.rotary import Rotary, cos_sin, rotate
from onchip.quant.kv8 import quantise
from tests.interpreted import DEVICE, INTERPRETED, interpreted_or_gpu
from tests.kv8 import FORMS

pytest.importorskip("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP32) if INTERPRETED else (BF16, FP16, FP32)
BASE = {
    "vocab_size": 67,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
FAMILIES = {
    "qwen3": {"head_dim": 20},
    "gemma2": {
        "head_dim": 20,
        "sliding_window": 7,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": None,
    },
    "phi3": {"hidden_size": 60, "partial_rotary_factor": 0.5, "pad_token_id": 0},
}
MORE = {
    "qwen2": {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2},
    "qwen2_moe": {
        "hidden_size": 48,
        "num_attention_heads": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "head_dim": 20,
        "sliding_window": 7,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
}
SIZES = [  # num_heads, num_kv_heads, head_dim, turned elements, page_size
    (1, 1, 1, 0, 1),
    (4, 2, 64, 64, 16),
    (9, 3, 40, 16, 4),
    (6, 5, 128, 128, 16),
    (1, 1, 256, 256, 2),
    *([] if INTERPRETED else [(16, 8, 128, 128, 16), (32, 8, 128, 64, 64)]),
]
WIDTHS = [
    (1, 1),
    (3, 63),
    (2, 2304),
    *([] if INTERPRETED else [(799, 1024), (5, 5120), (3, 16384)]),
]
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 67}


@pytest.fixture
def kernels():
    from onchip.kernels.llm import pointwise as kernels

    with torch.no_grad():
        yield kernels


def randn(*shape, dtype=FP32):
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_rounded_once(out, exact):
    """Within half a unit in the last place of the exact value, and a little: fp32 arithmetic."""
    assert out.shape == exact.shape
    unit = exact.abs().clamp(min=torch.finfo(out.dtype).tiny) * torch.finfo(out.dtype).eps
    slack = 8 if out.dtype == FP32 else 0.51
    floor = 1e-6 * exact.abs().max()  # where terms cancel
    assert ((out.double() - exact).abs() <= slack * unit + floor).all()


def exact_norm(x, weight, eps, offset):
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (offset + weight.double())


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", WIDTHS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_sum_and_norm(kernels, dtype, rows, width, offset):
    x, y, weight = (randn(*s, dtype=dtype) for s in ((rows, width), (rows, width), (width,)))
    total, out = kernels.add_rms_norm(x, y, weight, 1e-5, offset)
    assert torch.equal(total, x + y)
    assert_rounded_once(out, exact_norm(x + y, weight, 1e-5, offset))
    same, plain = kernels.add_rms_norm(x, None, weight, 1e-5, offset)
    assert same is x
    assert_rounded_once(plain, exact_norm(x, weight, 1e-5, offset))


@interpreted_or_gpu
def test_norms_of_strided_rows(kernels):
    wide = randn(3, 5, 80)
    x, weight = wide[..., :40], randn(40)
    _, out = kernels.add_rms_norm(x, wide[..., 40:], weight, 1e-6, 0.0)
    assert_rounded_once(out, exact_norm(x + wide[..., 40:], weight, 1e-6, 0.0))
    assert kernels.add_rms_norm(x[:0], None, weight, 1e-6, 0.0)[1].shape == (0, 5, 40)


@interpreted_or_gpu
def test_rows_of_huge_and_of_zero_elements_stay_finite(kernels):
    x = torch.stack([torch.full((63,), 3e4), torch.zeros(63)]).to(DEVICE, FP16)
    _, out = kernels.add_rms_norm(x, None, torch.ones(63, dtype=FP16, device=DEVICE), 1e-6, 0.0)
    assert out.tolist() == [[1.0] * 63, [0.0] * 63]


def step(sizes, dtype, tokens=5):
    """(qkv, turn, weights, pages, slots): some tokens have no slot in the pages."""
    num_heads, num_kv_heads, head_dim, turned, page_size = sizes
    qkv = randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim + 8, dtype=dtype)[:, :-8]
    turn = None
    if turned:
        positions = torch.randint(0, 5000, (tokens,), device=DEVICE)
        turn = cos_sin(Rotary(1e4, turned), positions)
    weights = randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype)
    pool = randn(2, 12, page_size, num_kv_heads, head_dim, dtype=dtype)
    slots = torch.randperm(9 * page_size)[:tokens].int()
    slots[0] = -1
    slots[2] = 9 * page_size  # the page after the last of these
    return qkv, turn, weights, pool, slots.to(DEVICE)


def expected_place(qkv, turn, weights, heads, head_dim, offset):
    """q, k and v by the definitions of the decoder."""
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split(heads, dim=-2)
    if weights is not None:
        q, k = (
            pointwise.rms_norm(x, w, 1e-6, offset) for x, w in zip((q, k), weights, strict=True)
        )
    if turn is not None:
        q, k = rotate(q, *turn), rotate(k, *turn)
    return q, k, v


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("offset", [None, 1.0], ids=["no norm", "norm"])
def test_heads_are_placed_and_written(kernels, monkeypatch, dtype, sizes, offset):
    """Only the slots of the tokens change, in the pages and in the memory around them."""
    monkeypatch.setattr(pointwise, "fused", lambda *tensors: None)  # the judge is torch
    num_heads, num_kv_heads, head_dim, _, page_size = sizes
    qkv, turn, weights, pool, slots = step(sizes, dtype)
    weights, before = weights if offset is not None else None, pool.clone()
    pages = pool[0, 1:10], pool[1, 1:10]
    q = kernels.place(qkv, num_heads, turn, weights, (1e-6, offset or 0.0), pages, slots)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    expected = expected_place(qkv, turn, weights, heads, head_dim, offset)
    written = before.clone()
    for kind in (0, 1):
        flat = written[kind, 1:10].view(9 * page_size, num_kv_heads, head_dim)
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < len(flat):
                flat[slot] = expected[kind + 1][token]
    assert torch.equal(pool[1], written[1])
    for ours, theirs in ((q, expected[0]), (pool[0], written[0])):
        # sums of squares in another order: now and then the last bit before a rotation differs
        close = 1e-5 if dtype == FP32 else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=close, atol=close * 4)
        assert dtype == FP32 or (ours != theirs).float().mean() < 0.02


@interpreted_or_gpu
@pytest.mark.parametrize("form, dtype", [(FORMS[0], BF16), (FORMS[1], FP32)], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_pages_of_8_bits_get_the_same_heads_quantised(kernels, dtype, sizes, form):
    num_heads, num_kv_heads, _, _, page_size = sizes
    qkv, turn, weights, pool, slots = step(sizes, dtype)
    if dtype == FP32:  # sums of squares in another order would show in the last bit
        weights = None
    rest = num_heads, turn, weights, (1e-6, 1.0)
    q = kernels.place(qkv, *rest, (pool[0, :9], pool[1, :9]), slots)
    values = torch.zeros(pool.shape, dtype=form, device=DEVICE)
    scales = randn(2, 12, num_kv_heads, page_size).transpose(2, 3)
    before = scales.clone()
    kv8 = values[0, :9], values[1, :9], scales[0, :9], scales[1, :9]
    assert torch.equal(kernels.place(qkv, *rest, kv8, slots), q)
    written = torch.zeros(12 * page_size, dtype=torch.bool)
    written[slots[(slots >= 0) & (slots < 9 * page_size)].long().cpu()] = True
    written = written.view(12, page_size).to(DEVICE)
    want, want_scales = quantise(pool[:, written], form)
    assert torch.equal(values[:, written].float(), want.float())
    assert torch.equal(scales[:, written], want_scales)
    assert torch.equal(scales[:, ~written], before[:, ~written])
    assert not values.float()[:, ~written].any()


@interpreted_or_gpu
@pytest.mark.parametrize("sizes", SIZES[1:4], ids=str)
def test_keys_and_values_alone_are_written_alike(kernels, sizes):
    """Without queries, which another launch treats (prefill_8bit.py)."""
    qkv, turn, weights, pool, slots = step(sizes, BF16)
    alone, rest = pool.clone(), (sizes[0], turn, weights, (1e-6, 1.0))
    kernels.place(qkv, *rest, (pool[0], pool[1]), slots)
    assert kernels.place(qkv, *rest, (alone[0], alone[1]), slots, queries=False) is None
    assert torch.equal(alone, pool)


@interpreted_or_gpu
def test_qkv_that_does_not_fit_is_refused(kernels):
    qkv, turn, _, pool, slots = step((4, 2, 64, 64, 16), BF16)
    short, whole = (pointwise.Projections(t, 4, turn, None) for t in (qkv[:, 1:], qkv))
    with pytest.raises(ValueError, match="does not fit pages"):
        pointwise.place(short, (pool[0], pool[1]), slots)
    with pytest.raises(ValueError, match="does not fit pages"):
        pointwise.place(whole, (pool[0], pool[1]), slots[1:])
    with pytest.raises(ValueError, match="does not fit pages"):
        pointwise.place_keys(whole.cut(slice(2, None)), (pool[0], pool[1]), slots)
    with pytest.raises(ValueError, match="pages are torch.float16"):
        pointwise.place(whole, (pool[0].half(), pool[1].half()), slots)


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 126), (2, 6144)], ids=str)
def test_gates(kernels, dtype, name, shape):
    x = randn(*shape, dtype=dtype) * 3
    gate, up = x.double().chunk(2, -1)
    assert_rounded_once(kernels.gated_activation(x, name), pointwise.activate(gate, name) * up)


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("limit", "alpha"), [(7.0, 1.702), (1.5, 0.5)])
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 126), (2, 6144)], ids=str)
def test_clamped_swiglu(kernels, dtype, limit, alpha, shape):
    x = randn(*shape, dtype=dtype) * 3
    expected = pointwise.clamped_swiglu(x.double(), limit, alpha)
    assert_rounded_once(kernels.clamped_swiglu(x, limit, alpha), expected)


@interpreted_or_gpu
def test_clamped_swiglu_of_large_numbers(kernels):
    """Also where exp(-alpha gate) overflows; NaN of gate and of up stays NaN."""
    gate = torch.tensor([-3e38, -3e4, -90.0, 3e38, float("nan"), 1.0]).to(DEVICE)
    up = torch.tensor([1.0, -3e38, 3e38, 1.0, 1.0, float("nan")]).to(DEVICE)
    x = torch.cat([gate, up])
    out = kernels.clamped_swiglu(x, 7.0, 1.702)
    expected = pointwise.clamped_swiglu(x.double(), 7.0, 1.702).float()
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6, equal_nan=True)
    assert out[:4].isfinite().all() and out[4:].isnan().all()


@interpreted_or_gpu
def test_gates_of_large_numbers(kernels):
    """No overflow in between: finite results stay finite; NaN stays NaN."""
    gate = torch.tensor([-3e4, -90.0, 90.0, 3e4, float("nan")]).to(DEVICE)
    x = torch.cat([gate, torch.ones_like(gate)])
    for name in ("silu", "gelu", "gelu_tanh", "relu"):
        out = kernels.gated_activation(x, name)
        torch.testing.assert_close(out[:4], pointwise.activate(gate[:4], name), atol=1e-6, rtol=0)
        assert out[4].isnan()


def config_of(family):
    if family == "gpt2":
        return ModelConfig.from_hf({"model_type": "gpt2"} | GPT2)
    return ModelConfig.from_hf({"model_type": family} | BASE | (FAMILIES | MORE)[family])


def steps(model, page_size):
    """Hidden states of a prefill of 9 and 1 tokens, and of a decoding step."""
    cache = KVCache(model.cache_spec(page_size), 40)
    sequences = [cache.open(), cache.open()]
    states = []
    for chunks in ([[*range(9)], [5]], [[11], [12]]):
        cache.append_all(sequences, chunks)
        batch = cache.view(sequences)
        new = torch.tensor([*chunks[0], *chunks[1]], device=DEVICE)
        states.append(model(new, positions_of(batch), batch, cache))
        for sequence in sequences:
            cache.commit(sequence)
    return torch.cat(states)


@interpreted_or_gpu
@pytest.mark.parametrize(
    "family", [*FAMILIES, "qwen2_moe", "gpt_oss", *(() if INTERPRETED else ("qwen2", "gpt2"))]
)
@torch.no_grad()
def test_a_decoder_with_fused_kernels_equals_the_decoder(kernels, monkeypatch, family):
    model = random_model(config_of(family), seed=3, device=DEVICE)
    used = []
    choose = lambda module: lambda *tensors: used.append(module) or module
    states = []
    for module in (None, kernels):
        for room in (pointwise, decoder):
            monkeypatch.setattr(room, "fused", choose(module))
        states.append(steps(model, 4))
    assert kernels in used
    torch.testing.assert_close(*states, rtol=0, atol=2e-5)
