"""Validation: an invalid call raises one sentence that names the mistake, without side effects."""

import ast
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import onchip
from onchip import masks
from onchip.core import problem, torch_op

PACKAGE = Path(onchip.__file__).parent


def qkv(dtype=torch.float32, batch=2, seqlen=8, heads=4, kv_heads=2, dim=16):
    make = lambda n: torch.randn(batch, seqlen, n, dim).to(dtype)
    return make(heads), make(kv_heads), make(kv_heads)


def refused(match, *args, error=ValueError, fn=None, **options):
    with pytest.raises(error, match=match) as caught:
        (fn or onchip.attention)(*args, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300, f"one sentence, not: {message}"


q, k, v = qkv()


@pytest.mark.parametrize(
    "match, bad",
    [
        ("q must be a torch.Tensor", ([1.0], k, v)),
        ("q must have rank 4", (q[0], k, v)),
        ("v must have rank 4", (q, k, v[None])),
        (r"k.dtype=torch.int64", (q, k.long(), v)),
        ("share a dtype", (q, k.half(), v)),
        ("share a device", (q, k.to("meta"), v)),
        ("k and v must agree", (q, k, v[:, 1:])),
        ("batch 1", (q[:1], k, v)),
        ("head_dim 8, k has head_dim 16", (q[..., :8], k, v)),
        ("num_heads=3 must be a positive multiple of num_kv_heads=2", (q[:, :, :3], k, v)),
        ("num_heads=0", (q[:, :, :0], k, v)),
        (
            "contiguous in its last dimension",
            (q, k.transpose(-1, -2).contiguous().transpose(-1, -2), v),
        ),
        ("head_dim=320", tuple(torch.randn(1, 2, 1, 320) for _ in range(3))),
        ("head_dim=0 and head_dim_v=16", (q[..., :0], k[..., :0], v)),
    ],
)
def test_invalid_tensors_are_refused(match, bad):
    refused(match, *bad)


@pytest.mark.parametrize(
    "match, options",
    [
        ("softmax_scale=nan", {"softmax_scale": float("nan")}),
        ("softmax_scale=inf", {"softmax_scale": float("inf")}),
        ("softmax_scale=", {"softmax_scale": "1"}),
        ("softcap=-1", {"softcap": -1.0}),
        ("softcap=nan", {"softcap": float("nan")}),
        (r"dropout_p=1.0 must be in \[0, 1\)", {"dropout_p": 1.0}),
        ("dropout_p=-0.1", {"dropout_p": -0.1}),
        ("dropout_p=nan", {"dropout_p": float("nan")}),
        ("window_size left=-1", {"window_size": (-1, 0)}),
        ("window_size right=1.5", {"window_size": (0, 1.5)}),
        ("pair", {"window_size": 5}),
        ("out_dtype", {"out_dtype": torch.float16}),
        ("dropout_seed='x'", {"dropout_p": 0.5, "dropout_seed": "x"}),
        (
            "dropout_seed must be one int64",
            {"dropout_p": 0.5, "dropout_seed": torch.zeros(2).long()},
        ),
        ("dropout_seed=", {"dropout_p": 0.5, "dropout_seed": 2**70}),
        (r"alibi_slopes must have shape \(4,\) or \(2, 4\)", {"alibi_slopes": torch.ones(2)}),
        ("alibi_slopes.dtype", {"alibi_slopes": torch.ones(4).int()}),
        ("sinks must have shape", {"sinks": torch.ones(4, 1)}),
        ("sinks is on meta", {"sinks": torch.ones(4, device="meta")}),
        ("bias must be", {"bias": torch.zeros(8, 8)}),
        ("bias must be", {"bias": torch.zeros(1, 1, 8, 1)}),
        ("bias must be", {"bias": torch.zeros(3, 1, 8, 8)}),
        ("mask", {"mask": torch.zeros(8, 7, dtype=torch.bool)}),
        ("mask", {"mask": torch.zeros(8, 8)}),
        ("mask of shape", {"mask": masks.causal().build(1, 1, 8, 9)}),
        ("kernel='fast' is not one of", {"kernel": "fast"}),
    ],
)
def test_invalid_options_are_refused(match, options):
    refused(match, q, k, v, **options)


def test_unknown_options_are_not_ignored():
    with pytest.raises(TypeError, match="scale"):
        onchip.attention(q, k, v, scale=0.5)
    with pytest.raises(TypeError):
        onchip.explain(q, k, v, scale=0.5)


def test_a_named_kernel_never_falls_back():
    refused(
        "'aten_cpu' cannot serve",
        q,
        k,
        v,
        softcap=3.0,
        kernel="aten_cpu",
        error=onchip.UnsupportedError,
    )


class TestFieldTable:
    """Options and Tensors are the field table of a call. Problem and the torch op follow it."""

    def test_problem_has_the_options_in_their_order(self):
        first = problem.Problem._fields.index("dtype") + 1
        end = first + len(problem.Options._fields)
        assert problem.Problem._fields[first:end] == problem.Options._fields

    def test_the_op_takes_every_tensor_and_every_option(self):
        taken = {a.name for a in torch.ops.onchip.attention.default._schema.arguments}
        named = {*problem.Tensors._fields, *problem.Options._fields}
        assert named - taken == {"window_size", "sm_partition"}
        apart = {"seqlen_q", "seqlen_k", "window_left", "window_right", "kernel"}
        assert taken - named == apart

    def test_unflatten_inverts_flatten(self):
        x = problem.Tensors(*qkv(torch.bfloat16), sinks=torch.ones(4))
        options = problem.Options(
            out_dtype=torch.float32,
            softmax_scale=0.5,
            causal=True,
            window_size=(3, None),
            softcap=2.0,
            dropout_p=0.25,
            return_stats=True,
            deterministic=True,
            return_lse=True,
            precision="int8",
        )
        assert not {a for a, b in zip(options, problem.Options(), strict=True) if a == b} - {
            False,  # precise_delta: an argument of `attention` alone
            None,  # sm_partition: of eager calls alone
        }
        described = problem.describe(x, options)
        args = torch_op._flatten(described, x, "tiled")
        assert torch_op._unflatten(args) == (described, x, "tiled")

    def test_options_are_resolved(self):
        x = problem.Tensors(*qkv())
        found = problem.describe(x, problem.Options(softcap=30, window_size=[3, 0]))
        assert isinstance(found.softcap, float) and found.window_size == (3, 0)
        assert found.softmax_scale == 0.25 and found.out_dtype == torch.float32


class TestCachedCalls:
    """Equal calls are validated once. Any difference visible to validation makes another call."""

    def prepare(self, x, **options):
        x = problem.Tensors(*x)
        return problem.prepare(problem.describe, x, problem.Options(**options), ())

    def test_equal_calls_share_one(self):
        assert self.prepare(qkv()) is self.prepare(qkv())
        assert self.prepare(qkv()).problem == problem.describe(
            problem.Tensors(*qkv()), problem.Options()
        )

    @pytest.mark.parametrize(
        "other",
        [
            qkv(torch.float64),
            qkv(seqlen=9),
            (q, k, v.transpose(1, 2).contiguous().transpose(1, 2)),
            (q.clone().requires_grad_(), k, v),
            tuple(t.to("meta") for t in (q, k, v)),
        ],
        ids=["dtype", "length", "strides", "gradient", "device"],
    )
    def test_other_tensors_are_another_call(self, other):
        assert self.prepare((q, k, v)) is not self.prepare(other)

    @pytest.mark.parametrize(
        "match, good, bad",
        [
            ("softcap", {"softcap": 1.0}, {"softcap": True}),
            ("dropout_p", {"dropout_p": 0.0}, {"dropout_p": False}),
            ("left=True", {"window_size": (1, None)}, {"window_size": (True, None)}),
            ("left=1.0", {"window_size": (1, None)}, {"window_size": (1.0, None)}),
        ],
    )
    def test_equal_numbers_of_another_type_are_still_refused(self, match, good, bad):
        for _ in range(2):
            onchip.attention(q, k, v, **good)
        refused(match, q, k, v, **bad)

    def test_equal_lengths_of_another_type_are_still_refused(self):
        cu = torch.tensor([0, 1], dtype=torch.int32)
        x = (*(t[0, :1] for t in (q, k, v)), cu, cu)
        onchip.varlen_attention(*x, 1, 1)
        refused("max_seqlen_q", *x, True, 1, fn=onchip.varlen_attention)
        refused("max_seqlen_k", *x, 1, 1.0, fn=onchip.varlen_attention)

    def test_unhashable_options_are_not_cached(self):
        window = self.prepare((q, k, v), window_size=[3, 0])
        assert window.cache is None and window.problem.window_size == (3, 0)
        refused("softcap", q, k, v, softcap=[1.0])

    def test_a_mask_is_checked_every_time(self):
        mask = masks.build(masks.causal(), 2, 4, 8, 8)
        x = problem.Tensors(q, k, v, mask=mask)
        assert problem.prepare(problem.describe, x, problem.Options(), ()).cache is None

    def test_values_are_checked_every_time(self):
        x = [t[0] for t in (q, k, v)]
        cu, bad = (torch.tensor([0, n], dtype=torch.int32) for n in (8, 7))
        for _ in range(3):
            onchip.varlen_attention(*x, cu, cu, 8, 8)
        refused("run from 0 to total_q=8", *x, bad, cu, 8, 8, fn=onchip.varlen_attention)

    def test_the_cache_holds_no_tensor(self):
        x = qkv(seqlen=13)
        gone = [weakref.ref(t) for t in x]
        assert self.prepare(x).cache == {}
        del x
        gc.collect()
        assert not any(each() for each in gone)

    def test_the_oldest_is_evicted_first(self, monkeypatch):
        problem.clear_call_cache()
        monkeypatch.setattr(problem, "MAX_CACHED_CALLS", 3)
        first = self.prepare(qkv(seqlen=1))
        kept = [self.prepare(qkv(seqlen=n)) for n in (2, 3, 4)]
        assert [self.prepare(qkv(seqlen=n)) for n in (2, 3, 4)] == kept
        assert all(
            self.prepare(qkv(seqlen=n)) is each for n, each in zip((2, 3, 4), kept, strict=True)
        )
        assert self.prepare(qkv(seqlen=1)) is not first

    def test_threads_share_the_cache(self, monkeypatch):
        monkeypatch.setattr(problem, "MAX_CACHED_CALLS", 5)  # some are evicted all the time
        length = lambda n: self.prepare(qkv(seqlen=1 + n % 9)).problem.seqlen_q
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(length, range(900))) == [1 + n % 9 for n in range(900)]


