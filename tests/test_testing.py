"""Tests of onchip.testing: the oracle by hand, and the rule by kernels with deliberate faults."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

import onchip
import onchip.testing as ot

HALF = [torch.bfloat16, torch.float16]


class _Flash(torch.autograd.Function):
    """A flash kernel's arithmetic on (batch, heads, seqlen, dim): fp32 sums of 16-bit products.

    `fault` names its one deliberate error.
    """

    @staticmethod
    def forward(ctx, q, k, v, kept, causal, fault):
        def narrow(x: Tensor, name: str) -> Tensor:
            return x.to(q.dtype).float() if fault == name else x

        def product(a: Tensor, b: Tensor) -> Tensor:
            return _to_tf32(a) @ _to_tf32(b) if fault == "tf32" else a.float() @ b.float()

        seqlen_q, seqlen_k = q.shape[2], k.shape[2]
        scale = 1.0 if fault == "missing scale" else q.shape[-1] ** -0.5
        offset = 0 if fault == "top-left causal" else seqlen_k - seqlen_q
        rows = torch.arange(seqlen_q)[:, None] + offset
        m = torch.full((*q.shape[:3], 1), -math.inf)
        l, acc = torch.zeros_like(m), torch.zeros(*q.shape[:3], v.shape[-1])
        partials = []
        last = seqlen_k - (fault == "last key dropped")
        for n in range(0, last, 64):
            keys = torch.arange(n, min(n + 64, last))
            s = narrow(product(q, k[:, :, keys].mT) * scale, "16-bit scores")
            if causal:
                s = s.masked_fill(keys > rows, -math.inf)
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            pivot = m_new.masked_fill(m_new == -math.inf, 0.0)
            p, alpha = torch.exp(s - pivot), torch.exp(m - pivot)
            l = l * alpha + p.sum(-1, keepdim=True)
            p = p if kept is None else p * kept[..., keys]
            acc = narrow(acc * alpha + product(p.to(q.dtype), v[:, :, keys]), "16-bit accumulator")
            m = m_new
            if fault == "rounded partials" and n // 64 % 4 == 3:  # a split ends here
                partials.append((m, l, (acc / l).to(q.dtype).float()))
                m, l, acc = (
                    torch.full_like(m, -math.inf),
                    torch.zeros_like(l),
                    torch.zeros_like(acc),
                )
        if partials:
            partials.append((m, l, (acc / l.clamp(min=1e-30)).to(q.dtype).float()))
            m = torch.stack([x[0] for x in partials]).amax(0)
            weights = [x[1] * torch.exp(x[0] - m) for x in partials]
            l = sum(weights)
            acc = sum(w * x[2] for w, x in zip(weights, partials, strict=True))
        empty = l == 0
        out = (acc / l.masked_fill(empty, 1.0)).to(q.dtype)
        lse = torch.log(l) + m.masked_fill(empty, 0.0)
        visible = torch.arange(seqlen_k) <= (rows if causal else seqlen_k)
        ctx.save_for_backward(q, k, v, out, lse, visible.expand(seqlen_q, seqlen_k))
        ctx.fault = fault
        lse = lse / math.log(2.0) if fault == "base-2 lse" else lse
        return out, lse.squeeze(-1)

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, visible = ctx.saved_tensors
        dtype = q.dtype
        q, k, v, out, dout = (x.float() for x in (q, k, v, out, dout))
        scale = q.shape[-1] ** -0.5
        delta = (out * dout).sum(-1, keepdim=True)
        if ctx.fault != "dlse ignored":
            delta = delta - dlse[..., None]
        if ctx.fault == "delta missing":
            delta = torch.zeros_like(delta)
        dq, dk, dv = torch.zeros_like(q), [], []
        for n in range(0, k.shape[2], 64):
            keys = slice(n, n + 64)
            s = (q @ k[:, :, keys].mT * scale).masked_fill(~visible[:, keys], -math.inf)
            p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0))
            ds = (p * (dout @ v[:, :, keys].mT - delta)).to(dtype).float()
            dq = dq + ds @ k[:, :, keys] * scale
            dq = dq.to(dtype).float() if ctx.fault == "16-bit dq" else dq
            dk.append(ds.mT @ q * scale)
            dv.append(p.to(dtype).float().mT @ dout)
        return (
            dq.to(dtype),
            torch.cat(dk, 2).to(dtype),
            torch.cat(dv, 2).to(dtype),
            None,
            None,
            None,
        )


def flash(q, k, v, *, causal=False, dropout_p=0.0, dropout_seed=None, fault=None):
    kept = None
    if dropout_p:
        shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        kept = ot.philox_keep(dropout_seed, *shape, dropout_p) / (1 - dropout_p)
        kept = kept.roll(1, -1) if fault == "wrong lane" else kept
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = _Flash.apply(*heads_first, kept, causal, fault)
    return out.transpose(1, 2), lse


def _to_tf32(x: Tensor) -> Tensor:
    """fp32 with 10 bits of mantissa, as tensor cores read it (TF32)."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def faulty(fault: str | None):
    return lambda *args, **options: flash(*args, fault=fault, **options)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("distribution", ot.DISTRIBUTIONS)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 799), (63, 111), (111, 63), (256, 799)])
