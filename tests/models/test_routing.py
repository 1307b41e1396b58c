"""The router's choice, and the loss that balances the experts."""

import pytest
import torch
import torch.nn.functional as F

from onchip.models import Experts, ModelConfig, Routing, balance_loss, random_model, save
from onchip.models.routing import route
from tests.models.conftest import fields


def made(family, **change):
    return random_model(ModelConfig.from_hf(fields(family) | change), seed=3)


def test_the_router_takes_the_first_of_equal_experts():
    logits = torch.zeros(3, 40, dtype=torch.bfloat16)
    logits[:, 7] = 1
    routing = route(logits, Experts(40, 4, 1, is_normalised=False))
    assert routing.experts.tolist() == [[7, 0, 1, 2]] * 3
    exact = logits.double().softmax(-1)[:, [7, 0, 1, 2]]
    torch.testing.assert_close(routing.weights.double(), exact, rtol=1e-6, atol=0)
    normalised = route(logits, Experts(40, 4, 1)).weights
    torch.testing.assert_close(normalised.double(), exact / exact.sum(-1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_is_that_of_transformers(dtype):
    """Without equal numbers, topk has one answer."""
    logits = torch.stack([torch.randperm(128) for _ in range(63)]).div(16).to(dtype)
    routing = route(logits, Experts(128, 8, 1, is_normalised=False))
    weights, chosen = torch.topk(logits.float().softmax(-1), 8)
    assert torch.equal(routing.weights, weights) and torch.equal(routing.experts, chosen)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_the_loss_and_its_gradients_are_those_of_transformers(family, masked, tmp_path):
    transformers = pytest.importorskip("transformers")
    decoder = made(family)
    save(decoder, tmp_path)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    text = torch.arange(38).mul(29).remainder(130).view(2, 19)
    mask = torch.ones(2, 19, dtype=torch.bool)
    if masked:  # at the end, so that no token that counts sees another one
        mask[1, 12:] = False
    with decoder.record_routing() as routings:
        decoder.full(text)
    ours = balance_loss(routings, mask if masked else None)
    theirs = other(text, attention_mask=mask, output_router_logits=True).aux_loss
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    ours.backward()
    theirs.backward()
    expected = other.get_input_embeddings().weight.grad
    bound = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(decoder.embed.grad, expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"]
)
def test_a_step_along_the_gradient_balances_experts(family):
    """Of routers alone: after some steps the busiest expert has fewer tokens."""
    decoder = made(family)
    text = torch.arange(400).mul(29).remainder(130).view(4, 100)
    routers = [mlp.router.weight for mlp in decoder._sparse()]
    optimizer = torch.optim.SGD(routers, lr=3.0)
    losses, busiest = [], []
    for _ in range(30):
        with decoder.record_routing() as routings:
            decoder.full(text)
        assert len(routings) == len(routers)
        loss = balance_loss(routings)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        busiest.append(torch.cat([r.experts for r in routings]).flatten().bincount().max().item())
    assert losses[-1] < losses[0] and busiest[-1] < busiest[0]


def test_an_even_load_gives_the_number_of_experts_of_a_token():
    """And the most uneven one, the number of experts."""
    each = torch.arange(6)
    even = Routing(torch.stack([each, (each + 1) % 6], 1), torch.ones(6, 2), torch.ones(6, 6))
    assert balance_loss([even, even]).item() == pytest.approx(2)
    full = F.one_hot(torch.zeros(5, dtype=torch.int64), 6).float()
    assert balance_loss([Routing(torch.zeros(5, 1).long(), full[:, :1], full)]).item() == 6


def test_masked_tokens_count_nowhere():
    torch.manual_seed(0)
    mask = torch.rand(3, 20) < 0.6
    logits = torch.randn(60, 8, dtype=torch.float64)
    for_all, few = (route(x, Experts(8, 2, 1)) for x in (logits, logits[mask.flatten()]))
    torch.testing.assert_close(balance_loss([for_all], mask), balance_loss([few]))


def test_routings_are_recorded_in_their_context_alone():
    decoder, text = made("mixtral"), torch.arange(7)[None]
    with decoder.record_routing() as outer:
        decoder.full(text)
        with pytest.raises(ZeroDivisionError), decoder.record_routing() as inner:
            decoder.full(text)
            raise ZeroDivisionError
        decoder.full(text)
    decoder.full(text)
    count = len(list(decoder._sparse()))
    assert (len(outer), len(inner)) == (2 * count, count)
    assert all(mlp.record is None for mlp in decoder._sparse())


@pytest.mark.slow
def test_a_compiled_decoder_is_recorded():
    decoder, text = made("mixtral"), torch.arange(12)[None]
    with decoder.record_routing() as expected:
        decoder.full(text)
    run = torch.compile(decoder.full, backend="eager")
    for _ in range(2):
        with decoder.record_routing() as routings:
            run(text)
        assert all(
            torch.equal(a.experts, b.experts) for a, b in zip(routings, expected, strict=True)
        )


def test_what_cannot_be_balanced_is_refused():
    with (
        made("llama").record_routing() as routings,
        pytest.raises(ValueError, match="with experts"),
    ):
        balance_loss(routings)
    routing = route(torch.randn(6, 4), Experts(4, 2, 1))
    for mask in (torch.ones(5, dtype=torch.bool), torch.ones(6)):
        with pytest.raises(ValueError, match="6 tokens were recorded at once"):
            balance_loss([routing], mask)
