"""F.scaled_dot_product_attention through onchip's operators: the same results, strides and
gradients as torch's own, also in graphs. Unsupported calls run torch's kernel and have a reason.
The switch can be undone completely.
"""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel

from onchip import UnsupportedError
from onchip.integrations import sdpa, sdpa_masks, sdpa_ops

MATH = "_scaled_dot_product_attention_math"
FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FORWARD}_backward"
LEAST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def _undone(monkeypatch):
    """Lets masked calls of any size run on onchip; restores torch's operators afterwards."""
    monkeypatch.setattr(sdpa_ops, "MIN_CELLS", 0)
    yield
    assert not sdpa.is_active()


def qkv(seqlen_q=33, seqlen_k=45, heads=4, kv_heads=2, dtype=torch.float32, contiguous=False):
    def draw(seqlen, heads):
        t = torch.randn(2, seqlen, heads, 16, dtype=dtype).transpose(1, 2)
        return (t.contiguous() if contiguous else t).requires_grad_()

    return draw(seqlen_q, heads), draw(seqlen_k, kv_heads), draw(seqlen_k, kv_heads)


def hidden(seqlen_q=33, seqlen_k=45):
    """Bool, with a query that sees no key."""
    visible = torch.rand(2, 1, seqlen_q, seqlen_k) > 0.3
    visible[0, 0, 3] = False
    return visible


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": hidden()},
    "bool2d": {"attn_mask": torch.rand(33, 45) > 0.3},
    "row": {"attn_mask": torch.rand(2, 1, 1, 45) > 0.3},
    "infinite": {"attn_mask": torch.zeros(2, 4, 33, 45).masked_fill(~hidden(), -torch.inf)},
    "least": {"attn_mask": torch.where(torch.rand(33, 45) > 0.3, 0.0, LEAST)},
    "scale": {"scale": 0.3},
}


def answer(x, **options):
    out = F.scaled_dot_product_attention(*x, enable_gqa=True, **options)
    return out.detach(), *torch.autograd.grad(out.square().sum(), x)


def same(ours, theirs, most=1e-5):
    for a, b in zip(ours, theirs, strict=True):
        assert a.stride() == b.stride() and a.dtype == b.dtype
        assert (a - b).abs().max() <= most * b.abs().max()


class TestResults:
    @pytest.mark.parametrize("contiguous", [False, True])
    @pytest.mark.parametrize("name", OPTIONS)
    def test_equal_torchs(self, name, contiguous):
        x, options = qkv(contiguous=contiguous), OPTIONS[name]
        theirs = answer(x, **options)
        with sdpa.active():
            ours = answer(x, **options)
            assert sdpa.counts() == ({FORWARD: 1, BACKWARD: 1}, {})
            assert sdpa.why(*x, enable_gqa=True, **options) is None
        same(ours, theirs)

    @pytest.mark.parametrize("lengths", [(45, 33), (33, 45), (1, 45), (45, 1), (17, 17)])
    def test_causal_counts_from_the_first_query_and_key(self, lengths):
        """Bottom-right, as in onchip, would differ. Compared with a mask of the rule, in fp64."""
        x = qkv(*lengths, dtype=torch.float64)
        rule = torch.ones(lengths, dtype=torch.bool).tril()
        with sdpa_kernel(SDPBackend.MATH):
            exact = answer(x, attn_mask=rule)
        with sdpa.active():
            ours = answer(x, is_causal=True)
            assert sdpa.counts().served[FORWARD] == 1
        for a, b in zip(ours, exact, strict=True):
            assert (a - b).abs().max() <= 1e-12 * max(1, b.abs().max())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_16_bit_gradients(self, dtype):
        """Gradients no worse than torch's own, which accumulates in 16 bit."""
        exact = qkv(dtype=torch.float64)
        x = [t.detach().to(dtype).requires_grad_() for t in exact]
        wanted = answer([t.detach().double().requires_grad_() for t in x], is_causal=True)
        theirs = answer(x, is_causal=True)
        with sdpa.active():
            ours = answer(x, is_causal=True)
        for a, b, best in zip(ours, theirs, wanted, strict=True):
            ulp = torch.finfo(dtype).eps * best.abs().max()
            assert (a - best).abs().max() <= (b - best).abs().max() + ulp

    def test_a_query_that_sees_nothing_is_zero(self):
        x = qkv()
        with sdpa.active():
            out, *grads = answer(x, attn_mask=hidden())
        assert not out[0, :, 3].any() and not any(g.isnan().any() for g in grads)

    def test_autocast_casts_as_before(self):
        x = qkv()
        with torch.autocast("cpu", torch.bfloat16), sdpa.active():
            out = F.scaled_dot_product_attention(*x, enable_gqa=True)
            assert sdpa.counts().served == {FORWARD: 1}
        assert out.dtype == torch.bfloat16

    def test_onchip_kernels_still_call_torch(self):
        """The aten_cpu kernel calls the operator that is overridden."""
        import onchip

        q, k, v = (t.transpose(1, 2).detach() for t in qkv())
        before = onchip.attention(q, k, v, causal=True, kernel="aten_cpu")
        with sdpa.active():
            again = onchip.attention(q, k, v, causal=True, kernel="aten_cpu")
        assert torch.equal(again, before)