def test_a_correct_kernel_passes(dtype, distribution, lengths):
    q, k, v = ot.make_qkv(1, *lengths, dtype=dtype, distribution=distribution, seed=2)
    assert ot.assert_accurate(flash, q, k, v, causal=True, grad=True).ok


@pytest.mark.parametrize("seed", range(4))
def test_a_correct_kernel_scores_one_under_the_rounding_model(seed):
    q, k, v = ot.make_qkv(1, 256, dtype=torch.bfloat16, distribution="outlier", seed=seed)
    report = ot.assert_accurate(flash, q, k, v, grad=True)
    ratios = {x.tensor: x.measured for x in report if x.rule == "RMSE / rounding model"}
    assert ratios.keys() == {"out", "dq", "dk", "dv"}
    assert all(0.95 < ratio < 1.03 for ratio in ratios.values()), report


@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.float32])
def test_a_bias_of_16_bits_has_a_gradient_of_16_bits(bias_dtype):
    """The model rounds it as autograd does, and the ratio of a kernel that sums in fp32 is one."""
    q, k, v = ot.make_qkv(1, 257, 33, num_heads=3, head_dim=16, dtype=torch.float16)
    bias = torch.randn(1, 3, 257, 33).to(bias_dtype).requires_grad_()
    attend = partial(onchip.attention, return_lse=True, kernel="tiled")
    report = ot.assert_accurate(attend, q, k, v, grad=("bias",), bias=bias)
    (ratio,) = [x.measured for x in report if x.tensor == "dbias" and "model" in x.rule]
    assert ratio == pytest.approx(1, abs=0.05)


def test_a_result_in_place_of_a_function():
    q, k, v = ot.make_qkv(1, 63, dtype=torch.float16)
    assert ot.assert_accurate(flash(q, k, v), q, k, v).ok
    with pytest.raises(AssertionError, match="out has shape"):
        ot.assert_accurate(flash(q, k, v)[0][:, :62], q, k, v)


def test_torch_sdpa_passes_by_its_own_argument_names():
    def sdpa(query, key, value, *, causal):
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal)
        return out.transpose(1, 2)

    q, k, v = ot.make_qkv(2, 111)
    assert {x.tensor for x in ot.assert_accurate(sdpa, q, k, v, causal=True, grad=True)} == {
        *("out", "dq", "dk", "dv")
    }


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("fault", ["16-bit accumulator", "16-bit scores", "rounded partials"])
def test_rounding_where_fp32_belongs_fails_by_the_model_alone(fault, dtype):
    q, k, v = ot.make_qkv(1, 256, 1023, num_heads=4, dtype=dtype)
    with pytest.raises(AssertionError, match=r"out +RMSE / rounding model .*FAILS") as failure:
        ot.assert_accurate(flash(q, k, v, fault=fault)[0], q, k, v)
    failing = [line for line in str(failure.value).splitlines() if "FAILS" in line]
    assert len(failing) == 1, "the maximum error alone does not see it"


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize(
    "fault, options",
    [
        ("missing scale", {}),
        ("top-left causal", {"causal": True}),
        ("last key dropped", {}),
        ("wrong lane", {"dropout_p": 0.2, "dropout_seed": 7}),
        ("base-2 lse", {}),
    ],
)
@pytest.mark.parametrize("lengths", [(3, 5), (63, 111)])
def test_a_wrong_formula_fails_at_any_size(fault, options, dtype, lengths):
    q, k, v = ot.make_qkv(1, *lengths, dtype=dtype)
    assert ot.assert_accurate(flash, q, k, v, **options).ok
    with pytest.raises(AssertionError, match="FAILS"):
        ot.assert_accurate(faulty(fault), q, k, v, **options)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("fault", ["delta missing", "dlse ignored"])
