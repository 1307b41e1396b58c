"""A decoder equals transformers' model, and gives the same over pages as over sequences."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import onchip
from onchip import models
from onchip.kvcache import BatchShape, KVCache
from onchip.models import ModelConfig, positions_of, random_model


def twin(decoder, folder):
    """The same model in transformers."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    models.save(decoder, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def tokens(*shape, seed=0):
    return torch.randint(130, shape, generator=torch.Generator().manual_seed(seed))


def new_cache(decoder, page_size, num_pages=None, **options):
    num_pages = num_pages or 600 // page_size + 8
    return KVCache(decoder.cache_spec(page_size), num_pages, **options)


def advance(decoder, cache, sequences, chunks):
    """One step over new tokens of each sequence; hidden states, per sequence."""
    assert cache.append_all(sequences, chunks) is None
    batch = cache.view(sequences)
    new = torch.tensor([t for chunk in chunks for t in chunk])
    hidden = decoder(new, positions_of(batch), batch, cache)
    for sequence in sequences:
        cache.commit(sequence)
    return hidden.split([len(chunk) for chunk in chunks])


@torch.no_grad()
def test_logits_and_greedy_tokens_equal_transformers(data, tmp_path):
    """fp32; the sequence is longer than the sliding window. The bound is 20 roundings of a logit of
    order one; the largest difference measured is 5e-6.
    """
    decoder = random_model(ModelConfig.from_hf(data), seed=1)
    other = twin(decoder, tmp_path)
    text = tokens(2, 37)
    theirs, ours = other(text).logits, decoder.logits(decoder.full(text))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)

    settings = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = other.generate(text[:1], **settings)[0].tolist()
    cache = new_cache(decoder, page_size=16)
    sequence, chunk = cache.open(), text[0].tolist()
    for _ in range(20):
        hidden = advance(decoder, cache, [sequence], [chunk])[0]
        chunk = [decoder.logits(hidden[-1]).argmax().item()]
    assert sequence.tokens + chunk == expected


