"""Every public function refuses nearly right arguments with a sentence that says what to write."""

import warnings

import numpy as np
import pytest
import torch

import onchip
import onchip.testing as ot
from onchip.core import call_cache, validation
from onchip.core.arguments import FOREIGN_NAMES

PACKED = ot.make_packed([3, 5], head_dim=8)
PAGES = ot.make_pages(PACKED.k, PACKED.v, PACKED.cu_seqlens_k, 4)
Q, K, V = ot.make_qkv(1, 4, head_dim=8)
LSE = onchip.attention(Q, K, V, return_lse=True)[1]
ONE = Q[:, :1].expand(2, 1, 2, 8).contiguous()
CALLS = {
    "attention": (Q, K, V),
    "varlen_attention": (*PACKED[:3], *PACKED.options.values()),
    "paged_attention": (ONE, *PAGES),
    "cascade_attention": (ONE, *PAGES),
    "offload_attention": (Q, (K, V)),
    "attention_weights": (Q, K, LSE, [0]),
    "merge_states": ([Q], [LSE]),
    "explain": (Q, K, V),
}
ATTEND = [name for name in CALLS if name != "merge_states"]


def call(name, **options):
    return getattr(onchip, name)(*CALLS[name], **options)


class TestNames:
    @pytest.mark.parametrize("function", CALLS)
    def test_names_of_other_packages_suggest_ours(self, function):
        call(function)
        for name, meant in FOREIGN_NAMES.items():
            with pytest.raises(TypeError) as error:
                call(function, **{name: None})
            assert f"{function}()" in str(error.value) and repr(name) in str(error.value)
            assert f"did you mean {meant}" in str(error.value)

    def test_a_mask_of_packed_sequences_suggests_documents(self):
        with pytest.raises(TypeError, match=r"did you mean attention\(.*mask=masks.document\("):
            call("varlen_attention", mask=onchip.masks.causal())
        with pytest.raises(ValueError, match=r"take attention\(.*mask=masks.document\("):
            onchip.explain(*PACKED[:3], **PACKED.options, mask=onchip.masks.causal())

    @pytest.mark.parametrize("function", ATTEND)
    def test_misspelt_names_suggest_the_nearest(self, function):
        with pytest.raises(TypeError, match="did you mean softmax_scale"):
            call(function, sofmax_scale=1.0)
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
            call(function, zzz=1.0)


FLAGS = "return_lse", "return_stats", "deterministic", "reproducible"


class TestFlags:
    @pytest.mark.parametrize("value", ["False", 0, 1, None, torch.tensor(True), np.bool_(True)])
    @pytest.mark.parametrize("function", ATTEND)
    def test_causal_is_true_or_false(self, function, value):
        call(function, causal=True)
        with pytest.raises(ValueError, match="causal="):
            call(function, causal=value)

    @pytest.mark.parametrize("name", FLAGS)
    @pytest.mark.parametrize("function", ["attention", "varlen_attention", "paged_attention"])
    def test_other_flags_are_true_or_false(self, function, name):
        with pytest.raises(ValueError, match=name):
            call(function, **{name: "no"})

    @pytest.mark.parametrize("function", ["cascade_attention", "offload_attention"])
    def test_return_lse_is_true_or_false(self, function):
        with pytest.raises(ValueError, match="return_lse"):
            call(function, return_lse=1)


