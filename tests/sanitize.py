"""A small call through every GPU kernel, for a memory checker:

compute-sanitizer --tool memcheck python -m tests.sanitize

Lengths are odd, tiles are cut on every side, and allocations are not cached, so that an access past
the end of a tensor is an access past the end of an allocation. Names as arguments choose among the
calls (`python -m tests.sanitize packed mask`). Exit status 1 if a call fails.
"""

import os
import sys
from collections import Counter
from dataclasses import replace

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # before torch is imported

import torch

import onchip
import onchip.testing as ot
from onchip import masks
from onchip.cost.prefixes import PrefixCosts
from onchip.engine.sampler import LogitEdits, SamplingMetadata, sample
from onchip.fold import cascade
from onchip.kvcache import KVCache, Sequence, Spec
from onchip.models import Decoder, ModelConfig, positions_of, random_model

KERNELS = ("hopper", "triton")
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 4099,
    "hidden_size": 72,
    "intermediate_size": 111,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}
LENGTHS = ((1, 1), (1, 777), (63, 111), (200, 137), (129, 300))
DIMS = ((64, 64), (128, 128), (256, 256), (96, 40))
CALLS = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"window_size": (50, 9)},
    "softcap": {"softcap": 5.0, "sinks": True},
    "deterministic": {"deterministic": True, "causal": True},
    "mask": {"mask": True},
    "strips": {"mask": True, "lengths": ((200, 1100), (65, 1025))},  # of a mask, from 1025 keys on
    "modified": {"alibi_slopes": True, "bias": True, "dropout_p": 0.2, "return_stats": True},
    "packed": {"packed": True, "causal": True},
    "fp8": {"precision": "fp8", "window_size": (50, 9)},
    "fp8 packed": {"precision": "fp8", "packed": True, "causal": True},
    "int8": {"precision": "int8", "causal": True},
    "int8_pv16": {"precision": "int8_pv16"},
    "paged": {"paged": True},
    "cache": {"cache": True, "kernels": ("triton",)},  # pages and models know no kernel of ours
    "decoder": {"decoder": True, "kernels": ("triton",)},
}


def main(names: list[str]) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    refused: Counter[str] = Counter()
    failed = 0
    for name in names or CALLS:
        options = dict(CALLS[name])
        own_lengths = options.pop("lengths", LENGTHS)
        for kernel in options.pop("kernels", KERNELS):
            for dims in DIMS:
                for lengths in own_lengths:
                    shown = f"{name} {kernel} {dims} {lengths}"
                    try:
                        call(kernel, lengths, dims, dict(options), device)
                    except onchip.UnsupportedError as error:
                        refused[str(error)] += 1
                    except RuntimeError as error:
                        failed += 1
                        print(f"{shown}: {error}", flush=True)
        print(f"{name}: done", flush=True)
    for reason, count in refused.items():
        print(f"refused {count} times: {reason}")
    print(f"{failed} calls failed")
    return int(failed > 0)


def call(kernel: str, lengths: tuple[int, int], dims: tuple[int, int], options: dict, device: str):
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": dims[0], "head_dim_v": dims[1]}
    shape |= {"dtype": torch.bfloat16, "device": device}
    if options.pop("cache", False):
        return cache(dims, device)
    if options.pop("decoder", False):
        return decoder(dims[0], lengths[1], device)
    if options.pop("paged", False):
        return paged(kernel, lengths, shape)
    if options.pop("packed", False):
        x = ot.make_packed([lengths[0], 0, 70], [lengths[1], 5, 33], **shape)
        attend, tensors, options = onchip.varlen_attention, x[:3], options | x.options
    else:
        attend, tensors = onchip.attention, ot.make_qkv(2, *lengths, **shape)
        options |= extras(options, lengths, device)
    leaves = [t.requires_grad_() for t in tensors]
    answer = attend(*leaves, kernel=kernel, return_lse=True, **options)
    out, lse = answer[:2]
    seen = lse.masked_fill(lse.isinf(), 0.0)
    torch.autograd.grad(out.float().sum() + seen.sum(), leaves)
    finish(torch.device(device))


