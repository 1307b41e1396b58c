"""The record of a call: its field table, and what is derived from it."""

import pytest
import torch

import onchip
from onchip.core import torch_op
from onchip.core.problem import Options, Problem, Tensors
from onchip.core.validation import describe
from tests.core.calls import qkv


class TestFieldTable:
    """Options and Tensors are the field table of a call. Problem and the torch op follow it."""

    def test_problem_has_the_options_in_their_order(self):
        first = Problem._fields.index("dtype") + 1
        end = first + len(Options._fields)
        assert Problem._fields[first:end] == Options._fields

    def test_the_op_takes_every_tensor_and_every_option(self):
        taken = {a.name for a in torch.ops.onchip.attention.default._schema.arguments}
        named = {*Tensors._fields, *Options._fields}
        assert named - taken == {"window_size", "sm_partition"}
        apart = {"seqlen_q", "seqlen_k", "window_left", "window_right", "kernel"}
        assert taken - named == apart

    def test_unflatten_inverts_flatten(self):
        x = Tensors(*qkv(torch.bfloat16), sinks=torch.ones(4))
        options = Options(
            out_dtype=torch.float32,
            softmax_scale=0.5,
            causal=True,
            window_size=(3, None),
            softcap=2.0,
            dropout_p=0.25,
            return_stats=True,
            deterministic=True,
            reproducible=True,
            return_lse=True,
            precision="int8",
            captured_is_constant=True,
        )
        assert not {a for a, b in zip(options, Options(), strict=True) if a == b} - {
            False,  # precise_delta: an argument of `attention` alone
            None,  # sm_partition: of eager calls alone
        }
        described = describe(x, options)
        args = torch_op._flatten(described, x, "tiled")
        assert torch_op._unflatten(args) == (described, x, "tiled")

    def test_options_are_resolved(self):
        x = Tensors(*qkv())
        found = describe(x, Options(softcap=30, window_size=[3, 0]))
        assert isinstance(found.softcap, float) and found.window_size == (3, 0)
        assert found.softmax_scale == 0.25 and found.out_dtype == torch.float32


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
        packed = [t.flatten(0, 1) for t in qkv()]
        cu = torch.tensor([0, 5, 16], dtype=torch.int32)
        x = onchip.explain(
            *packed, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=11, max_seqlen_k=11
        )
        assert x.flops == 4 * (5 * 5 + 11 * 11) * 4 * 16