class TestNumbers:
    @pytest.mark.parametrize("value", [3.0, "3", True, None, torch.tensor(5), [5], -1])
    def test_max_seqlens_are_ints(self, value):
        arguments = list(CALLS["varlen_attention"])
        for place in (-1, -2):
            changed = list(arguments)
            changed[place] = value
            with pytest.raises(ValueError, match="max_seqlen_"):
                onchip.varlen_attention(*changed)
        if value is not None:
            options = {"cu_seqlens_q": PACKED.cu_seqlens_q, "max_seqlen_q": value}
            with pytest.raises(ValueError, match="max_seqlen_q"):
                onchip.paged_attention(PACKED.q, *PAGES, **options)

    @pytest.mark.parametrize("value", [64.0, "64", True, torch.tensor(64), 0], ids=repr)
    def test_segment_bytes_is_an_int(self, value):
        with pytest.raises(ValueError, match="segment_bytes"):
            call("offload_attention", segment_bytes=value)

    def test_numpy_integers_are_ints(self):
        arguments = CALLS["varlen_attention"]
        got = onchip.varlen_attention(*arguments[:-2], np.int64(5), np.int32(5))
        assert torch.equal(got, onchip.varlen_attention(*arguments))
        weights = onchip.attention_weights(Q, K, LSE, np.array([0, 2]))
        assert torch.equal(weights, onchip.attention_weights(Q, K, LSE, torch.tensor([0, 2])))
        assert torch.equal(weights, onchip.attention_weights(Q, K, LSE, [np.int64(0), 2]))
        assert torch.equal(weights, onchip.attention_weights(Q, K, LSE, range(0, 4, 2)))
        assert onchip.attention_weights(Q, K, LSE, []).shape[2] == 0

    @pytest.mark.parametrize(
        "rows",
        [[0.7], [True], ["1"], "1", 1, 1.0, [[0]], [None], torch.tensor([0.7]), torch.tensor(1),
         torch.tensor([True]), np.array([0.7]), [torch.tensor(1)], [-1], [4], {"a": 1}],
        ids=repr,
    )  # fmt: skip
    def test_rows_are_ints(self, rows):
        with pytest.raises(ValueError, match="row"):
            onchip.attention_weights(Q, K, LSE, rows)

    @pytest.mark.parametrize("value", ["1", True, torch.tensor(1), 1.0, np.float32(1)], ids=repr)
    @pytest.mark.parametrize("function", ATTEND[:3])
    def test_windows_are_ints(self, function, value):
        with pytest.raises(ValueError, match="window_size"):
            call(function, window_size=(value, 0))

    @pytest.mark.parametrize("value", ["1", True, torch.tensor(1.0), None, float("nan")], ids=repr)
    def test_scalars_are_numbers(self, value):
        for name in ("softcap", "dropout_p") + (() if value is None else ("softmax_scale",)):
            with pytest.raises(ValueError, match=name):
                onchip.attention(Q, K, V, **{name: value})

    def test_numpy_floats_are_numbers(self):
        got = onchip.attention(Q, K, V, softmax_scale=np.float32(0.5))
        assert torch.equal(got, onchip.attention(Q, K, V, softmax_scale=0.5))


class TestLayout:
    @pytest.fixture(autouse=True)
    def unwarned(self, monkeypatch):
        monkeypatch.setattr(validation, "_layout_warned", False)
        call_cache.clear_call_cache()

    def test_heads_first_warns_once_with_the_transpose(self):
        q, k, v = (t.transpose(1, 2).contiguous() for t in ot.make_qkv(1, 200, num_heads=4))
        with pytest.warns(onchip.LayoutWarning, match=r"q\.transpose\(1, 2\)") as caught:
            onchip.attention(q, k, v)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            onchip.attention(q, k, v, causal=True)

    @pytest.mark.parametrize(
        ("seqlen_q", "seqlen_k", "heads"),
        [(200, 200, 4), (1, 1, 256), (4, 900, 256), (64, 64, 128), (300, 300, 129)],
    )
    def test_sequences_first_does_not_warn(self, seqlen_q, seqlen_k, heads):
        q, k, v = ot.make_qkv(1, seqlen_q, seqlen_k, num_heads=heads, head_dim=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            onchip.attention(q, k, v)

    def test_heads_first_with_other_lengths_is_refused_with_the_transpose(self):
        q, k, v = (t.transpose(1, 2) for t in ot.make_qkv(1, 200, 300, num_heads=4))
        with pytest.raises(ValueError, match=r"multiple of.*q\.transpose\(1, 2\)"):
            onchip.attention(q, k, v)