def paged(kernel: str, lengths: tuple[int, int], shape: dict) -> None:
    """Pages of several sizes, and the same prefix read once (the merge of packed states)."""
    x = ot.make_packed([lengths[0], 0, 70], [lengths[1], 5, 133], **shape)
    queries = {"cu_seqlens_q": x.cu_seqlens_q, "max_seqlen_q": max(lengths[0], 70)}
    for page_size in (1, 16):
        pages = ot.make_pages(x.k, x.v, x.cu_seqlens_k, page_size)
        onchip.paged_attention(x.q, *pages, **queries, kernel=kernel, return_lse=True)
    table = pages.page_table[2:, :2].expand(3, -1)  # one page in common, one more that is not full
    seqlens = torch.full((3,), 17, dtype=torch.int32)
    free = PrefixCosts(page=1, query=0, partial=0, level=0)
    plan = cascade.plan(table.cpu(), seqlens, 16, free).to(x.q.device)
    tables = table.contiguous(), seqlens.to(x.q.device)
    onchip.cascade_attention(x.q[:3, None], *pages[:2], *tables, plan=plan, kernel=kernel)
    finish(x.q.device)


def cache(dims: tuple[int, int], device: str) -> None:
    """Writes into slots and copies of pages."""
    spec = Spec(2, 2, *dims, page_size=4, device=device)
    held = KVCache(spec, 12)
    a = held.open()
    held.append(a, list(range(7)))
    write(held, [a])
    b = held.fork(a)
    held.append_all([a, b], [[1], [2, 3]])
    write(held, [a, b])
    finish(torch.device(device))


@torch.no_grad()
def decoder(head_dim: int, length: int, device: str) -> None:
    """Norms, rotations, page writes and gates of a model, and draws with every option."""
    config = ModelConfig.from_hf(MODEL | {"head_dim": head_dim})
    model = random_model(config, device=device, dtype=torch.bfloat16)
    for kv_dtype in (None, "fp8", "int8"):
        _decode(model, KVCache(model.cache_spec(4, kv_dtype), 400), length)


def _decode(model: Decoder, held: KVCache, length: int) -> None:
    device = model.device
    sequences = [held.open(), held.open()]
    held.append_all(sequences, [[3] * length, [5]])
    batch = held.view(sequences)
    tokens = torch.tensor([3] * length + [5], device=device)
    logits = model.logits(model(tokens, positions_of(batch), batch, held), wide=False)
    row = lambda *values: torch.tensor(values, device=device)
    cuts = row(0.0, 0.1), row(5, 0), row(1.0, 0.7).double()
    draws = row(0.6, 1.0), row(0.3, 0.9).double()
    drawn = SamplingMetadata(LogitEdits(None, None), row(0, 1), *draws, *cuts)
    sample(logits[-2:], drawn)
    sample(logits[-2:].float(), replace(drawn, min_p=None, top_k=None, top_p=None))
    finish(device)


def write(held: KVCache, sequences: list[Sequence]) -> None:
    spec, slots = held.spec, held.view(sequences).slot_mapping
    draw = lambda dim: torch.randn(len(slots), 2, dim, dtype=spec.dtype, device=spec.device)
    for layer in range(spec.num_layers):
        held.write(layer, draw(spec.head_dim), draw(spec.head_dim_v), slots)
    for sequence in sequences:
        held.commit(sequence)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def extras(options: dict, lengths: tuple[int, int], device: str) -> dict:
    """The tensors that the options which are True stand for."""
    made = {
        "sinks": lambda: torch.zeros(4, device=device),
        "alibi_slopes": lambda: torch.ones(4, device=device),
        "bias": lambda: torch.zeros(1, 4, *lengths, device=device),
        "mask": lambda: masks.mod(lambda b, h, q, k: (q + 2 * k) % 3 != 0),
    }
    return {name: make() for name, make in made.items() if options.get(name) is True}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
