"""Attention of programs written for flash_attn, unmodified, with onchip in its place on the CPU.

    python tests/programs/flash_dependants.py diffusers              the installed package
    python tests/programs/flash_dependants.py hunyuan CHECKOUT       a clone of HunyuanVideo

Compares their flash_attn path with their path through torch's SDPA: out and gradients, in fp32.
"""

import argparse
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from flash_on_cpu import OnCpu

import onchip.integrations.flash_attn


def make_inputs(*shape, count=3):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(count)]


def _grads(out, inputs):
    return torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)


def compare(name, got, want, inputs, rows=slice(None)):
    """Compare out, and the gradients of its sum of squares."""
    pairs = [(got[rows], want[rows])]
    pairs += zip(*(_grads(t[rows], inputs) for t in (got, want)), strict=True)
    worst = max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)
    print(f"{'passed' if worst < 1e-5 else 'FAILED'} {name}: {worst:.1e}")
    return worst < 1e-5


def diffusers() -> bool:
    """Its backends "flash" and "flash_varlen", and the passes of its context parallelism."""
    from diffusers.models import attention_dispatch as dispatch

    if not dispatch._CAN_USE_FLASH_ATTN:
        print("FAILED diffusers: flash_attn was not found")
        return False
    inputs = make_inputs(2, 33, 4, 16)
    attend = dispatch.dispatch_attention_fn
    results = []
    for causal in (False, True):
        native = attend(*inputs, is_causal=causal, backend="native")
        for backend in ("flash", "flash_varlen"):
            got = attend(*inputs, is_causal=causal, backend=backend)
            results.append(compare(f"{backend}, {causal=}", got, native, inputs))
    mask = torch.arange(33) < torch.tensor([[20], [33]])
    native = attend(*inputs, attn_mask=mask[:, None, None], backend="native")
    got = attend(*inputs, attn_mask=mask, backend="flash_varlen")
    results.append(compare("flash_varlen, padded keys", got, native, inputs))
    context = torch.autograd.function.FunctionCtx()
    context.saved = ()
    context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
    options = (None, 0.0, True, None, False)
    out, lse = dispatch._flash_attention_forward_op(context, *inputs, *options, True)
    grads = dispatch._flash_attention_backward_op(context, torch.ones_like(out))
    native = attend(*inputs, is_causal=True, backend="native")
    want = torch.autograd.grad(native.sum(), inputs)
    close = [torch.allclose(a, b, atol=1e-5) for a, b in zip(grads[:3], want, strict=True)]
    print(f"{'passed' if all(close) else 'FAILED'} passes, lse {tuple(lse.shape)}")
    return all(results) and all(close)


def hunyuan(checkout: Path) -> bool:
    """Image and text tokens of a batch, packed, each text followed by its padding."""
    spec = spec_from_file_location("attenion", checkout / "hyvideo" / "modules" / "attenion.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if module._flash_attn_forward is None:
        print("FAILED hunyuan: flash_attn was not found")
        return False
    text = torch.arange(9) < torch.tensor([[4], [9]])
    inputs = make_inputs(2, 33, 4, 16)
    cu = module.get_cu_seqlens(text, 24)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 33, "max_seqlen_kv": 33}
    got = module.attention(*inputs, mode="flash", **lengths, batch_size=2)
    seen = torch.cat([torch.ones(2, 24, dtype=torch.bool), text], 1)
    want = module.attention(*inputs, mode="torch", attn_mask=seen[:, None, None])
    results = [compare("hunyuan, flash", got, want, inputs, seen)]
    first = [t[:1] for t in inputs]
    whole = lambda _, q, k, v, **joint: torch.nn.functional.scaled_dot_product_attention(
        *(
            torch.cat([t, joint[f"joint_tensor_{name}"]], 1).transpose(1, 2)
            for t, name in ((q, "query"), (k, "key"), (v, "value"))
        )
    ).transpose(1, 2)
    with torch.no_grad():
        got = module.parallel_attention(whole, *first, 24, 24, cu, cu)
        padding = [t[:, 28:] for t in first]
        want = torch.cat(
            [
                module.attention(*(t[:, :28] for t in first), mode="torch"),
                module.attention(*padding, mode="torch"),
            ],
            1,
        )
    close = torch.allclose(got, want, atol=1e-5)
    print(f"{'passed' if close else 'FAILED'} hunyuan, parallel")
    return all(results) and close


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", choices=("diffusers", "hunyuan"))
    parser.add_argument("checkout", type=Path, nargs="?")
    args = parser.parse_args()
    onchip.integrations.flash_attn.install()
    with OnCpu():
        passed = diffusers() if args.program == "diffusers" else hunyuan(args.checkout)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
