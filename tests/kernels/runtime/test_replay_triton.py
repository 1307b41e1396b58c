"""A replayed call makes the launches that Triton would make: real calls and kernels down to the C
launcher, which is a stand-in.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import onchip
import onchip.testing as ot
from onchip.core import call_cache, torch_op
from onchip.core.device import DeviceInfo
from onchip.kernels.runtime import raw_launch, replay
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.score_mods import trace

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("interpreting and compiling cannot share a process", allow_module_level=True)

from onchip.kernels.hopper import launch as hopper  # noqa: E402
from onchip.kernels.hopper import launch_backward, launch_backward_split, launch_decode  # noqa: E402
from onchip.kernels.triton import backward, bias, captured, decode, forward, launch  # noqa: E402

MODULES = (
    hopper,
    launch_backward,
    launch_decode,
    launch_backward_split,
    backward,
    bias,
    captured,
    decode,
    forward,
)
HOPPER = DeviceInfo("cuda", "NVIDIA H200", (9, 0))
FORM = {"swizzle": 3, "elem_size": 2, "elem_type": 8, "block_size": [1, 1, 64, 64]}
FORM["fp4_padded"] = False


class Driver:
    """Logs launches as the C launcher receives them: (grid, stream and options, arguments of the
    kernel).
    """

    def __init__(self):
        self.log = []
        self.utils = SimpleNamespace(
            fill_tma_descriptor=self.encode,
            fill_tma_descriptor_tiled=self.encode,
            launch=self.launch,
            unload_module=lambda module: None,
        )

    def encode(self, address, *how):
        return ("map", address, *how)

    def launch(self, *args):
        nested = isinstance(args[-1], (tuple, list))  # since 3.9
        fixed, args = (args[:-1], args[-1]) if nested else (args[:13], args[13:])
        unheard = lambda arg: None if type(arg).__name__ in ("HookChain", "LazyDict") else arg
        self.log.append((tuple(map(unheard, fixed)), args))

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 77


@pytest.fixture
def fake(monkeypatch):
    found = Driver()
    monkeypatch.setattr(driver, "_active", found)
    compile = lambda kernel, key, signature, *_: compiled(found, kernel, key, signature)
    monkeypatch.setattr(JITFunction, "_do_compile", compile)
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch_op, "device_info", lambda device: HOPPER)
    monkeypatch.setattr(launch, "device_info", lambda device: HOPPER)
    monkeypatch.setattr(torch_op, "check_values", lambda *_: None)
    monkeypatch.setattr(torch_op.paged, "check_values", lambda *_: None)
    monkeypatch.setattr(replay, "is_recordable", lambda q: True)
    for launcher in (h for m in MODULES for h in vars(m).values() if isinstance(h, CachedLauncher)):
        monkeypatch.setattr(launcher, "_signatures", {})
    raw_launch.runtime.cache_clear()
    call_cache.clear_call_cache()
    yield found
    raw_launch.runtime.cache_clear()
    call_cache.clear_call_cache()


def compiled(fake, kernel, key, signature):
    """A compiled kernel without its code."""
    made = CompiledKernel.__new__(CompiledKernel)
    is_map = lambda kind: isinstance(kind, str) and kind.startswith("tensordesc")
    forms = [FORM for kind in signature.values() if is_map(kind)]
    made.metadata = SimpleNamespace(tensordesc_meta=forms, num_warps=4)
    made.module, made.function, made._module_pid = 1, hash(key) % 1000, None
    made.packed_metadata, made.src, made.name = (4, 1, 0), None, kernel.__name__
    run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    run.num_ctas, run.gsan_enabled = 1, False
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    run.launch_cooperative_grid, run.launch_pdl = False, True
    run.arg_annotations, run.kernel_signature = [], b""
    run.launch = nvidia.wrap_handle_tensordesc(fake.launch, signature, forms)
    made._run = run
    return made


def normalise(log, arguments):
    """The launches, with addresses replaced: the number of an argument tensor, or of an allocation
    and the offset in it.
    """
    names = {t.data_ptr(): i for i, t in enumerate(arguments) if t is not None}
    fresh = {}

    def address(value):
        if value in names:
            return f"given {names[value]}"
        return f"new {fresh.setdefault(value, len(fresh))}"

    def word(arg):
        if isinstance(arg, torch.Tensor):
            return address(arg.data_ptr())
        if isinstance(arg, tuple):
            return ("map", address(arg[1]), *arg[2:])
        return address(arg) if isinstance(arg, int) and arg > 1 << 40 else arg

    return [(*fixed, [word(arg) for arg in args]) for fixed, args in log]


def dense(n=199, heads=4, kv_heads=2, dim=128, dtype=torch.bfloat16, **options):
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "dtype": dtype}
    x = ot.make_qkv(2, n, n + 5, **shape)
    return onchip.attention, x, options


def packed(**options):
    cu = torch.tensor([0, 63, 200], dtype=torch.int32)
    x = [t[0] for t in ot.make_qkv(1, 200, num_heads=4, head_dim=64, dtype=torch.bfloat16)]
    return onchip.varlen_attention, (*x, cu, cu, 137, 137), options


def paged(seqlen_q=1, batch=3, **options):
    q = torch.randn(batch, seqlen_q, 8, 64).bfloat16()
    pages = torch.randn(2, 40, 16, 2, 64).bfloat16()
    table = torch.arange(batch * 12, dtype=torch.int32).view(batch, 12)
    lengths = torch.full((batch,), 100, dtype=torch.int32)
    return onchip.paged_attention, (q, *pages, table, lengths), options


IDS = torch.arange(204) // 50


def _documents(s, b, h, q, k):
    return torch.where(IDS[q] == IDS[k], s, -float("inf"))


CALLS = {
    "dense": dense(),
    "causal, many tiles": dense(n=1999, causal=True),
    "window, sinks": dense(window_size=(30, 4), sinks=torch.randn(4)),
    "head_dim 64 in fp16": dense(dim=64, dtype=torch.float16, softcap=5.0),
    "head_dim 256": dense(dim=256, causal=True),
    "wide": dense(out_dtype=torch.float32),
    "portable": dense(kernel="triton"),
    "portable, bias": dense(kernel="triton", bias=torch.randn(1, 4, 1, 204)),
    "portable, score_mod": dense(kernel="triton", score_mod=trace(_documents)),
    "portable, dropout": dense(kernel="triton", dropout_p=0.1, dropout_seed=torch.tensor(5)),
    "one query": dense(n=1),
    "packed": packed(causal=True),
    "packed, portable": packed(kernel="triton"),
    "paged": paged(),
    "paged, a chunk": paged(seqlen_q=40),
    "paged, fixed splits": paged(deterministic=True, sinks=torch.randn(8)),
}


def run(fake, call, grad):
    attend, args, options = call
    fake.log.clear()
    leaves = [t.detach().requires_grad_(grad) for t in args[:3]]
    out = attend(*leaves, *args[3:], **options)
    arguments = [*args, *options.values()]
    if grad:
        dout = torch.ones_like(out)
        torch.autograd.grad(out, leaves, dout)
        arguments.append(dout)
    return normalise(fake.log, [t for t in arguments if isinstance(t, torch.Tensor)])


@pytest.fixture
def replays(monkeypatch):
    """The recordings that were replayed."""
    found = []
    original = replay.Recording.replay

    def noted(recording, *args):
        found.append(recording)
        return original(recording, *args)

    monkeypatch.setattr(replay.Recording, "replay", noted)
    return found


def test_a_replay_has_the_addresses_of_its_own_call(fake, replays):
    """Not the addresses of the recorded call, even if that passed one tensor three times."""
    x = dense(kv_heads=4)[1][0]
    attend = partial(onchip.attention, causal=True)
    for _ in range(2):
        attend(x, x, x)
    q, k, v = (x.clone() for _ in range(3))
    fake.log.clear()
    out = attend(q, k, v)
    ((_, args),) = fake.log
    assert len(replays) == 1
    assert [arg[1] for arg in args if isinstance(arg, tuple)] == [
        t.data_ptr() for t in (q, k, v, out)
    ]


def test_the_op_of_compiled_graphs_replays_too(fake, replays, monkeypatch):
    usual = run(fake, CALLS["dense"], False)
    monkeypatch.setattr(torch_op, "is_eager", lambda q: False)
    for _ in range(4):
        assert run(fake, CALLS["dense"], False) == usual
    assert len(replays) == 2


def test_a_profiler_sees_every_launch(fake, replays, monkeypatch):
    attend, args, options = CALLS["paged"]
    for _ in range(3):
        attend(*args, **options)
    assert len(replays) == 1
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", lambda metadata: None)
    fake.log.clear()
    attend(*args, **options)
    assert len(replays) == 1 and len(fake.log) == 1


@pytest.mark.parametrize("version", ["3.7.0", "4.0.0"])
def test_other_versions_of_triton_are_not_replayed(fake, replays, monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    for _ in range(4):
        run(fake, CALLS["dense"], True)
    assert not replays


def test_kernels_with_tritons_scratch_memory_are_not_replayed(fake, replays, monkeypatch):
    init = compiled

    def needy(*args):
        made = init(*args)
        made._run.global_scratch_size = 16
        return made

    scratch = lambda size, align, stream: torch.empty(size, dtype=torch.int8)
    triton.set_allocator(scratch)
    monkeypatch.setitem(globals(), "compiled", needy)
    for _ in range(4):
        run(fake, CALLS["dense"], False)
    assert not replays


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", CALLS)
def test_a_replay_makes_the_same_launches(fake, replays, name, grad):
    if grad and name.startswith("paged"):
        pytest.skip("pages have no gradient")
    call = CALLS[name]
    usual = run(fake, call, grad)
    for _ in range(3):
        assert run(fake, call, grad) == usual
    torch_works = ("window, sinks", "portable, bias", "wide")  # it sums, it rounds dout
    passes = 1 + (grad and name not in torch_works)
    assert len(replays) == 2 * passes
