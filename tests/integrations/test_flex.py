"""FlexAttention's masks and calls give the results of torch's eager flex_attention."""

import pytest
import torch
import torch.nn.attention.flex_attention as flex

import onchip
from onchip import testing as ot
from onchip.integrations.flex import flex_attention, from_block_mask
from tests.integrations import flex_programs


def causal(b, h, q, k):
    return q >= k


def documents(b, h, q, k):
    return (q // (70 + 40 * b)) == (k // (70 + 40 * b))


def some_rows_see_nothing(b, h, q, k):
    return (q - k > 3 * h) & (q - k < 90) & (q % 50 != 7)


CASES = {  # mask_mod, (B, H) of create_block_mask, BLOCK_SIZE
    "causal": (causal, (None, None), 128),
    "documents": (flex.and_masks(causal, documents), (2, None), 64),
    "heads": (some_rows_see_nothing, (None, 4), (64, 128)),
    "heads that the block mask does not know": (some_rows_see_nothing, (None, None), 128),
}


@pytest.fixture
def torchs(monkeypatch):
    """torch's own function. Its validation refuses gradients on the CPU, because its compiled
    kernels have none there; run eagerly it has them.
    """
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    return flex.flex_attention


def inputs(seqlen_q=150, seqlen_k=200, kv_heads=4, dtype=torch.float64):
    made = ot.make_qkv(2, seqlen_q, seqlen_k, num_heads=4, num_kv_heads=kv_heads, dtype=dtype)
    return [x.transpose(1, 2).contiguous().requires_grad_() for x in made]


def made(case, seqlen_q=150, seqlen_k=200):
    fn, planes, block = CASES[case]
    return flex.create_block_mask(fn, *planes, seqlen_q, seqlen_k, device="cpu", BLOCK_SIZE=block)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_a_block_mask_forward_and_backward(torchs, case):
    x, block_mask = inputs(), made(case)
    dout = torch.randn(2, 4, 150, 64, dtype=torch.float64)
    want, want_lse = torchs(*x, block_mask=block_mask, return_lse=True)
    want = [want, want_lse, *torch.autograd.grad(want, x, dout)]
    mask = from_block_mask(block_mask, 2, 4)
    for given in (block_mask, mask):
        out, lse = flex_attention(*x, block_mask=given, return_lse=True)
        got = [out, lse, *torch.autograd.grad(out, x, dout)]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_without_a_mask_with_a_scale_and_grouped_heads(torchs):
    x = inputs(kv_heads=2)
    want = torchs(*x, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(flex_attention(*x, None, None, 0.3, True), want)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)])
def test_any_strides(which):
    """A last dimension that is not contiguous, as in Florence-2."""
    x = inputs(33, 45)
    want = flex_attention(*x)
    want = [want, *torch.autograd.grad(want.square().sum(), x)]
    layouts = {
        "transposed": lambda t: t.detach().mT.contiguous().mT,
        "every other": lambda t: t.detach().repeat_interleave(2, -1)[..., ::2],
    }
    for lay in layouts.values():
        y = [lay(t).requires_grad_() if i in which else t for i, t in enumerate(x)]
        assert any(t.stride(-1) != 1 for t in y)
        out = flex_attention(*y)
        for a, b in zip([out, *torch.autograd.grad(out.square().sum(), y)], want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_onchip_masks_are_accepted():
    x = inputs(130, 130)
    mask = onchip.masks.causal() & onchip.masks.window(20, 0)
    out = flex_attention(*x, block_mask=mask)
    want = onchip.attention(*(t.transpose(1, 2) for t in x), mask=mask).transpose(1, 2)
    assert torch.equal(out, want)


def test_requested_aux_results_are_returned():
    x = [t.detach() for t in inputs()]
    ask = lambda **what: flex_attention(
        *x, block_mask=made("heads"), return_aux=flex.AuxRequest(**what)
    )
    exact = ot.oracle(
        *(t.transpose(1, 2) for t in x), mask=from_block_mask(made("heads"), 2, 4).to_dense()
    )
    out, aux = ask(lse=True, max_scores=True)
    assert isinstance(aux, flex.AuxOutput)
    torch.testing.assert_close(out, exact.out.transpose(1, 2))
    torch.testing.assert_close(aux.lse, exact.lse)
    torch.testing.assert_close(aux.max_scores, exact.max_logit)
    assert (exact.lse == -torch.inf).any()
    assert ask(lse=True)[1].max_scores is None and ask(max_scores=True)[1].lse is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"score_mod": lambda s, b, h, q, k: s.item()}, "score_mod turns a value"),
        ({"kernel_options": {"BLOCK_M": 64}}, "kernel_options="),
        ({"return_lse": True, "return_aux": flex.AuxRequest(lse=True)}, "give one"),
        ({"block_mask": made("causal", 100, 200)}, "does not fit"),
    ],
)
def test_unsupported_arguments_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        flex_attention(*inputs(), **options)