def continuous_batching(device):
    """The calls of onchip, after checking that `generate_batch` gives the tokens of eager
    attention.
    """
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from tests.integrations import families
    from tests.models.foreign_models import greedy

    one = copy.deepcopy(families.model("mistral"))
    one.set_attn_implementation("eager")
    prompts = [torch.randint(3, 131, (n,)).tolist() for n in (5, 23, 11)]
    wanted = [greedy(one, prompt, 8) for prompt in prompts]
    settings = transformers.GenerationConfig(
        max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    cache = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64, use_cuda_graph=False)
    one.to(device).set_attn_implementation("sdpa")
    with sdpa.active():
        results = one.generate_batch(prompts, settings, cache)
        served, left = sdpa.counts()
    assert not left
    order = sorted(results, key=lambda name: int(name.split("_")[-1]))
    assert [tuple(results[name].generated_tokens) for name in order] == wanted
    return served


class TestModules:
    def test_multihead_attention(self):
        """Also in evaluation, where torch would bypass the operator."""
        one, x = nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 9, 32)
        with torch.no_grad():
            theirs, _ = one(x, x, x, need_weights=False)
            with sdpa.active():
                ours, _ = one(x, x, x, need_weights=False)
                assert sdpa.counts().served == {FORWARD: 1}
        torch.testing.assert_close(ours, theirs)

    def test_encoder_layers_train(self):
        one = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        x, hide = torch.randn(2, 9, 32), torch.arange(9) >= torch.tensor([[9], [5]])
        grads = []
        for switch in (False, True):
            one.zero_grad()
            if switch:
                sdpa.activate()
            one(x, src_key_padding_mask=hide).square().sum().backward()
            grads.append([weight.grad.clone() for weight in one.parameters()])
        assert sdpa.counts() == ({FORWARD: 1, BACKWARD: 1}, {})
        sdpa.restore()
        for ours, theirs in zip(grads[1], grads[0], strict=True):
            torch.testing.assert_close(ours, theirs)

    @pytest.mark.slow
    def test_continuous_batching_of_transformers(self):
        """It accepts no custom name; SDPA has a built-in one."""
        pytest.importorskip("transformers", minversion="5.22")  # before, it needs a GPU or psutil
        served = continuous_batching("cpu")
        assert served[FORWARD] >= 16


class TestGraphs:
    def test_compile_before_and_after_the_switch(self):
        """The graph has torch's operator, so it follows the switch without a new compilation."""
        x = qkv()
        attend = torch.compile(
            lambda *x: F.scaled_dot_product_attention(*x, enable_gqa=True, is_causal=True),
            backend="aot_eager",
            fullgraph=True,
        )
        run = lambda: (out := attend(*x), *torch.autograd.grad(out.square().sum(), x))
        theirs = run()
        with sdpa.active(), torch.compiler.set_stance("fail_on_recompile"):
            ours = run()
            assert sdpa.counts() == ({FORWARD: 1, BACKWARD: 1}, {})
        same([t.detach() for t in ours], [t.detach() for t in theirs])
        assert torch.equal(run()[0], theirs[0])

    def test_export(self):
        class Attend(nn.Module):
            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        x = [t.detach() for t in qkv(kv_heads=4)]
        with sdpa.active():
            program = torch.export.export(Attend(), tuple(x))
        theirs = program.module()(*x)
        torch.testing.assert_close(theirs, F.scaled_dot_product_attention(*x, is_causal=True))