def test_a_wrong_gradient_fails(fault, dtype):
    q, k, v = ot.make_qkv(1, 63, 111, dtype=dtype)
    with pytest.raises(AssertionError, match=r"dq .*FAILS"):
        ot.assert_accurate(faulty(fault), q, k, v, grad=True)


def test_a_16_bit_gradient_accumulator_fails():
    q, k, v = ot.make_qkv(1, 111, 1023, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=r"dq +RMSE / rounding model .*FAILS"):
        ot.assert_accurate(faulty("16-bit dq"), q, k, v, grad=True)


def test_tf32_products_fail_as_fp32():
    q, k, v = ot.make_qkv(1, 63, 111)
    with pytest.raises(AssertionError, match=r"out .*FAILS"):
        ot.assert_accurate(faulty("tf32"), q, k, v)


def test_nan_fails():
    q, k, v = ot.make_qkv(1, 3, dtype=torch.float16)
    with pytest.raises(AssertionError, match="nan"):
        ot.assert_accurate(lambda *args: flash(*args)[0] * math.nan, q, k, v)


def test_a_rounded_lse_fails():
    q, k, v = ot.make_qkv(1, 63, dtype=torch.bfloat16)
    out, lse = flash(q, k, v)
    with pytest.raises(AssertionError, match=r"lse .*FAILS"):
        ot.assert_accurate((out, lse.bfloat16().float()), q, k, v)


def test_a_misspelt_option_is_not_ignored():
    q, k, v = ot.make_qkv(1, 3)
    with pytest.raises(TypeError, match="casual"):
        ot.oracle(q, k, v, casual=True)


def test_compare_of_two_fused_results():
    q, k, v = ot.make_qkv(1, 63, 511, dtype=torch.bfloat16)
    exact, good = ot.oracle(q, k, v).out, flash(q, k, v)[0]
    assert ot.compare(good, good, exact) == 1.0
    with pytest.raises(AssertionError, match="is allowed"):
        ot.compare(flash(q, k, v, fault="16-bit accumulator")[0], good, exact)


def _by_hand(q, k, v, o: dict) -> tuple[list, list, list, list]:
    """One head by scalar arithmetic: q (n, d), k, v (m, d); `o` holds the options of this head."""
    out, lses, maxima, entropies = [], [], [], []
    for i, row in enumerate(q):
        diagonal = i + len(k) - len(q)
        logits = {}
        for j, key in enumerate(k):
            s = 0.3 * sum(a * b for a, b in zip(row, key, strict=True))
            s = 2.0 * math.tanh(s / 2.0) - o["slope"] * abs(diagonal - j) + o["bias"][i][j]
            if diagonal - 2 <= j <= diagonal and o["mask"][i][j]:
                logits[j] = s
        terms = [math.exp(s) for s in (*logits.values(), o["sink"])]
        p = [t / sum(terms) for t in terms]
        weights = {j: w * o["kept"][i][j] / 0.75 for j, w in zip(logits, p, strict=False)}
        out.append([sum(w * v[j][c] for j, w in weights.items()) for c in range(len(v[0]))])
        lses.append(math.log(sum(terms)))
        maxima.append(max(logits.values(), default=-math.inf))
        entropies.append(-sum(x * math.log(x) for x in p))
    return out, lses, maxima, entropies


