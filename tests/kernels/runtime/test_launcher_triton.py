"""The key of a CachedLauncher is never coarser than Triton's: a call launches only what was
compiled for it. Real calls and kernels; nothing is compiled.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

import onchip.testing as ot
from onchip import masks
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.score_mods import trace

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("interpreting and compiling cannot share a process", allow_module_level=True)

from onchip.kernels.hopper import launch, launch_backward, launch_backward_split  # noqa: E402
from onchip.kernels.hopper.tensors import Descriptor, TensorDescriptor  # noqa: E402
from onchip.kernels.triton import backward, bias, captured, decode, forward  # noqa: E402

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
MODULES = (launch, launch_backward, launch_backward_split, forward, backward, bias)
MODULES += (captured, decode)
KERNELS = {
    "hopper": (launch.forward, launch_backward.backward),
    "triton": (forward.forward, backward.backward),
}


def specialization(kernel, args, constants):
    """Triton's specialisation of the arguments, without options."""
    bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    return bind(*args, **constants)[1]


class Compiled:
    """A direct launch checks that the arguments have the specialisation it was compiled for."""

    def __init__(self, kernel, args, constants, log):
        self.kernel, self.log = kernel, log
        self.expected = specialization(kernel, args, constants)

    def __getitem__(self, grid):
        assert len(grid) == 3
        return self._launch

    def _launch(self, *args):
        assert specialization(self.kernel, args, {}) == self.expected
        self.log.append(("direct", self.kernel))


@pytest.fixture
def log(monkeypatch):
    """("usual" or "direct", kernel) of every launch of a kernel with a CachedLauncher."""
    launched = []
    monkeypatch.setattr(Descriptor, "__post_init__", TensorDescriptor.__post_init__)  # checks
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)

    launchers = [h for m in MODULES for h in vars(m).values() if isinstance(h, CachedLauncher)]
    for launcher in launchers:
        monkeypatch.setattr(launcher, "_signatures", {})

    def run(kernel, *args, grid, warmup, **constants):
        if any(launcher.kernel is kernel for launcher in launchers):
            launched.append(("usual", kernel))
        return Compiled(kernel, args, constants, launched)

    monkeypatch.setattr(JITFunction, "run", run)
    return launched


def shifted(t):
    """The same, shifted by four bytes."""
    room = torch.zeros(t.numel() + 4 // t.element_size(), dtype=t.dtype)
    return room[4 // t.element_size() :].view(t.shape).copy_(t)


def calls():
    """Calls that differ in one property each."""
    cu = torch.tensor([0, 63, 200], dtype=torch.int32)
    sinks = torch.zeros(4)
    mask = lambda n: masks.build(masks.causal(), 1, 4, n, n)
    yield {}, {}
    yield {"seqlen": 1}, {}
    yield {"seqlen": 256}, {}
    yield {"dtype": torch.float16}, {}
    yield {"head_dim": 128}, {}
    yield {"head_dim": 256}, {}
    yield {"num_kv_heads": 1}, {}
    yield {"batch": 3}, {}
    for options in ({"causal": True}, {"softcap": 5.0}, {"softmax_scale": 0.3}):
        yield {}, {"options": Options(**options)}
    for window in ((3, None), (None, 3), (3, 4), (1 << 40, 1)):
        yield {}, {"options": Options(window_size=window)}
    yield {}, {"options": Options(deterministic=True)}
    yield {}, {"options": Options(out_dtype=torch.float32)}
    for head_dim in (64, 128, 256):
        yield {"head_dim": head_dim}, {"wide_grads": True}
    for tensor in (sinks, shifted(sinks), sinks.bfloat16()):
        yield {}, {"sinks": tensor}
    for factor, table in itertools.product(
        (2.0, 3.0), (torch.rand(399), torch.rand(7, 399)[0, 1:])
    ):
        function = lambda s, b, h, q, k, f=factor, t=table: s * f + t[q - k] + t[h]
        yield {}, {"options": Options(score_mod=trace(function).text), "captured": table}
    yield {"seqlen": 400}, {"mask": mask(400)}
    for tensor in (cu, shifted(cu)):
        yield {}, {"cu_seqlens_q": tensor, "cu_seqlens_k": cu}


def pose(shape, extras):
    shape = {"batch": 1, "seqlen": 200, "head_dim": 64, "num_heads": 4} | shape
    shape.setdefault("dtype", torch.bfloat16)
    seqlen = shape.pop("seqlen")
    q, k, v = ot.make_qkv(shape.pop("batch"), seqlen, seqlen, **shape)
    extras = dict(extras)
    options = extras.pop("options", Options())
    wide_grads = extras.pop("wide_grads", False)
    packed = "cu_seqlens_q" in extras
    if packed:
        q, k, v = q[0], k[0], v[0]
    x = Tensors(q, k, v, **extras)
    problem = describe(x, options, (seqlen, seqlen) if packed else ())
    return problem._replace(wide_grads=wide_grads), x


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_variant_is_launched_only_for_its_specialisation(log, kernel):
    run_forward, run_backward = KERNELS[kernel]
    for turn in range(2):
        log.clear()
        for shape, extras in calls():
            problem, x = pose(shape, extras)
            out, lse, _ = run_forward(problem, x)
            run_backward(problem, x, out, lse.zero_(), torch.zeros_like(out), None)
        usual = [launched for way, launched in log if way == "usual"]
        assert not usual if turn else 0 < len(usual) < len(log)


@pytest.mark.parametrize("kernel", KERNELS)
def test_lengths_share_a_variant(log, kernel):
    for n in (129, 200, 256, 257, 400):
        problem, x = pose({"seqlen": n}, {})
        KERNELS[kernel][0](problem, x)
    assert [way for way, _ in log] == ["usual"] + ["direct"] * 4