class TestFallback:
    """Calls that stay with torch are correct, and have a reason."""

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"dropout_p": 0.5}, "dropout_p=0.5 on the CPU"),
            ({"attn_mask": torch.randn(33, 45, requires_grad=True)}, "requires a gradient"),
        ],
    )
    def test_calls_that_torch_sends_to_other_paths(self, change, reason):
        x = qkv()
        torch.manual_seed(1)
        theirs = answer(x, **change)
        with sdpa.active():
            assert reason in sdpa.why(*x, enable_gqa=True, **change)
            torch.manual_seed(1)
            ours = answer(x, **change)
            assert sdpa.counts() == ({}, {sdpa.why(*x, enable_gqa=True, **change): 1})
        same(ours, theirs, 0)

    @pytest.mark.parametrize("name", OPTIONS)
    def test_small_masked_calls(self, name, monkeypatch):
        """Building the mask would cost more than torch's whole call."""
        monkeypatch.undo()
        x, options = qkv(), OPTIONS[name]
        theirs = answer(x, **options)
        with sdpa.active():
            ours = answer(x, **options)
            served, left = sdpa.counts()
            reason = sdpa.why(*x, enable_gqa=True, **options)
        if "attn_mask" in options:
            assert not served and left == {reason: 2} and "small call" in reason
            same(ours, theirs, 0)
        else:
            assert not left and reason is None

    def test_refusals_are_counted(self):
        x = [torch.randn(1, 2, 9, 584) for _ in range(3)]
        theirs = F.scaled_dot_product_attention(*x)
        with sdpa.active():
            ours = F.scaled_dot_product_attention(*x)
            served, left = sdpa.counts()
            reason = sdpa.why(*x)
        assert torch.equal(ours, theirs)
        assert not served and left == {reason: 1} and "must be between 1 and 576" in reason

    @pytest.mark.parametrize("device, head_dim", [("cuda", 257), ("cuda", 512), ("cpu", 512)])
    def test_wide_heads_stay_with_torch_on_a_gpu(self, device, head_dim):
        with FakeTensorMode():
            x = [torch.empty(1, 2, 9, head_dim, device=device) for _ in range(3)]
        call = sdpa_ops.SdpaCall(*x)
        if device == "cpu":
            assert call.prepare()[0].problem.head_dim == head_dim
            return
        with pytest.raises(UnsupportedError, match="a head_dim above 256 on a GPU"):
            call.prepare()

    @pytest.mark.parametrize("kind", ["added", "hidden too", "least in a row"])
    def test_calls_that_torch_runs_faster(self, kind):
        x, mask = qkv(), torch.randn(2, 4, 33, 45)
        if kind == "hidden too":
            mask = mask.masked_fill(~hidden(), -torch.inf)
        if kind == "least in a row":  # an average over all keys
            mask = torch.where(hidden(), 0.0, LEAST)
        theirs = answer(x, attn_mask=mask)
        with sdpa.active():
            ours = answer(x, attn_mask=mask)
            reason = sdpa.why(*x, attn_mask=mask, enable_gqa=True)
            assert sdpa.counts() == ({}, {reason: 2}) and "torch's kernel is faster" in reason
        same(ours, theirs, 0)

    def test_an_explicit_backend(self):
        x = qkv()
        with sdpa.active(), sdpa_kernel(SDPBackend.MATH):
            assert "math path" in sdpa.why(*x, enable_gqa=True)
            answer(x)
            assert sdpa.counts() == ({}, {sdpa.why(*x, enable_gqa=True): 1})

    def test_second_derivatives_of_an_explicit_backend(self):
        """torch's math path has them: a program that selects it keeps them."""
        x = [t.detach().requires_grad_() for t in qkv()]

        def penalty():
            out = F.scaled_dot_product_attention(*x, enable_gqa=True)
            (g,) = torch.autograd.grad(out.square().sum(), x[0], create_graph=True)
            return torch.autograd.grad(g.square().sum(), x)

        with sdpa_kernel(SDPBackend.MATH):
            theirs = penalty()
            with sdpa.active():
                ours = penalty()
        assert all(map(torch.equal, ours, theirs))

    @pytest.mark.filterwarnings("ignore::UserWarning")
    @pytest.mark.parametrize(
        "transform",
        [
            lambda f, x: torch.vmap(f, randomness="different")(x[None]),
            lambda f, x: torch.func.jvp(f, (x,), (x,)),
            lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
            lambda f, x: torch.compile(f, backend="aot_eager", fullgraph=True)(x),
            lambda f, x: f(torch.nested.nested_tensor([x[0], x[1]])).unbind()[0],
        ],
    )
    def test_transforms_on_the_math_path(self, transform):
        """torch's own kernel runs under transforms; each is counted, a graph when it is traced."""
        x = torch.randn(2, 4, 9, 16)
        attend = lambda y: F.scaled_dot_product_attention(y, y, y, dropout_p=1e-9)
        theirs = transform(attend, x)
        torch.compiler.reset()  # a graph that was traced before contains the path
        with sdpa.active():
            ours = transform(attend, x)
            served, left = sdpa.counts()
        assert not served and len(left) == 1 and "math path" in str(left)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

    def test_errors_are_torchs(self):
        q, k, v = (t.detach() for t in qkv(9, 9))
        calls = [((q, k, v), {}), ((q[0], q[0], q[0, :3]), {})]
        calls += [((q[0], q[0], q[0]), {"attn_mask": torch.ones(9, 9).bool(), "is_causal": True})]
        for x, options in calls:
            with pytest.raises(RuntimeError) as theirs:
                F.scaled_dot_product_attention(*x, **options)
            with sdpa.active(), pytest.raises(RuntimeError) as ours:
                F.scaled_dot_product_attention(*x, **options)
            assert str(ours.value) == str(theirs.value)

    def test_nothing_is_active_on_import(self):
        assert "not active" in sdpa.why(*qkv())
        assert current_flash_attention_impl() is None


