"""The output of `python examples/versions/vN.py`: a check of the numbers, and times."""

from itertools import product

import torch

from onchip.testing import assert_accurate, make_qkv


def check(attention, seqlen=4096):
    """Hold attention(q, k, v, causal) to the accuracy rule of onchip, then time it.

    Without a GPU v1 and v2 can still be checked, with TRITON_INTERPRET=1, in fp16: the
    interpreter has no bf16.
    """
    gpu = torch.cuda.is_available()
    how = {"dtype": torch.bfloat16, "device": "cuda"} if gpu else {"dtype": torch.float16}
    for length, causal in product((1, 63, 799), (False, True)):
        assert_accurate(attention, *make_qkv(2, length, num_heads=3, **how), causal=causal)
    print("exact up to rounding: 1, 63 and 799 tokens, dense and causal")
    for head_dim, causal in product((64, 128) if gpu else (), (False, True)):
        report(attention, seqlen, head_dim, causal)


def report(attention, seqlen, head_dim, causal, tokens=16384, hidden=2048):
    """One line: the best of ten calls on 16,384 tokens of 2,048 channels."""
    shape = {"num_heads": hidden // head_dim, "head_dim": head_dim, "dtype": torch.bfloat16}
    q, k, v = make_qkv(tokens // seqlen, seqlen, device="cuda", **shape)
    ms = min(milliseconds(lambda: attention(q, k, v, causal)) for _ in range(10))
    tflops = 4 * tokens * seqlen * hidden * (0.5 if causal else 1.0) / ms / 1e9
    mask = "causal" if causal else "dense"
    print(f"{seqlen} tokens, head_dim {head_dim}, {mask:<6} {ms:8.3f} ms {tflops:6.0f} TFLOP/s")


def milliseconds(job):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    job()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