def test_gradient_of_slopes_is_refused_not_dropped():
    slopes = torch.ones(4, requires_grad=True)
    refused("detach", q, k, v, alibi_slopes=slopes, error=onchip.UnsupportedError)


PACKED = tuple(t.flatten(0, 1) for t in qkv())
CU = torch.tensor([0, 5, 16], dtype=torch.int32)


@pytest.mark.parametrize(
    "match, cu",
    [
        ("int32", CU.long()),
        ("int32", CU[None]),
        ("int32", [0, 5, 16]),
        ("run from 0 to total_q=16, got 1", torch.tensor([1, 5, 16], dtype=torch.int32)),
        ("got 0 to 15", torch.tensor([0, 5, 15], dtype=torch.int32)),
        ("must not decrease, got 20 then 16", torch.tensor([0, 20, 16], dtype=torch.int32)),
        ("but a sequence has 12 tokens", torch.tensor([0, 4, 16], dtype=torch.int32)),
        ("same length", torch.tensor([0, 16], dtype=torch.int32)),
    ],
)
def test_invalid_cu_seqlens_are_refused(match, cu):
    refused(match, *PACKED, cu, CU, 11, 11, fn=onchip.varlen_attention)


def test_packed_calls_refuse_bias_and_invalid_lengths():
    with pytest.raises(TypeError):
        onchip.varlen_attention(*PACKED, CU, CU, 11, 11, bias=torch.zeros(1, 1, 16, 16))
    refused("max_seqlen_q", *PACKED, CU, CU, 11.0, 11, fn=onchip.varlen_attention)
    refused("max_seqlen_k", *PACKED, CU, CU, 11, -1, fn=onchip.varlen_attention)


