"""A program written for flash_attn runs unmodified: trained on packed documents, then decoding from
a paged cache.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from onchip.integrations import flash_attn as fa
from tests.integrations.flash_attn import plain


@pytest.fixture
def program():
    """The module, imported while flash_attn is onchip."""
    with fa.installed():
        path = Path(__file__).with_name("program.py")
        spec = importlib.util.spec_from_file_location("program", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def by_hand(model, ids):
    """Logits of one document with the attention of plain.py, in fp64."""

    def attend(_, attention, x):
        q, k, v = attention.qkv(x).unflatten(-1, (3, attention.heads, -1)).unbind(1)
        at = torch.arange(len(x))
        q, k = (plain.rotated(t, at, attention.cos, attention.sin, False) for t in (q, k))
        return attention.out(plain.attention(q, k, v, causal=True)[0].flatten(1))

    return model.blocks(model.embed(ids), attend)


def test_the_training_step_is_the_documented_one(program):
    """Loss and every gradient, of padded documents that are packed inside."""
    model = program.Decoder().double()
    ids, mask = program.batch_of_patterns(torch.Generator().manual_seed(2), "cpu", 4, 21)
    weights = list(model.parameters())
    logits = model(ids, mask)
    assert not logits[~mask].any()
    got = torch.autograd.grad(F.cross_entropy(logits[mask], ids[mask]), weights)
    alone = torch.cat([by_hand(model, row[seen]) for row, seen in zip(ids, mask, strict=True)])
    want = torch.autograd.grad(F.cross_entropy(alone, ids[mask]), weights)
    torch.testing.assert_close(logits[mask], alone, rtol=0, atol=1e-10)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def learn_and_count(program, device, dtype, steps):
    model = program.Decoder().to(device, dtype)
    losses = program.train(model, steps, device)
    prompts = [[5, 6, 7, 8, 9, 10], [60, 62, 0, 2, 4, 6, 8, 10, 12], [1, 4, 7, 10, 13]]
    generated = model.generate(prompts, 6)
    return losses, generated, model, prompts


def test_it_trains_on_counting_and_decodes_counts(program):
    losses, generated, model, prompts = learn_and_count(program, "cpu", torch.float32, 120)
    assert losses[0] > 3 and losses[-1] < 1.0
    model = model.double()
    for prompt, tokens in zip(prompts, generated, strict=True):
        for t, token in enumerate(tokens):  # each token is the whole model's, without a cache
            logits = by_hand(model, torch.tensor(prompt + tokens[:t]))
            assert logits[-1].argmax() == token
    assert generated[0] == [11, 12, 13, 14, 15, 16]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_on_a_gpu(program, dtype):
    losses, generated, model, prompts = learn_and_count(program, "cuda", dtype, 300)
    assert losses[0] > 3 and losses[-1] < 1.0
    assert generated[0] == [11, 12, 13, 14, 15, 16]
    ids = torch.tensor([prompts[0]], device="cuda")
    packed = model(ids, torch.ones_like(ids, dtype=torch.bool))
    assert packed[0, -1].argmax() == generated[0][0]