@pytest.mark.parametrize("page_size", [1, 16])
@torch.no_grad()
def test_pages_in_any_chunks_equal_whole_sequences(data, page_size):
    """Sequences of 1, 31 and 47 tokens join at different steps, in odd chunks and token by token,
    on pages with NaN in every unwritten slot; fp64.
    """
    decoder = random_model(ModelConfig.from_hf(data), seed=2, dtype=torch.float64)
    cache = new_cache(decoder, page_size)
    cache.pages.k.fill_(math.nan)
    cache.pages.v.fill_(math.nan)
    texts = [tokens(n, seed=n).tolist() for n in (47, 31, 1)]
    cuts = [(0, 1, 18, 19, 20, 33, 47), (0, 13, 14, 15, 31), (0, 1)]
    sequences, parts = [cache.open() for _ in texts], [[], [], []]
    for step in range(6):
        running = [i for i in range(3) if step < len(cuts[i]) - 1]
        chunks = [texts[i][slice(*list(pairwise(cuts[i]))[step])] for i in running]
        hidden = advance(decoder, cache, [sequences[i] for i in running], chunks)
        for i, rows in zip(running, hidden, strict=True):
            parts[i].append(rows)
    for text, part in zip(texts, parts, strict=True):
        whole = decoder.full(torch.tensor([text]))[0]
        torch.testing.assert_close(torch.cat(part), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_dim", [320, 512])
@torch.no_grad()
def test_wide_heads(llama, head_dim, tmp_path):
    """Equal to transformers' model over a whole sequence, and to itself over pages, token by token
    in the end.
    """
    decoder = random_model(ModelConfig.from_hf(llama | {"head_dim": head_dim}), seed=5)
    text = tokens(1, 23)
    whole = decoder.full(text)
    theirs = twin(decoder, tmp_path)(text).logits
    torch.testing.assert_close(decoder.logits(whole), theirs, rtol=0, atol=1e-5)
    cache = new_cache(decoder, 4)
    sequence = cache.open()
    chunks = [text[0, :20].tolist(), *text[0, 20:, None].tolist()]
    rows = [advance(decoder, cache, [sequence], [chunk])[0] for chunk in chunks]
    torch.testing.assert_close(torch.cat(rows), whole[0], rtol=0, atol=1e-5)


@torch.no_grad()
def test_packed_sequences_equal_separate_ones(data):
    decoder = random_model(ModelConfig.from_hf(data), seed=3, dtype=torch.float64)
    lengths = (1, 29, 11)
    texts = [tokens(n, seed=n) for n in lengths]
    cu_seqlens = torch.tensor([0, 1, 30, 41], dtype=torch.int32)
    packed = decoder.full(torch.cat(texts), cu_seqlens, 29)
    for text, rows in zip(texts, packed.split(lengths), strict=True):
        torch.testing.assert_close(rows, decoder.full(text[None])[0], rtol=0, atol=1e-12)


@torch.no_grad()
def test_attention_can_be_any_fold(llama):
    """A prompt that two forks share is read once for both of them."""
    decoder = random_model(ModelConfig.from_hf(llama), seed=8, dtype=torch.float64)
    cache = new_cache(decoder, 4)
    sequences = [cache.open()]
    advance(decoder, cache, sequences, [tokens(33).tolist()])
    sequences.append(cache.fork(sequences[0]))
    assert cache.append_all(sequences, [[5], [9]]) is None
    batch = cache.view(sequences)

    def cascade(layer, q, k, v, **options):
        cache.write(layer, k, v, batch.slot_mapping)
        tables = batch.page_table, batch.cache_seqlens
        options["cu_seqlens_q"] = batch.cu_seqlens_q
        return onchip.cascade_attention(q, *cache.layer(layer), *tables, **options)

    new, positions = torch.tensor([5, 9]), positions_of(batch)
    ours = decoder.run(new, positions, cascade)
    torch.testing.assert_close(ours, decoder(new, positions, batch, cache), rtol=0, atol=1e-12)


def test_every_parameter_gets_a_gradient(data):
    """Whole sequences are differentiable, in every parameter."""
    decoder = random_model(ModelConfig.from_hf(data), seed=4)
    text = tokens(2, 19)
    decoder.logits(decoder.full(text)).logsumexp(-1).sum().backward()
    for name, parameter in decoder.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        else:
            assert name.endswith("mlp.choice_bias")


def test_the_gradient_is_the_derivative(llama):
    decoder = random_model(ModelConfig.from_hf(llama), seed=4, dtype=torch.float64)
    text, weight = tokens(1, 9), decoder.layers[1].attention.qkv.weight
    loss = lambda: decoder.logits(decoder.full(text)).logsumexp(-1).sum()
    (gradient,) = torch.autograd.grad(loss(), weight)
    step = torch.zeros_like(weight)
    step[0, 0] = step[70, 5] = step[-1, -1] = 1e-6  # of q, of k, of v
    with torch.no_grad():
        weight += step
        above = loss()
        weight -= 2 * step
        slope = (above - loss()).item() / 2e-6
    assert slope == pytest.approx(gradient[step > 0].sum().item(), rel=1e-6)


@pytest.mark.parametrize(
    "family, change",
    [
        ("mistral", {"sliding_window": 8}),
        ("mixtral", {"num_experts_per_tok": 3}),
        ("mixtral", {"sliding_window": 8}),
        ("gpt_oss", {"swiglu_limit": 0.5}),
        ("gpt_oss", {"swiglu_alpha": 1.5}),
        ("gpt_oss", {"sliding_window": 8}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3}),
        ("gpt_oss", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": 4.0}),
        ("gemma2", {"query_pre_attn_scalar": 25}),
        ("gemma3_text", {"rope_local_base_freq": 110.0}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("llama-llama3", {"rope_theta": 4e5}),
        ("llama-linear", {"rope_scaling": None}),
        ("qwen2", {"rope_scaling": None}),
        ("qwen2-sliding", {"max_window_layers": 2}),
        ("phi3", {"partial_rotary_factor": 1.0}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rms_norm_eps": 1e-3}),
    ],
    indirect=["family"],
)
@torch.no_grad()
def test_every_field_that_is_read_changes_the_result(data, family, change):
    """Otherwise agreement with transformers would prove nothing about a field that is ignored."""
    one, other = (random_model(ModelConfig.from_hf(d), seed=1) for d in (data, data | change))
    text = tokens(2, 37)
    a, b = (model.logits(model.full(text)) for model in (one, other))
    assert (a - b).abs().max() > 1e-4


@torch.no_grad()
def test_selected_rows_are_rows_of_the_whole(llama):
    decoder = random_model(ModelConfig.from_hf(llama), seed=5)
    text = tokens(23).tolist()
    results = []
    for rows in (None, torch.tensor([22, 4])):
        cache = new_cache(decoder, 4)
        sequence = cache.open()
        cache.append(sequence, text)
        batch = cache.view([sequence])
        step = (torch.tensor(text), positions_of(batch), batch, cache)
        results.append(decoder(*step, rows=rows))
    torch.testing.assert_close(results[1], results[0][[22, 4]])


@torch.no_grad()
def test_a_larger_static_batch_changes_nothing(data):
    """A static batch with unused sequences and pages."""
    decoder = random_model(ModelConfig.from_hf(data), seed=6)
    cache = new_cache(decoder, 8, max_seqs=4)
    sequences = [cache.open(), cache.open()]
    cache.append_all(sequences, [tokens(9).tolist(), tokens(17).tolist()])
    roomy = cache.view(sequences, cache.static_batch(BatchShape(4, 26, 6, 17)))
    # Of latent attention, new sequences alone are computed in another way than a static batch.
    new, exact = torch.cat([tokens(9), tokens(17)]), cache.view(sequences)._replace(is_fresh=False)
    assert positions_of(roomy).tolist() == positions_of(exact).tolist() == [*range(9), *range(17)]
    a, b = (decoder(new, positions_of(batch), batch, cache) for batch in (roomy, exact))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_padding_has_position_0(llama):
    """Unused tokens of a static batch."""
    decoder = random_model(ModelConfig.from_hf(llama))
    cache = new_cache(decoder, 8)
    sequences = [cache.open(), cache.open()]
    cache.append_all(sequences, [[1] * 9, [2] * 5])
    cache.commit(sequences[0], 7)
    batch = cache.view(sequences, cache.static_batch(BatchShape(3, 10, 6, 5)))
    assert positions_of(batch).tolist() == [7, 8, 0, 1, 2, 3, 4, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_errors_in_16_bits_are_like_those_of_transformers(data, dtype, tmp_path):
    """Both are compared with fp32. Norms and rotations are rounded once here, so the error must not
    be larger (1.2: two samples of rounding errors scatter). Tokens have all experts: between the
    last that is chosen and the next one, a rounding decides, and the error is that of the choice.
    """
    if "num_experts_per_tok" in data:
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        data |= {"num_experts_per_tok": next(data[name] for name in names if name in data)}
        data |= {"topk_group": data["n_group"]} if "n_group" in data else {}
    decoder = random_model(ModelConfig.from_hf(data), seed=7)
    other = twin(decoder, tmp_path)
    text = tokens(4, 33)
    exact = decoder.logits(decoder.full(text))
    decoder, other = decoder.to(dtype), other.to(dtype)
    ours, theirs = decoder.logits(decoder.full(text)), other(text).logits.float()
    assert ours.dtype == torch.float32
    rms = lambda x: (x - exact).square().mean().sqrt()
    assert rms(ours) <= 1.2 * rms(theirs)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"num_heads": 3}, "must be a multiple of"),
        ({"head_dim": 513}, "head_dim_v=513 between 1 and 512"),
        ({"norm": "batch"}, "norm='batch' is not one of"),
        ({"layers": ()}, "num_layers=0"),
        ({"learned_positions": True}, "if and only if no positions are learned"),
        ({"vocab_size": 1.5}, "vocab_size=1.5 must be an integer"),
    ],
)
def test_invalid_configs_are_refused(llama, change, sentence):
    config = ModelConfig.from_hf(llama)
    with pytest.raises(ValueError, match=sentence):
        replace(config, **change)


def test_invalid_calls_are_refused(llama):
    decoder = random_model(ModelConfig.from_hf(llama))
    cu_seqlens = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="both cu_seqlens and max_seqlen"):
        decoder.full(tokens(5), cu_seqlens)
    with pytest.raises(ValueError, match="token 131 is not in \\[0, vocab_size=131\\)"):
        decoder.full(torch.tensor([[3, 131]]))
    with pytest.raises(ValueError, match="token -1 is not in"):
        decoder.full(torch.tensor([3, -1]), torch.tensor([0, 2], dtype=torch.int32), 2)


@pytest.mark.parametrize("family", ["gpt2"], indirect=True)
def test_learned_positions_end(data):
    decoder = random_model(ModelConfig.from_hf(data))
    assert decoder.full(tokens(1, 128)).shape == (1, 128, 48)
    with pytest.raises(ValueError, match="129 tokens exceed the 128 learned positions"):
        decoder.full(tokens(1, 129))