def test_weights_check_rows_and_lse():
    lse = onchip.attention(q, k, v, return_lse=True)[1]
    refused(r"row 8 is not in \[0, seqlen_q=8\)", q, k, lse, [8], fn=onchip.attention_weights)
    refused("lse must have shape", q, k, lse[0], [0], fn=onchip.attention_weights)


def test_an_error_has_no_side_effect():
    """A refused call changes neither its inputs nor the random state."""
    before = [t.clone() for t in (q, k, v)]
    state = torch.get_rng_state()
    refused("softcap", q, k, v, softcap=-1.0, dropout_p=0.5)
    refused("bias", q, k, v, bias=torch.zeros(1), dropout_p=0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_checks_is_a_switch_and_a_context():
    from onchip.core.problem import checks

    with onchip.checks(True):
        assert checks.enabled
    assert not checks.enabled
    onchip.checks(True)
    assert checks.enabled
    onchip.checks(False)
    assert not checks.enabled


def test_the_package_uses_no_assert():
    """assert is removed under -O and has no message. Only testing.py may use it."""
    for path in PACKAGE.rglob("*.py"):
        if path.name == "testing.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path.relative_to(PACKAGE)}:{node.lineno}"


class TestCounts:
    """flops and bytes against a brute-force count."""

    @pytest.mark.parametrize("sq, sk", [(1, 1), (5, 9), (9, 5), (64, 64)])
    @pytest.mark.parametrize("window", [(None, None), (3, None), (None, 2), (2, 2), (0, 0)])
    @pytest.mark.parametrize("causal", [False, True])
    def test_visible_pairs(self, sq, sk, window, causal):
        i, j = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)
        left, right = window
        seen = torch.ones(sq, sk, dtype=torch.bool)
        seen &= (j <= i) if causal else True
        seen &= (j >= i - left) if left is not None else True
        seen &= (j <= i + right) if right is not None else True
        x = [torch.randn(2, n, 4, 16) for n in (sq, sk, sk)]
        explanation = onchip.explain(*x, causal=causal, window_size=window)
        assert explanation.problem.visible_pairs == int(seen.sum())
        assert explanation.flops == 2 * 4 * int(seen.sum()) * 4 * 16

    def test_bytes(self):
        explanation = onchip.explain(*qkv(torch.bfloat16))
        queries, keys = 2 * 8 * 4, 2 * 8 * 2
        assert explanation.min_bytes == 2 * 16 * (2 * queries + 2 * keys) + 4 * queries
        assert explanation.scores_bytes == 4 * 2 * 4 * 8 * 8

    def test_packed_sums_over_sequences(self):
        x = onchip.explain(
            *PACKED, cu_seqlens_q=CU, cu_seqlens_k=CU, max_seqlen_q=11, max_seqlen_k=11
        )
        assert x.flops == 4 * (5 * 5 + 11 * 11) * 4 * 16