def elsewhere(name):
    """query, key, value and options of a call that no fused operator of torch takes."""
    q, k, v = (t.detach() for t in qkv(kv_heads=4, dtype=torch.float64))
    calls = {
        "width of v": ((q, k, v[..., :8]), {}),
        "width of v, masked": ((q, k, v[..., :8]), {"attn_mask": hidden()}),
        "width of v, grouped": ((q, k[:, :2], v[:, :2, :, :8]), {"enable_gqa": True}),
        "rank 2": ((q[0, 0], k[0, 0], v[0, 0]), {"attn_mask": hidden()[0, 0]}),
        "rank 3": ((q[0], k[0], v[0]), {"is_causal": True}),
        "rank 3, a mask of each": ((q[0], k[0], v[0]), {"attn_mask": torch.rand(4, 33, 45) > 0.3}),
        "rank 5": ((q[None], k[None], v[None]), {"attn_mask": hidden()[None], "scale": 0.3}),
        "transposed": (tuple(t.mT.contiguous().mT for t in (q, k, v)), {}),
        "every other": ((q, k.repeat_interleave(2, -1)[..., ::2], v), {"is_causal": True}),
    }
    x, options = calls[name]
    return tuple(t.requires_grad_() for t in x), options


ELSEWHERE = ["width of v", "width of v, masked", "width of v, grouped", "rank 2", "rank 3"]
ELSEWHERE += ["rank 3, a mask of each", "rank 5", "transposed", "every other"]


class TestMathPath:
    """Calls of torch's math path that onchip has a kernel for."""

    @pytest.mark.parametrize("name", ELSEWHERE)
    def test_runs_on_onchip(self, name):
        x, options = elsewhere(name)

        def run():
            out = F.scaled_dot_product_attention(*x, **options)
            return out.detach(), *torch.autograd.grad(out.square().sum(), x)

        theirs = run()
        with sdpa.active():
            ours = run()
            assert sdpa.counts() == ({MATH: 1}, {})
            assert sdpa.why(*x, **options) is None
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * max(1, b.abs().max()))
        assert ours[0].is_contiguous()

    def test_weights_are_not_computed(self):
        """They are the second result of the operator, which the function drops."""
        x = torch.randn(4, 9, 16)
        with sdpa.active():
            out, weights = torch.ops.aten._scaled_dot_product_attention_math(x, x, x)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(x, x, x))
        assert weights.shape == (4, 9, 9) and weights.isnan().all()

    def test_direct_calls_of_onchip_are_not_counted(self):
        import onchip

        x = torch.randn(2, 33, 4, 16, requires_grad=True)
        with sdpa.active():
            onchip.attention(x, x, x, mask=hidden(33, 33)).sum().backward()
            assert sdpa.counts() == ({}, {})