def test_the_oracle_is_the_formula_of_the_contract():
    batch, heads, kv_heads, n, m = 2, 4, 2, 6, 5
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 3, "head_dim_v": 2}
    q, k, v = ot.make_qkv(batch, n, m, dtype=torch.float64, **shape)
    g = torch.Generator().manual_seed(1)
    tensors = {
        "mask": torch.rand(batch, heads, n, m, generator=g) < 0.8,
        "alibi_slopes": torch.rand(batch, heads, generator=g, dtype=torch.float64),
        "bias": torch.randn(batch, heads, n, m, generator=g, dtype=torch.float64),
        "sinks": torch.randn(heads, generator=g, dtype=torch.float64),
    }
    options = {"softmax_scale": 0.3, "softcap": 2.0, "causal": True, "window_size": (2, None)}
    got = ot.oracle(q, k, v, **tensors, **options, dropout_p=0.25, dropout_seed=11)
    kept = ot.philox_keep(11, batch, heads, n, m, 0.25)
    for b, h in itertools.product(range(batch), range(heads)):
        o = {"slope": tensors["alibi_slopes"][b, h].item(), "sink": tensors["sinks"][h].item()}
        o |= {"bias": tensors["bias"][b, h].tolist(), "mask": tensors["mask"][b, h].tolist()}
        o |= {"kept": kept[b, h].tolist()}
        kv = (x[b, :, h // 2].tolist() for x in (k, v))
        rows = _by_hand(q[b, :, h].tolist(), *kv, o)
        head = (got.out[b, :, h], got.lse[b, h], got.max_logit[b, h], got.entropy[b, h])
        for want, have in zip(rows, head, strict=True):
            torch.testing.assert_close(have, torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize("sink", [False, True])
def test_rows_without_visible_keys(sink):
    q, k, v = (x.requires_grad_() for x in ot.make_qkv(1, 5, 3, dtype=torch.float64))
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64) if sink else None
    got = ot.oracle(q, k, v, causal=True, sinks=sinks)
    assert (got.out[:, :2] == 0).all() and (got.max_logit[..., :2] == -math.inf).all()
    want = (
        sinks.view(1, 2, 1).expand(1, 2, 2) if sink else torch.full((1, 2, 2), -math.inf).double()
    )
    torch.testing.assert_close(got.lse[..., :2], want)
    assert (got.entropy[..., :2] == 0).all()
    grads = torch.autograd.grad([got.out, got.lse], [q, k, v], [got.out, torch.ones_like(got.lse)])
    assert all(x.isfinite().all() for x in grads) and (grads[0][:, :2] == 0).all()


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)])
def test_lengths_of_zero(lengths):
    q, k, v = ot.make_qkv(2, *lengths, dtype=torch.float64)
    got = ot.oracle(q, k, v)
    assert got.out.shape == q.shape and (got.out == 0).all()
    assert got.lse.shape == (2, 2, lengths[0]) and (got.lse == -math.inf).all()


def test_gradients_of_the_oracle():
    q, k, v = ot.make_qkv(1, 4, 3, head_dim=2, dtype=torch.float64)
    bias, sinks = torch.randn(1, 2, 1, 3).double(), torch.randn(2).double()

    def f(q, k, v, bias, sinks):
        drop = {"dropout_p": 0.3, "dropout_seed": 5}
        return ot.oracle(q, k, v, bias=bias, sinks=sinks, causal=True, softcap=1.5, **drop)[:2]

    inputs = [x.requires_grad_() for x in (q, k, v, bias, sinks)]
    assert torch.autograd.gradcheck(f, inputs)


def test_the_model_without_rounding_equals_the_oracle():
    def gradients(f):
        q, k, v = (
            x.requires_grad_() for x in ot.make_qkv(2, 7, 9, num_kv_heads=1, dtype=torch.float64)
        )
        sinks = torch.ones(2, dtype=torch.float64, requires_grad=True)
        options = {"softcap": 3.0, "causal": True, "dropout_p": 0.2, "dropout_seed": 3}
        out, lse = f(q, k, v, sinks=sinks, **options)[:2]
        loss = (out * torch.arange(out.numel()).view_as(out).sin()).sum() + lse.sum()
        return out, lse, *torch.autograd.grad(loss, [q, k, v, sinks])

    torch.testing.assert_close(gradients(ot.rounding_model), gradients(ot.oracle))