def test_explain_names_every_kernel():
    text = str(onchip.explain(q, k, v, softcap=2.0))
    assert "served by   tiled" in text and "no softcap" in text and "reference" in text


class TestChecks:
    """The switch of value checks. Several threads may open and close contexts in any order."""

    @pytest.fixture(autouse=True)
    def restored(self, monkeypatch):
        monkeypatch.setattr(problem.checks, "_open", ())
        monkeypatch.setattr(problem.checks, "enabled", False)

    @pytest.mark.parametrize("first", [0, 1])
    def test_overlapping_contexts_restore_the_setting(self, first):
        one, two = problem.checks(True), problem.checks(True)
        contexts = [one.__enter__(), two.__enter__()]
        contexts[first].__exit__()
        assert problem.checks.enabled
        contexts[1 - first].__exit__()
        assert not problem.checks.enabled

    def test_contexts_of_threads(self):
        barrier = threading.Barrier(8)

        def work():
            barrier.wait()
            for _ in range(200):
                with problem.checks(True):
                    assert problem.checks.enabled

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work) for _ in range(8)]:
                done.result()
        assert not problem.checks.enabled

    def test_a_context_restores_the_switch_around_it(self):
        problem.checks(True)
        with problem.checks(False):
            assert not problem.checks.enabled
            with problem.checks(True):
                assert problem.checks.enabled
            assert not problem.checks.enabled
        assert problem.checks.enabled
        for _ in range(500):
            problem.checks(False)
        assert not problem.checks.enabled and len(problem.checks._open) <= problem.MAX_SWITCHES

    def test_the_switch_takes_a_bool(self):
        with pytest.raises(ValueError, match="enabled='False'"):
            problem.checks("False")
