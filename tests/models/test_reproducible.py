"""A reproducible decoder: the bits of a token's logits depend on the tokens before it alone."""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import onchip
from onchip.kvcache import KVCache
from onchip.models import ModelConfig, Shard, builtin, order_check, positions_of, random_model
from onchip.models.decoder import Decoder
from onchip.models.reproducible import ROWS, in_whole_vectors, multiply, reproducible_rows
from tests.models.conftest import fields

SERVED = (
    *("llama", "llama-llama3", "mistral", "qwen2", "qwen2-sliding", "qwen3", "gemma", "gemma2"),
    *("gemma3_text", "phi3", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"),
)
TEXT = torch.randint(130, (3, 90), generator=torch.Generator().manual_seed(0))


def make(family, dtype=torch.float32, reproducible=True):
    decoder = random_model(ModelConfig.from_hf(fields(family)), seed=1, dtype=dtype)
    decoder.set_reproducible(reproducible)
    return decoder


def step_by_step(decoder, text, seed):
    """Logits of a text, in random chunks over pages, in a batch with another sequence."""
    draw = random.Random(seed)
    cache = KVCache(decoder.cache_spec(draw.choice((1, 4, 16))), 400, max_seqs=2)
    sequences, logits, done = [cache.open(), cache.open()], [], 0
    while done < len(text):
        count = min(draw.choice((1, 1, 5, 33)), len(text) - done)
        chunks = [text[done : done + count], [draw.randrange(130)] * draw.choice((1, 2, 7))]
        assert cache.append_all(sequences, chunks) is None
        batch = cache.view(sequences)
        new = torch.tensor([t for chunk in chunks for t in chunk])
        hidden = decoder(new, positions_of(batch), batch, cache)
        cache.commit_all(sequences, [s.length for s in sequences])
        logits.append(decoder.logits(hidden[:count]))
        done += count
    return torch.cat(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SERVED)
def test_bits_of_a_family_do_not_depend_on_the_call(family, dtype):
    """With gradients recorded, in a batch; alone, packed with others, in chunks over pages."""
    decoder = make(family, dtype)
    whole = decoder.logits(decoder.full(TEXT))
    assert whole.requires_grad
    with torch.inference_mode():
        assert torch.equal(decoder.logits(decoder.full(TEXT[1:2, :61]))[0], whole[1, :61])
        cu_seqlens = torch.tensor([0, 13, 84, 85], dtype=torch.int32)
        packed = torch.cat([TEXT[0, :13], TEXT[2, :71], TEXT[1, :1]])
        rows = decoder.logits(decoder.full(packed, cu_seqlens, 71))
        assert torch.equal(rows[13:84], whole[2, :71])
        for seed in range(2):
            paged = step_by_step(decoder, TEXT[seed].tolist(), seed)
            assert torch.equal(paged, whole[seed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_bits_of_the_default_depend_on_the_call(dtype):
    """Otherwise the test above could not fail. In bf16 it takes a model of some size."""
    decoder = builtin.tiny(dtype=dtype)
    differ = []
    for enabled in (False, True):
        decoder.set_reproducible(enabled)
        whole = decoder.logits(decoder.full(TEXT))
        differ.append(bool((decoder.logits(decoder.full(TEXT[:1, :61]))[0] != whole[0, :61]).any()))
    assert differ == [True, False]


@torch.no_grad()
def test_results_are_those_of_the_default():
    """But for the order of sums: fp64."""
    decoder = make("gemma2", torch.float64)
    ours = decoder.logits(decoder.full(TEXT))
    decoder.set_reproducible(False)
    torch.testing.assert_close(ours, decoder.logits(decoder.full(TEXT)), rtol=0, atol=1e-12)


def test_gradients_are_those_of_the_default():
    grads = []
    for enabled in (True, False):
        decoder = make("llama", torch.float64, enabled)
        decoder.logits(decoder.full(TEXT)).double().square().mean().backward()
        grads.append([p.grad for p in decoder.parameters()])
    for ours, usual in zip(*grads, strict=True):
        torch.testing.assert_close(ours, usual, rtol=0, atol=1e-12)


def test_a_product_has_second_derivatives():
    """Also where the gradient that comes in is a constant."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (40, 3))
    leaves = [t.requires_grad_() for t in (x, w)]

    def penalties(product):
        (dx,) = torch.autograd.grad(product(x, w).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.pow(2).sum() + product(x, w).pow(3).sum(), leaves)

    for a, b in zip(penalties(multiply), penalties(F.linear), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inner, outer", [(8, 16), (333, 77), (1024, 1030)])
def test_bits_of_a_product_do_not_depend_on_its_rows(inner, outer, dtype, threads):
    generator = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(*s, generator=generator) for s in ((outer, inner), (outer,)))
    x = torch.randn(3 * ROWS + 5, inner, generator=generator).to(dtype)
    weight, bias, before = weight.to(dtype), bias.to(dtype), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with reproducible_rows():
            whole = multiply(x, weight, bias)
            for rows in (slice(0, 1), slice(3, 20), slice(1, 101), slice(7, None, 2)):
                assert torch.equal(multiply(x[rows], weight, bias), whole[rows])
            assert multiply(x[:0], weight, bias).shape == (0, outer)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert (whole - expected).abs().max() < 30 * torch.finfo(dtype).eps * inner**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [F.silu, torch.sigmoid, torch.tanh, torch.exp])
def test_bits_of_an_element_do_not_depend_on_its_place(function, dtype):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2)).to(dtype) * 4
    with reproducible_rows():
        whole = in_whole_vectors(function, x)
        for start in (1, 8, 31, 999):
            for stop in (start + 1, start + 13, 1000):
                part = in_whole_vectors(function, x[start:stop])
                assert torch.equal(part, whole[start:stop])


def refuse(name, part, whole):
    raise onchip.UnsupportedError(name)


class TestRefusals:
    @pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
    def test_latent_attention(self, family):
        with pytest.raises(onchip.UnsupportedError, match="needs attention over keys and values"):
            make(family)

    def test_a_shard(self):
        config = ModelConfig.from_hf(fields("llama"))
        with pytest.raises(onchip.UnsupportedError, match="on one rank"):
            Decoder(config, shard=Shard(0, 2)).set_reproducible()

    def test_another_device(self):
        decoder = Decoder(ModelConfig.from_hf(fields("llama")), "meta")
        with pytest.raises(onchip.UnsupportedError, match="GPU with Triton, this one is on meta"):
            decoder.set_reproducible()
        decoder = make("llama").to("meta")
        with pytest.raises(onchip.UnsupportedError, match="GPU with Triton, this one is on meta"):
            decoder.full(TEXT.to("meta"))

    def test_another_dtype_is_checked_again(self):
        decoder = make("llama").bfloat16()
        with pytest.raises(onchip.UnsupportedError, match="on cpu in torch.float32, and is on cpu"):
            decoder.full(TEXT)
        decoder.set_reproducible()
        assert decoder.reproducible and decoder.full(TEXT).dtype == torch.bfloat16

    def test_a_check_that_fails_leaves_the_mode(self, monkeypatch):
        decoder = make("llama").bfloat16()
        monkeypatch.setattr(order_check, "_check_equal", refuse)
        with pytest.raises(onchip.UnsupportedError, match="layer 0"):
            decoder.set_reproducible()
        assert not decoder.reproducible

    def test_autocast(self):
        decoder = make("llama")
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(onchip.UnsupportedError, match="without torch.autocast"),
        ):
            decoder.full(TEXT)

    def test_a_compiler(self):
        decoder = make("llama")
        compiled = torch.compile(lambda: decoder.full(TEXT), backend="eager")
        with pytest.raises(onchip.UnsupportedError, match="an eager call"):
            compiled()

    def test_a_transform(self):
        decoder = make("llama")
        with pytest.raises(onchip.UnsupportedError, match="an eager call"):
            torch.func.jvp(lambda x: decoder.logits(x), (torch.ones(1, 48),), (torch.ones(1, 48),))


@pytest.mark.parametrize("where", ["multiply", "in_whole_vectors"])
def test_a_library_whose_rows_depend_on_each_other_is_refused(monkeypatch, where):
    """Products of as many rows as there are, and functions of elements with tails."""
    from onchip.models import pointwise, products

    if where == "multiply":
        monkeypatch.setattr(products, "multiply", F.linear)
    else:
        monkeypatch.setattr(pointwise, "in_whole_vectors", lambda function, x: function(x))
    config = replace(ModelConfig.from_hf(fields("gpt2")), intermediate_size=1001, hidden_size=512)
    decoder = random_model(config, seed=1)
    with pytest.raises(onchip.UnsupportedError, match=r"layer 0 does not: \d+ of"):
        order_check.check_order(decoder)