def test_packed_sequences_are_separate_calls():
    packed = ot.make_packed([3, 0, 5], [4, 2, 6], num_heads=2, dtype=torch.float64)
    q, k, v, cu_q, cu_k = packed
    assert packed.options["max_seqlen_q"] == 5 and packed.options["max_seqlen_k"] == 6
    slopes = torch.rand(3, 2, dtype=torch.float64)
    options = {"causal": True, "dropout_p": 0.5, "dropout_seed": 2}
    cu = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    got = ot.oracle(q, k, v, alibi_slopes=slopes, **cu, **options)
    assert got.out.shape == q.shape and got.lse.shape == (2, 8)
    kv = (
        x[None, 6:].expand(3, -1, -1, -1) for x in (k, v)
    )  # the last sequence as a third batch entry
    dense = ot.oracle(q[None, 3:].expand(3, -1, -1, -1), *kv, alibi_slopes=slopes, **options)
    torch.testing.assert_close(got.out[3:], dense.out[2])
    torch.testing.assert_close(got.lse[:, 3:], dense.lse[2])
    with pytest.raises(ValueError, match="bias is for dense calls"):
        ot.oracle(q, k, v, bias=torch.zeros(1, 1, 1, 4), **cu)


@pytest.mark.parametrize(
    "counter, key, words",
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    parse = lambda text: [int(word, 16) for word in text.split()]
    assert ot._philox4x32(parse(counter), parse(key)) == parse(words)
    as_tensors = [torch.tensor(word) for word in parse(counter)]
    assert [int(x) for x in ot._philox4x32(as_tensors, parse(key))] == parse(words)


def test_dropout_depends_on_positions_alone():
    seed = -0x123456789ABCDEF
    whole = ot.philox_keep(seed, 3, 2, 5, 11, 0.3)
    assert torch.equal(
        whole[2:, :, :4, :7], ot.philox_keep(torch.tensor(seed), 1, 2, 4, 7, 0.3, first=2)
    )
    word = ot._philox4x32([9 // 4, 3, 1, 2], (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))[9 % 4]
    assert whole[2, 1, 3, 9] == (word < round(0.7 * 2**32))


def test_dropout_keeps_the_expected_share():
    kept = ot.philox_keep(1, 2, 2, 200, 200, 0.3)
    assert abs(kept.double().mean().item() - 0.7) < 4 * math.sqrt(0.21 / kept.numel())
    assert ot.philox_keep(1, 1, 1, 9, 9, 0.0).all()


def test_distributions():
    def draw(distribution, **kwargs):
        return ot.make_qkv(1, 2048, num_heads=4, distribution=distribution, **kwargs)

    assert all(abs(x.std() - 1) < 0.01 for x in draw("normal"))
    for x in draw("outlier"):
        assert 0.0002 < (x.abs() > 6).float().mean() < 0.001
    q, k, v = draw("sink")
    weight = torch.exp(ot.oracle(q[:, :64], k, v).max_logit - ot.oracle(q[:, :64], k, v).lse)
    assert weight.median() > 0.3 and v[:, 0].abs().max() < 0.5
    _, k, _ = draw("biased")
    assert k.mean(1).abs().max() > 3
    with pytest.raises(ValueError, match="must be one of"):
        draw("gaussian")


def test_the_same_seed_gives_the_same_numbers():
    a, b, c = (ot.make_qkv(1, 9, seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_poisoned_neighbours_surround_every_side():
    x = torch.randn(2, 3, 4)
    y = ot.poison_neighbours(x, pad=2)
    assert torch.equal(x, y) and y.stride(-1) == 1
    around = torch.as_strided(y, (6, 7, 8), y.stride(), 0)
    assert around.isnan().sum() == 6 * 7 * 8 - x.numel()
