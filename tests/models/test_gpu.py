"""The decoder on a GPU: the results of the CPU, replay from a graph, bf16."""

import pytest
import torch

from onchip.kvcache import BatchShape, KVCache
from onchip.models import ModelConfig, positions_of, random_model

pytestmark = pytest.mark.gpu


def on_gpu(data, dtype):
    """The same weights on both devices."""
    exact = random_model(ModelConfig.from_hf(data), seed=1)
    decoder = random_model(ModelConfig.from_hf(data), seed=1, device="cuda", dtype=dtype)
    decoder.load_state_dict(exact.state_dict())
    return exact, decoder


def prefill(decoder, cache, lengths):
    texts = [torch.arange(n) * 37 % 130 for n in lengths]
    sequences = [cache.open() for _ in lengths]
    cache.append_all(sequences, [text.tolist() for text in texts])
    batch = cache.view(sequences)
    hidden = decoder(torch.cat(texts).cuda(), positions_of(batch), batch, cache)
    for sequence in sequences:
        cache.commit(sequence)
    return texts, sequences, hidden.split(lengths)


@torch.no_grad()
def test_fp32_on_the_gpu_is_fp32_on_the_cpu(data):
    exact, decoder = on_gpu(data, torch.float32)
    lengths = [41, 1, 70]
    cache = KVCache(decoder.cache_spec(16), 64)
    texts, _, hidden = prefill(decoder, cache, lengths)
    for text, rows in zip(texts, hidden, strict=True):
        torch.testing.assert_close(rows.cpu(), exact.full(text[None])[0], rtol=0, atol=1e-4)
        whole = decoder.full(text[None].cuda())[0]
        torch.testing.assert_close(whole, rows, rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_step_replays_from_a_graph(data):
    """Decoding five tokens of three sequences in a batch of size four: captured once,
    replayed with other lengths; no step waits for the host.
    """
    exact, decoder = on_gpu(data, torch.bfloat16)
    if not decoder.is_recordable:
        pytest.skip("on this GPU the host reads how many tokens each expert has")
    cache = KVCache(decoder.cache_spec(16), 64)
    _, sequences, _ = prefill(decoder, cache, [41, 5, 70])
    batch = cache.static_batch(BatchShape(4, 4, 16, 1))
    tokens = torch.zeros(4, dtype=torch.int64, device="cuda")
    step = lambda: decoder.logits(decoder(tokens, positions_of(batch), batch, cache))
    step()  # kernels are compiled and frequencies computed before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    for i in range(5):
        new = [(i * 31 + b) % 130 for b in range(3)]
        cache.append_all(sequences, [[t] for t in new])
        cache.view(sequences, out=batch)
        tokens[:3].copy_(torch.tensor(new))
        graph.replay()
        for sequence in sequences:
            cache.commit(sequence)
    assert logits.dtype == torch.float32
    best, plain = last_logits(exact, sequences), last_logits(decoder, sequences)
    rms = lambda rows: (rows.cpu() - best).square().mean().sqrt()
    assert rms(logits[:3]) <= 1.2 * rms(plain)  # two samples of rounding errors scatter


def last_logits(decoder, sequences):
    """Logits after the last token of each, from whole sequences."""
    texts = [torch.tensor([s.tokens], device=decoder.embed.device) for s in sequences]
    return torch.stack([decoder.logits(decoder.full(text))[0, -1] for text in texts])
