"""A small call of every GPU kernel, for a memory checker:

compute-sanitizer --tool memcheck python -m tests.sanitize

Lengths are odd, so that tiles are cut on every side. PyTorch caches no allocations, so that an
access past the end of a tensor is an access past the end of an allocation. Arguments select calls
by name (`python -m tests.sanitize packed mask`). The exit status is 1 if a call fails.
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
from onchip.models.experts import fuse_experts
from onchip.models.products import fuse_products
from onchip.quant.kv8 import quantise

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
EXPERTS = {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2}
LENGTHS = ((1, 1), (1, 777), (63, 111), (200, 137), (129, 300))
DIMS = ((64, 64), (128, 128), (256, 256), (96, 40))
WIDTHS = ((32, 32), (72, 80), (96, 96), (160, 160), (192, 192), (192, 128))
CALLS = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"window_size": (50, 9)},
    "softcap": {"softcap": 5.0, "sinks": True},
    "deterministic": {"deterministic": True, "causal": True},
    "mask": {"mask": True},
    "strips": {
        "mask": True,
        "lengths": ((200, 1100), (65, 1025)),
    },  # masks have strips from 1,025 keys on
    "modified": {"alibi_slopes": True, "bias": True, "dropout_p": 0.2, "return_stats": True},
    "packed": {"packed": True, "causal": True},
    "reproducible": {"reproducible": True, "causal": True, "kernels": ("triton",)},
    "reproducible packed": {
        "reproducible": True,
        "packed": True,
        "causal": True,
        "window_size": (50, 0),
        "kernels": ("triton",),
    },
    "tangents": {"tangents": True, "causal": True, "sinks": True, "kernels": ("triton",)},
    "tangents modified": {
        "tangents": True,
        "mask": True,
        "alibi_slopes": True,
        "bias": True,
        "kernels": ("triton",),
    },
    "widths": {"dims": WIDTHS, "causal": True},
    "widths deterministic": {"dims": WIDTHS, "deterministic": True},
    "widths packed": {"dims": WIDTHS, "packed": True, "softcap": 5.0},
    "widths mask": {"dims": WIDTHS, "mask": True},
    "fp8": {"precision": "fp8", "window_size": (50, 9)},
    "fp8 packed": {"precision": "fp8", "packed": True, "causal": True},
    "fp8 paged": {"paged_8bit": "fp8"},
    "int8 paged": {"paged_8bit": "int8"},
    "int8": {"precision": "int8", "causal": True},
    "int8_pv16": {"precision": "int8_pv16"},
    "paged": {"paged": True},
    "cache": {"cache": True, "kernels": ("triton",)},  # caches and models have no option `kernel`
    "decoder": {"decoder": True, "kernels": ("triton",)},
}


def main(names: list[str]) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    refused: Counter[str] = Counter()
    failed = 0
    for name in names or CALLS:
        options = dict(CALLS[name])
        own_lengths = options.pop("lengths", LENGTHS)
        all_dims = options.pop("dims", DIMS)
        kernels = options.pop("kernels", KERNELS[:1] if all_dims is WIDTHS else KERNELS)
        for kernel in kernels:
            for dims in all_dims:
                for lengths in own_lengths:
                    try:
                        call(kernel, lengths, dims, dict(options), device)
                    except onchip.UnsupportedError as error:
                        refused[str(error)] += 1
                    except RuntimeError as error:
                        failed += 1
                        print(f"{name} {kernel} {dims} {lengths}: {error}", flush=True)
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
    if precision := options.pop("paged_8bit", None):
        return paged_8bit(kernel, lengths, shape, precision)
    if options.pop("paged", False):
        return paged(kernel, lengths, shape)
    if options.pop("packed", False):
        x = ot.make_packed([lengths[0], 0, 70], [lengths[1], 5, 33], **shape)
        attend, tensors, options = onchip.varlen_attention, x[:3], options | x.options
    else:
        attend, tensors = onchip.attention, ot.make_qkv(2, *lengths, **shape)
        options |= extras(options, lengths, device)
    has_tangents = options.pop("tangents", False)
    if has_tangents:
        torch.func.jvp(lambda *x: attend(*x, kernel=kernel, **options), tensors, tensors)
    leaves = [t.requires_grad_() for t in tensors]
    out, lse = attend(*leaves, kernel=kernel, return_lse=True, **options)[:2]
    finite_lse = lse.masked_fill(lse.isinf(), 0.0)
    loss = out.float().sum() + finite_lse.sum()
    grads = torch.autograd.grad(loss, leaves, create_graph=has_tangents)
    if has_tangents:
        torch.autograd.grad([g.float().pow(2).sum() for g in grads], leaves)
    synchronize(torch.device(device))


def paged(kernel: str, lengths: tuple[int, int], shape: dict) -> None:
    """Pages of several sizes, and a cascade over a shared prefix, which merges packed states."""
    x = ot.make_packed([lengths[0], 0, 70], [lengths[1], 5, 133], **shape)
    queries = {"cu_seqlens_q": x.cu_seqlens_q, "max_seqlen_q": max(lengths[0], 70)}
    for page_size in (1, 16):
        pages = ot.make_pages(x.k, x.v, x.cu_seqlens_k, page_size)
        onchip.paged_attention(x.q, *pages, **queries, kernel=kernel, return_lse=True)
        if kernel == "triton":
            onchip.paged_attention(x.q, *pages, **queries, reproducible=True)
    table = pages.page_table[2:, :2].expand(3, -1)  # one shared page, one partial page
    seqlens = torch.full((3,), 17, dtype=torch.int32)
    free = PrefixCosts(page=1, query=0, partial=0, level=0)
    plan = cascade.plan(table.cpu(), seqlens, 16, free).to(x.q.device)
    tables = table.contiguous(), seqlens.to(x.q.device)
    onchip.cascade_attention(x.q[:3, None], *pages[:2], *tables, plan=plan, kernel=kernel)
    synchronize(x.q.device)


def paged_8bit(kernel: str, lengths: tuple[int, int], shape: dict, precision: str) -> None:
    """Operands of 8 bits from pages of several sizes, in 16 bits and in 8."""
    x = ot.make_packed([lengths[0], 0, 70], [lengths[1], 5, 133], **shape)
    q = x.q[: lengths[0]].expand(3, -1, -1, -1)
    for page_size in (1, 16):
        pages = ot.make_pages(x.k, x.v, x.cu_seqlens_k, page_size)
        (k, k_scales), (v, v_scales) = (quantise(t, torch.int8) for t in pages[:2])
        options = {"precision": precision, "kernel": kernel}
        onchip.paged_attention(q, *pages, **options)
        options |= {"k_scales": k_scales, "v_scales": v_scales}
        onchip.paged_attention(q, k, v, *pages[2:], **options)
    synchronize(x.q.device)


def cache(dims: tuple[int, int], device: str) -> None:
    """Write into slots, and copy pages."""
    spec = Spec(2, 2, *dims, page_size=4, device=device)
    kv_cache = KVCache(spec, 12)
    a = kv_cache.open()
    kv_cache.append(a, list(range(7)))
    write(kv_cache, [a])
    b = kv_cache.fork(a)
    kv_cache.append_all([a, b], [[1], [2, 3]])
    write(kv_cache, [a, b])
    synchronize(torch.device(device))


@torch.no_grad()
def decoder(head_dim: int, length: int, device: str) -> None:
    """Norms, rotary embeddings, page writes, activations, products of few rows and experts of
    models, and sampling with every option.
    """
    config = ModelConfig.from_hf(MODEL | {"head_dim": head_dim})
    model = random_model(config, device=device, dtype=torch.bfloat16)
    for kv_dtype in (None, "fp8", "int8"):
        _decode(model, KVCache(model.cache_spec(4, kv_dtype), 400), length)
    with fuse_products():
        _decode(model, KVCache(model.cache_spec(4), 400), 9)
    model.set_reproducible()
    _decode(model, KVCache(model.cache_spec(4), 400), length)
    config = ModelConfig.from_hf(MODEL | EXPERTS | {"head_dim": head_dim})
    sparse = random_model(config, device=device, dtype=torch.bfloat16)
    with fuse_experts():
        _decode(sparse, KVCache(sparse.cache_spec(4), 400), length)


def _decode(model: Decoder, kv_cache: KVCache, length: int) -> None:
    device = model.device
    sequences = [kv_cache.open(), kv_cache.open()]
    kv_cache.append_all(sequences, [[3] * length, [5]])
    batch = kv_cache.view(sequences)
    tokens = torch.tensor([3] * length + [5], device=device)
    logits = model.logits(model(tokens, positions_of(batch), batch, kv_cache), wide=False)
    row = lambda *values: torch.tensor(values, device=device)
    cuts = row(0.0, 0.1), row(5, 0), row(1.0, 0.7).double()
    draws = row(0.6, 1.0), row(0.3, 0.9).double()
    drawn = SamplingMetadata(LogitEdits(None, None), row(0, 1), *draws, *cuts)
    sample(logits[-2:], drawn)
    sample(logits[-2:].float(), replace(drawn, min_p=None, top_k=None, top_p=None))
    synchronize(device)


def write(kv_cache: KVCache, sequences: list[Sequence]) -> None:
    spec, slots = kv_cache.spec, kv_cache.view(sequences).slot_mapping
    draw = lambda dim: torch.randn(len(slots), 2, dim, dtype=spec.dtype, device=spec.device)
    for layer in range(spec.num_layers):
        kv_cache.write(layer, draw(spec.head_dim), draw(spec.head_dim_v), slots)
    for sequence in sequences:
        kv_cache.commit(sequence)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def extras(options: dict, lengths: tuple[int, int], device: str) -> dict:
    """A tensor or mask for each of these options that is True."""
    make = {
        "sinks": lambda: torch.zeros(4, device=device),
        "alibi_slopes": lambda: torch.ones(4, device=device),
        "bias": lambda: torch.zeros(1, 4, *lengths, device=device),
        "mask": lambda: masks.mod(lambda b, h, q, k: (q + 2 * k) % 3 != 0),
    }
    return {name: make[name]() for name in make if options.get(name) is True}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