class TestCachedMasks:
    """A mask is built once for the layers of a model, and again when its values change."""

    @pytest.fixture
    def built(self, monkeypatch):
        """The masks that were built."""
        builds, build = [], sdpa_masks._build
        monkeypatch.setattr(sdpa_masks, "_build", lambda bias: builds.append(1) or build(bias))
        return builds

    @pytest.mark.parametrize("kind", ["bool", "number", "bool2d", "slice"])
    def test_is_built_once(self, kind, built):
        x, mask = qkv(), hidden()
        mask = {"number": torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)}.get(kind, mask)
        mask = mask[1, 0] if kind == "bool2d" else mask
        whole = torch.ones(2, 1, 33, 64, dtype=torch.bool)
        whole[..., :45] = hidden()
        for _ in range(3):
            given = whole[..., :45] if kind == "slice" else mask
            theirs = answer(x, attn_mask=given)
            with sdpa.active():
                same(answer(x, attn_mask=given), theirs)
                same(answer(x, attn_mask=given), theirs)
        assert len(built) == 3  # once while it is active, for forward and backward

    @pytest.mark.parametrize("inference", [False, True])
    @pytest.mark.parametrize("write", ["torch", "data", "numpy", "view"])
    def test_every_change_is_detected(self, write, inference, built):
        with torch.inference_mode(inference), sdpa.active():
            x, mask = [t.detach() for t in qkv()], hidden()
            array = mask.numpy()
            for column in range(3):
                if write == "torch":
                    mask[..., column] = False
                if write == "data":
                    mask.data[..., column] = False
                if write == "numpy":
                    array[..., column] = False
                if write == "view":
                    mask.view(-1, 45)[:, column].logical_and_(torch.tensor(False))
                attend = lambda: F.scaled_dot_product_attention(*x, attn_mask=mask, enable_gqa=True)
                with sdpa_kernel(SDPBackend.MATH):
                    theirs = attend()
                torch.testing.assert_close(attend(), theirs)
        assert len(built) == 3

    def test_cache_is_bounded_and_cleared_by_restore(self, monkeypatch):
        x = [t.detach() for t in qkv()]
        attend = lambda: F.scaled_dot_product_attention(*x, attn_mask=hidden(), enable_gqa=True)
        with sdpa.active():
            for _ in range(9):
                attend()
            assert len(sdpa_masks._cache) == 4
        assert not sdpa_masks._cache
        monkeypatch.setattr(sdpa_masks, "MAX_CACHED_BYTES", 100)
        with sdpa.active():
            attend()
            assert not sdpa_masks._cache


