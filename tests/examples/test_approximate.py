"""examples/approximate.py: where theory says that an approximation is exact, it is."""

import json

import approximate
import pytest
import torch

import onchip
from onchip import masks


def inputs(seqlen=200, heads=2, head_dim=16, batch=2, factor=1.0):
    q, k, v = torch.randn(3, batch, seqlen, heads, head_dim, dtype=torch.float64)
    return factor * q, k, v


def dense(q, k, v, visible=None):
    """(batch, seqlen, heads, head_dim), by the formula."""
    s = torch.einsum("bnhd,bjhd->bhnj", q, k) * q.shape[-1] ** -0.5
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    return torch.einsum("bhnj,bjhd->bnhd", s.softmax(-1), v)


def below_diagonal(seqlen):
    return torch.ones(seqlen, seqlen).tril().bool()


def test_linformer_of_full_rank_is_exact_and_pools_runs():
    q, k, v = inputs()
    torch.testing.assert_close(approximate.linformer(q, k, v, rank=200), dense(q, k, v))
    pooled = [x.unflatten(1, (50, 4)).mean(2) for x in (k, v)]
    torch.testing.assert_close(approximate.linformer(q, k, v, rank=50), dense(q, *pooled))


@pytest.mark.parametrize("causal", [False, True])
def test_performer_converges_as_one_over_the_root_of_its_features(causal):
    q, k, v = inputs(head_dim=8)
    q, k = 0.4 * q, 0.4 * k  # the variance of a feature grows as exp(|q + k|²)
    want = dense(q, k, v, below_diagonal(200) if causal else None)
    error = {
        m: sum(
            approximate.relative_error(
                approximate.performer(q, k, v, m, causal=causal, seed=seed), want
            )
            for seed in range(4)
        )
        / 4
        for m in (64, 4096)
    }
    assert error[4096] < 0.06 and 5 < error[64] / error[4096] < 12  # √(4096 / 64) = 8


def test_features_are_orthogonal_in_blocks_and_of_unit_variance():
    w = approximate.orthogonal_features(8000, 16, torch.Generator().manual_seed(0))
    products = w[:16] @ w[:16].T
    assert (products - products.diag().diag()).abs().max() < 1e-12
    assert w.square().mean().item() == pytest.approx(1.0, abs=0.02)
    x = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64) / 6
    exponents = x @ w.T - x.square().sum(-1, keepdim=True) / 2
    kernel = exponents.exp().prod(0).mean().item()
    assert kernel == pytest.approx((x[0] * x[1]).sum().exp().item(), rel=0.02)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
def test_one_bucket_is_exact(rounds, causal):
    """Also in several rounds: a key that shares all of them counts once."""
    q, k, v = inputs()
    got = approximate.reformer(q, k, v, num_buckets=1, rounds=rounds, causal=causal)
    want = dense(q, k, v, below_diagonal(200) if causal else None)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_are_attention_over_keys_that_share_one(causal):
    q, k, v = inputs(factor=2.0)
    k = q + 0.3 * k  # so that every query shares a bucket with its own key
    generator = torch.Generator().manual_seed(7)
    rotations = torch.randn(3, 16, 4, generator=generator, dtype=torch.float64)
    h_q, h_k = (approximate.hash_vectors(x, rotations).transpose(2, 3) for x in (q, k))
    shared = (h_q[..., :, None] == h_k[..., None, :]).any(0)  # (batch, heads, seqlen, seqlen)
    if causal:
        shared &= below_diagonal(200)
    rows = shared.any(-1).transpose(1, 2)
    assert rows.double().mean() > 0.9 and shared.double().mean() < 0.6
    got = approximate.reformer(q, k, v, num_buckets=8, rounds=3, causal=causal, seed=7)
    torch.testing.assert_close(got[rows], dense(q, k, v, shared)[rows])
    assert not got[~rows].any()


def test_more_rounds_are_nearer_and_odd_buckets_are_refused():
    q, k, v = inputs(factor=3.0)
    errors = [
        approximate.relative_error(
            approximate.reformer(q, k, v, num_buckets=8, rounds=rounds), dense(q, k, v)
        )
        for rounds in (1, 8)
    ]
    assert errors[1] < 0.7 * errors[0]
    with pytest.raises(ValueError, match="one or even, not 3"):
        approximate.reformer(q, k, v, num_buckets=3)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("Longformer", masks.longformer(192, 128)),
        ("BigBird", masks.bigbird(1, 1, 1)),
        ("window", masks.window(256, 256)),
    ],
)
def test_patterns_are_exact_under_their_masks(name, mask):
    q, k, v = inputs(seqlen=1100, batch=1)
    visible = masks.build(mask, 1, 1, 1100, 1100).to_dense()
    got = approximate.methods(1100)[name](q, k, v)
    torch.testing.assert_close(got, dense(q, k, v, visible))
    assert visible.double().mean() < 0.62
    got = approximate.methods(1100, causal=True)[name](q, k, v)
    torch.testing.assert_close(got, dense(q, k, v, visible & below_diagonal(1100)))


@pytest.mark.parametrize("attend", [approximate.performer, approximate.reformer])
def test_later_keys_change_no_earlier_output(attend):
    q, k, v = inputs()
    options = {"causal": True} | (
        {"num_features": 64} if attend is approximate.performer else {"num_buckets": 4}
    )
    before = attend(q, k, v, **options)
    later = torch.randn_like(v)
    later[:, :120] = v[:, :120]
    torch.testing.assert_close(attend(q, k, later, **options)[:, :120], before[:, :120])
    assert not torch.equal(attend(q, k, later, **options), before)


@pytest.mark.parametrize("name", list(approximate.methods(512)))
def test_shapes_and_short_sequences(name):
    q, k, v = (x.float() for x in inputs(seqlen=130))
    out = approximate.methods(130)[name](q, k, v)
    assert out.shape == q.shape and out.dtype == torch.float32 and out.isfinite().all()
    if name in ("exact", "Linformer", "Reformer", "window"):  # everything is within the budget
        torch.testing.assert_close(out, onchip.attention(q, k, v))


def test_the_inputs_of_the_model_are_those_of_its_layers():
    calls = approximate.model_inputs(70)
    assert len(calls) == 7
    assert all(x.shape == (1, 70, 4, 64) for call in calls for x in call)
    assert not torch.equal(calls[0][0], calls[1][0])


def test_it_prints_writes_and_draws(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(approximate, "QUICK_LENGTHS", (256,))
    results, picture = tmp_path / "out.json", tmp_path / "out.svg"
    assert approximate.main(["--quick", "--json", str(results), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "error on the built-in model" in printed and "Performer" in printed
    rows = json.loads(results.read_text())
    found = {(row["method"], row["inputs"]) for row in rows}
    assert found == {
        (name, part)
        for part in ("random", "model")
        for name in approximate.methods(512, causal=part == "model")
    }
    assert all(row["error"] < 1e-6 for row in rows if row["method"] == "exact")
    assert "<svg" in picture.read_text() and "BigBird" in picture.read_text()