def test_grouped_heads_need_enable_gqa():
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex_attention(*inputs(kv_heads=2))
    with pytest.raises(TypeError, match="causal.* takes 4"):
        flex_attention(*inputs(), score_mod=causal)


PROGRAMS = {
    f"{group.title}: {program.name}": (group, program)
    for group in flex_programs.GROUPS
    for program in group.programs
}


def gradients(function, learned, **options):
    """out and the gradients of q, k, v and of the learned tensors of a program."""
    x = [t.requires_grad_() for t in flex_programs.qkv()]
    out = function(*x, **options)
    dout = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad(out, [*x, *learned], dout)]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_served_as_by_torch_or_refused_by_name(torchs, monkeypatch, name):
    group, program = PROGRAMS[name]
    sentence = flex_programs.refusal(group, program)
    if sentence is not None:
        assert sentence.startswith("score_mod ")
        return
    function, learned = program.make()
    # torch finds tensors that learn by Dynamo, which takes a second.
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", not learned)
    want = gradients(torchs, learned, **_for_torch(group, function))
    got = gradients(flex_attention, learned, **{group.argument: function})
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # torch computes tables in fp32


def _for_torch(group, function):
    """torch takes a mask as a BlockMask."""
    if group.argument == "score_mod":
        return {"score_mod": function}
    n, planes = flex_programs.TOKENS, (flex_programs.BATCH, flex_programs.HEADS)
    return {"block_mask": flex.create_block_mask(function, *planes, n, n, device="cpu")}


def test_the_table_of_programs_is_up_to_date():
    """If this fails, run `python tests/integrations/flex_programs.py`."""
    page = flex_programs.PAGE.read_text(encoding="utf-8")
    assert flex_programs.rewrite(page) == page


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_score_mod_with_a_block_mask_a_scale_and_grouped_heads(torchs, case, is_traced):
    """The score is scaled, then modified, then masked; lse is of the result."""
    x, block_mask = inputs(kv_heads=2), made(case)
    table = torch.randn(4, 350, dtype=torch.float64, requires_grad=True)
    modify = lambda s, b, h, q, k: torch.tanh(s) * 3 + table[h, q - k + 200] * b
    options = {"block_mask": block_mask, "scale": 0.3, "enable_gqa": True, "return_lse": True}
    results = []
    for fn, f in (
        (flex_attention, onchip.score_mods.trace(modify) if is_traced else modify),
        (torchs, modify),
    ):
        out, lse = fn(*x, f, **options)
        weights = torch.linspace(0, 1, out.numel(), dtype=out.dtype).view(out.shape)
        total = (out * weights).sum() + lse.masked_fill(lse == -torch.inf, 0).square().sum()
        results.append([out, lse, *torch.autograd.grad(total, [*x, table])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_the_largest_score_is_that_after_score_mod():
    x = [t.detach() for t in inputs()]
    modify = lambda s, b, h, q, k: s.square() + h
    ask = flex.AuxRequest(max_scores=True)
    _, aux = flex_attention(*x, modify, return_aux=ask)
    q, k, _ = x
    want = (q @ k.mT / 8).square() + torch.arange(4.0).view(4, 1, 1)
    torch.testing.assert_close(aux.max_scores, want.amax(-1), check_dtype=False)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_the_gpu(case):
    fn, planes, block = CASES[case]
    given = flex.create_block_mask(fn, *planes, 150, 200, device="cuda", BLOCK_SIZE=block)
    flip = lambda *tensors: [t.transpose(1, 2) for t in tensors]

    def flexed(q, k, v, *, mask):
        return flex_attention(*flip(q, k, v), block_mask=given).transpose(1, 2)

    x = (t.detach().to("cuda", torch.bfloat16) for t in flip(*inputs()))
    ot.assert_accurate(flexed, *x, grad=True, mask=from_block_mask(given, 2, 4).to_dense())