class TestSwitch:
    def test_is_undone_completely(self):
        x, options = qkv(), {"is_causal": True}
        flags = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
        before = answer(x, **options)
        for _ in range(3):
            sdpa.activate()
            assert sdpa.is_active() and not torch.backends.mha.get_fastpath_enabled()
            sdpa.restore()
            count = sdpa.counts()
            assert all(map(torch.equal, answer(x, **options), before))
            assert sdpa.counts() == count and not sdpa.is_active()
        assert flags == (
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        )

    def test_activating_twice_is_the_same_as_once(self):
        sdpa.activate()
        sdpa.activate()
        answer(qkv())
        assert sdpa.counts() == ({FORWARD: 1, BACKWARD: 1}, {})
        sdpa.restore()
        sdpa.restore()
        assert torch.backends.mha.get_fastpath_enabled()

    def test_torch_may_undo_it(self):
        sdpa.activate()
        nn.attention.restore_flash_attention_impl()
        assert not sdpa.is_active() and torch.backends.mha.get_fastpath_enabled()

    def test_the_earlier_implementation_is_restored(self):
        removed = []

        class Other:
            def remove(self):
                removed.append(1)

        nn.attention.register_flash_attention_impl("other", register_fn=Other)
        nn.attention.activate_flash_attention_impl("other")
        with sdpa.active():
            assert sdpa.is_active() and removed == [1]
        assert current_flash_attention_impl() == "other"
        nn.attention.restore_flash_attention_impl()

    def test_an_error_inside_undoes_it(self):
        with pytest.raises(ZeroDivisionError), sdpa.active():
            raise ZeroDivisionError

    def test_threads_do_not_disturb_each_other(self):
        x = [t.detach() for t in qkv()]
        expected = F.scaled_dot_product_attention(*x, enable_gqa=True)
        outs = []
        attend = lambda: outs.extend(
            F.scaled_dot_product_attention(*x, enable_gqa=True) for _ in range(20)
        )
        with sdpa.active():
            threads = [threading.Thread(target=attend) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sdpa.counts().served == {FORWARD: 80}
        assert all(torch.equal(out, expected) for out in outs)


class TestOperatorsOfGpus:
    """The GPU operators, run on the CPU: shapes and meanings of results that only they have."""

    @pytest.fixture(autouse=True)
    def _elsewhere(self, monkeypatch):
        """As on a GPU, where the values of a bias are not read."""
        monkeypatch.setattr(sdpa_ops, "is_readable", lambda bias: False)

    def reference(self, x, bias=None, rule=None):
        q, k, v = x
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        s = q @ k.mT * 0.25
        s = s if bias is None else s + bias
        s = s if rule is None else s.masked_fill(~rule, -torch.inf)
        return s.softmax(-1) @ v

    @pytest.mark.parametrize("contiguous", [False, True])
    def test_flash_attention(self, contiguous):
        x = qkv(17, 17, dtype=torch.float64, contiguous=contiguous)
        plain = [t.detach() for t in x]
        out, lse, cu_q, cu_k, max_q, max_k, state, unused, debug = sdpa_ops.flash_forward(
            *plain, 0.0, True
        )
        assert (cu_q, cu_k, max_q, max_k) == (None, None, 17, 17)
        assert state.dtype == unused.dtype == torch.uint64 and state.shape == (2,)
        assert lse.shape == (2, 4, 17) and not debug.numel()
        expected = self.reference(x, rule=torch.ones(17, 17, dtype=torch.bool).tril())
        torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-12)
        dout = torch.randn_like(out)
        saved = (dout, *plain, out, lse, None, None, 17, 17, 0.0, True, state, unused)
        grads, exact = sdpa_ops.flash_backward(*saved), torch.autograd.grad(expected, x, dout)
        for ours, best, t in zip(grads, exact, x, strict=True):
            torch.testing.assert_close(ours, best, rtol=0, atol=1e-12)
            assert ours.stride() == torch.empty_like(t).stride()

    def test_flash_attention_drops_the_same_in_its_gradient(self):
        """out is linear in v, so that <dv, v> must equal <dout, out>."""
        q, k, v = (t.detach() for t in qkv(17, 17, dtype=torch.float64))
        out, lse, *_, state, unused, _ = sdpa_ops.flash_forward(q, k, v, 0.4, True)
        other = sdpa_ops.flash_forward(q, k, v, 0.4, True)[0]
        assert not torch.equal(out, other)
        dout = torch.randn_like(out)
        saved = (dout, q, k, v, out, lse, None, None, 17, 17, 0.4, True, state, unused)
        _, _, dv = sdpa_ops.flash_backward(*saved)
        torch.testing.assert_close((dv * v).sum(), (dout * out).sum(), rtol=1e-12, atol=0)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("planes", [(2, 4), (1, 1)])
    def test_efficient_attention(self, planes, causal):
        """Its lse is padded to 32 rows, and a bias has a gradient in its own shape."""
        x = qkv(33, 45, dtype=torch.float64)
        bias = torch.randn(*planes, 33, 45, dtype=torch.float64, requires_grad=True)
        plain, added = [t.detach() for t in x], bias.detach().expand(2, 4, 33, 45)
        rule = torch.ones(33, 45, dtype=torch.bool).tril() if causal else None
        outputs = sdpa_ops.efficient_forward(*plain, added, True, 0.0, causal)
        out, lse, seed, offset = outputs
        assert lse.shape == (2, 4, 64) and seed.dtype == offset.dtype == torch.int64
        assert lse[..., 33:].isposinf().all()
        expected = self.reference(x, bias, rule)
        torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-12)
        dout = torch.randn_like(out)
        saved = (dout, *plain, added, out, lse, seed, offset, 0.0, [True] * 4, causal)
        *grads, dbias = sdpa_ops.efficient_backward(*saved)
        *exact, exact_bias = torch.autograd.grad(expected, (*x, bias), dout)
        for ours, best in zip(grads, exact, strict=True):
            torch.testing.assert_close(ours, best, rtol=0, atol=1e-12)
        assert dbias.shape == added.shape and dbias.stride() == (4 * 33 * 48, 33 * 48, 48, 1)
        torch.testing.assert_close(dbias.sum_to_size(bias.shape), exact_bias, rtol=0, atol=1e-12)

    def test_efficient_attention_returns_requested_gradients(self):
        plain = [t.detach() for t in qkv()]
        out, lse, *_ = sdpa_ops.efficient_forward(*plain, None, False)
        assert lse.shape == (2, 4, 0)
        out, lse, seed, offset = sdpa_ops.efficient_forward(*plain, None, True)
        wanted = [True, False, True, False]
        saved = (out, *plain, None, out, lse, seed, offset, 0.0, wanted)
        grads = sdpa_ops.efficient_backward(*saved)
        assert [g is not None for g in grads] == wanted


@pytest.mark.gpu
class TestGpu:
    REPLACED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]  # cuDNN is not
    CASES = {
        "flash": ({"is_causal": True}, torch.bfloat16, (512, 512)),
        "dropout": ({"dropout_p": 0.3}, torch.bfloat16, (512, 512)),
        "mask": ({"attn_mask": "bool"}, torch.bfloat16, (511, 700)),
        "bias": ({"attn_mask": "float"}, torch.float16, (511, 700)),
        "causal": ({"is_causal": True}, torch.bfloat16, (300, 700)),
        "fp32": ({"is_causal": True}, torch.float32, (512, 512)),
    }

    def draw(self, name):
        options, dtype, (m, n) = self.CASES[name]
        x = [torch.randn(2, 4, rows, 64, device="cuda").to(dtype) for rows in (m, n, n)]
        mask = options.get("attn_mask")
        if mask == "bool":
            options = {"attn_mask": torch.rand(2, 1, m, n, device="cuda") > 0.3}
        if mask == "float":
            options = {"attn_mask": torch.randn(2, 4, m, n, device="cuda", dtype=dtype)}
        return [t.requires_grad_() for t in x], options

    def run(self, x, options):
        out = F.scaled_dot_product_attention(*x, **options)
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), x)

    @pytest.mark.parametrize("name", ["flash", "mask", "bias", "causal", "fp32"])
    def test_results_are_as_accurate_as_torchs(self, name):
        x, options = self.draw(name)
        wide = {
            k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in options.items()
        }
        with sdpa_kernel(SDPBackend.MATH):
            exact = self.run([t.detach().double().requires_grad_() for t in x], wide)
        with sdpa_kernel(self.REPLACED):
            theirs = self.run(x, options)
        with sdpa.active():
            assert sdpa.why(*x, **options) is None
            ours = self.run(x, options)
            assert sum(sdpa.counts().served.values()) == 2 and not sdpa.counts().left
        rms = lambda e: e.square().mean().sqrt()
        for a, b, best in zip(ours, theirs, exact, strict=True):
            assert a.stride() == b.stride()
            assert rms(a.double() - best) <= 1.1 * rms(b.double() - best)

    @pytest.mark.parametrize("kind", ["rank 3", "transposed"])
    def test_the_math_path_runs_on_onchip(self, kind):
        (q, k, v), options = self.draw("fp32")
        x = (q[0], k[0], v[0]) if kind == "rank 3" else (q, k.mT.contiguous().mT, v)
        x = [t.detach().requires_grad_() for t in x]
        theirs = self.run(x, options)
        with sdpa.active():
            assert sdpa.why(*x, **options) is None
            ours = self.run(x, options)
            assert sdpa.counts() == ({MATH: 1}, {})
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * b.abs().max().item())

    def test_dropout_is_the_same_in_its_gradient(self):
        (q, k, v), options = self.draw("dropout")
        with sdpa.active():
            out = F.scaled_dot_product_attention(q, k, v, **options).float()
            dout = torch.randn_like(out)
            (dv,) = torch.autograd.grad(out, v, dout)
        gap = (dv.float() * v.float()).sum() - (dout * out).sum()
        assert gap.abs() <= 1e-2 * (dout * out).square().sum().sqrt()

    @pytest.mark.parametrize("name", ["flash", "mask"])
    def test_compiles(self, name):
        x, options = self.draw(name)
        attend = torch.compile(
            lambda *x: F.scaled_dot_product_attention(*x, **options), fullgraph=True
        )
        with sdpa.active():
            eager, out = F.scaled_dot_product_attention(*x, **options), attend(*x)
            out.float().square().sum().backward()
            assert not sdpa.counts().left
        assert torch.equal(out, eager)

    def test_continuous_batching_of_transformers(self):
        pytest.importorskip("transformers")
        assert continuous_batching("cuda")["_scaled_dot_product_efficient_attention"] >= 16
