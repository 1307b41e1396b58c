"""CachedLauncher launches the variant that Triton would choose. The kernels here are stand-ins,
except in the last tests; see also test_handles_triton.py.
"""

import gc
import inspect
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import onchip
import onchip.testing as ot
from onchip.kernels.runtime.launcher import MAX_SIGNATURES, MAX_VARIANTS, CachedLauncher
from tests.kernels.gpu import each_kernel

GRID = (7,)


class Compiled:
    def __init__(self, log, constants):
        self.log, self.constants = log, constants

    def __getitem__(self, grid):
        return lambda *args: self.log.append((self, grid, args))


class Kernel:
    """Compiles at every launch through Triton. `log` has (kernel, grid, arguments) of launches that
    skipped Triton. Parameters in capitals are constants; parameters that start with n are not
    specialised.
    """

    def __init__(self, fn, compiles=True):
        names = inspect.signature(fn).parameters.values()
        param = lambda p: SimpleNamespace(
            name=p.name,
            default=p.default,
            is_constexpr=p.name.isupper(),
            do_not_specialize=p.name.startswith("n"),
        )
        self.params = [param(p) for p in names]
        self.compiles, self.log, self.compiled = compiles, [], []

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, *args, **constants):
        self.compiled.append(Compiled(self.log, constants))
        return self.compiled[-1] if self.compiles else None


def kernel_of(x, y, heads, n, scale, WIDTH, CAUSAL, STAGES=2):
    """Only its signature is used."""


POINTER = torch.zeros(64)
PLAIN = (POINTER, None, 8, 100, 0.5, 64)


def launched(*calls, compiles=True):
    """The kernel after these launches, each (positional arguments, constants)."""
    kernel = Kernel(kernel_of, compiles)
    launcher = CachedLauncher(kernel)
    for args, constants in calls:
        launcher[GRID](*args, **constants)
    return kernel


def changed(place, value):
    return tuple(value if i == place else arg for i, arg in enumerate(PLAIN))


def test_the_second_launch_uses_the_compiled_kernel_directly():
    options = {"CAUSAL": True, "num_warps": 4}
    kernel = launched((PLAIN, options), (changed(3, 300), options))
    ((compiled, grid, args),) = kernel.log
    assert compiled is kernel.compiled[0] and len(kernel.compiled) == 1
    assert grid == (7, 1, 1)
    assert args == (*changed(3, 300), True, 2)  # constants in the order of the signature


@pytest.mark.parametrize(
    "args",
    [
        changed(0, POINTER.to(torch.bfloat16)),  # another dtype
        changed(0, POINTER[1:]),  # not on 16 bytes
        changed(1, POINTER),  # present
        changed(2, 1),  # a number that is specialised
        changed(3, 1 << 31),  # more than 32 bits
        changed(3, 100.0),  # another type
        changed(5, 128),  # a constant by position
    ],
    ids=["dtype", "alignment", "presence", "specialised", "width", "type", "constant"],
)
def test_another_variant_is_compiled(args):
    options = {"CAUSAL": True}
    kernel = launched((PLAIN, options), (args, options), (PLAIN, options), (args, options))
    assert len(kernel.compiled) == 2
    assert [entry[0] for entry in kernel.log] == kernel.compiled


def test_constants_and_options_are_part_of_the_variant():
    values = ({"CAUSAL": True}, {"CAUSAL": False}, {"CAUSAL": 1})  # 1 has another type in a kernel
    options = (*values, {"CAUSAL": True, "num_warps": 8})
    kernel = launched(*((PLAIN, each) for each in options * 2))
    assert len(kernel.compiled) == 4
    assert [entry[0] for entry in kernel.log] == kernel.compiled


def test_constants_are_distinguished_by_name():
    one, other = {"CAUSAL": 1, "STAGES": 2}, {"STAGES": 1, "CAUSAL": 2}
    assert len(launched((PLAIN, one), (PLAIN, other)).compiled) == 2


def test_floats_and_lengths_make_no_variants():
    options = {"CAUSAL": True}
    calls = [(changed(4, 0.25), options), (changed(3, 1), options), (changed(3, 0), options)]
    assert len(launched((PLAIN, options), *calls).compiled) == 1


def test_descriptors_are_distinguished_by_their_layout():
    """One layout object per dtype and block; base tensors change."""
    layouts = [object(), object()]
    calls = [
        (changed(1, SimpleNamespace(base=POINTER.clone(), layout=layouts[i])), {"CAUSAL": True})
        for i in (0, 1, 0, 1)
    ]
    kernel = launched(*calls)
    assert len(kernel.compiled) == 2
    assert [entry[0] for entry in kernel.log] == kernel.compiled
    assert kernel.log[1][2][1] is calls[3][0][1]


class Described:
    """A descriptor: a base, and a layout that outlives it."""

    def __init__(self, layout):
        self.base, self.layout = POINTER.clone(), layout


class Layout:
    pass


def test_no_tensor_is_kept_alive():
    tensor, described = POINTER.clone(), Described(Layout())
    refs = [weakref.ref(each) for each in (tensor, described, described.base)]
    layout = weakref.ref(described.layout)
    launcher = CachedLauncher(Kernel(kernel_of))
    launcher[GRID](tensor, described, *PLAIN[2:], CAUSAL=True)
    del tensor, described
    gc.collect()
    assert all(each() is None for each in refs)
    assert layout() is not None  # otherwise another layout could get its id, and its kernel


def test_old_variants_are_evicted():
    """A specialised integer takes ever new values. The newest variants stay cached, evicted ones
    keep nothing alive, their layouts included, and are launched correctly when they return.
    """
    kernel, layouts = Kernel(kernel_of), []
    launcher = CachedLauncher(kernel)
    launch = lambda heads, y: launcher[GRID](POINTER, y, heads, *PLAIN[3:], CAUSAL=True)
    for heads in range(3 * MAX_VARIANTS):
        described = Described(Layout())
        layouts.append(weakref.ref(described.layout))
        launch(heads, described)
    assert len(kernel.compiled) == 3 * MAX_VARIANTS and not kernel.log
    gc.collect()
    assert sum(layout() is not None for layout in layouts) == MAX_VARIANTS
    newest = Described(layouts[-1]())
    launch(heads, newest)
    assert kernel.log.pop()[0] is kernel.compiled[-1]
    launch(0, newest)
    launch(0, newest)
    assert len(kernel.compiled) == 3 * MAX_VARIANTS + 1
    assert kernel.log == [
        (kernel.compiled[-1], (7, 1, 1), (POINTER, newest, 0, *PLAIN[3:], True, 2))
    ]


def test_old_constants_are_evicted():
    kernel = Kernel(kernel_of)
    launcher = CachedLauncher(kernel)
    for causal in range(2 * MAX_SIGNATURES):
        launcher[GRID](*PLAIN, CAUSAL=causal)
    assert len(launcher._signatures) == MAX_SIGNATURES
    for causal in (2 * MAX_SIGNATURES - 1, 0):
        launcher[GRID](*PLAIN, CAUSAL=causal)
    assert len(kernel.log) == 1 and len(kernel.compiled) == 2 * MAX_SIGNATURES + 1


def test_threads_share_a_full_launcher():
    kernel, many = Kernel(kernel_of), 2 * MAX_VARIANTS
    launcher = CachedLauncher(kernel)
    with ThreadPoolExecutor(8) as pool:
        calls = [(i * i % many, i % 3) for i in range(4000)]
        list(pool.map(lambda c: launcher[GRID](*changed(2, c[0]), CAUSAL=c[1]), calls))
    assert len(kernel.log) + len(kernel.compiled) == 4000
    assert all(compiled.constants["CAUSAL"] == args[6] for compiled, _, args in kernel.log)
    assert all(
        len(signature.variants) <= MAX_VARIANTS for signature in launcher._signatures.values()
    )


def test_threads_share_a_launcher():
    """Every launch, in any order, uses a kernel that was compiled for its constants."""
    kernel = Kernel(kernel_of)
    launcher = CachedLauncher(kernel)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: launcher[GRID](*PLAIN, CAUSAL=i % 7), range(2000)))
    assert len(kernel.log) + len(kernel.compiled) == 2000
    assert all(compiled.constants["CAUSAL"] == args[6] for compiled, _, args in kernel.log)
    assert len(kernel.compiled) <= 7 * 8


def test_nothing_is_cached_without_a_compiled_kernel():
    """The interpreter."""
    options = {"CAUSAL": True}
    kernel = launched((PLAIN, options), (PLAIN, options), compiles=False)
    assert len(kernel.compiled) == 2 and not kernel.log


def test_amd_always_launches_through_triton(monkeypatch):
    """There Triton's key includes whether a tensor is larger than 2 GB."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    kernel = launched((PLAIN, {"CAUSAL": True}), (PLAIN, {"CAUSAL": True}))
    assert len(kernel.compiled) == 2 and not kernel.log


def shifted(t):
    """The same, shifted by one number: no longer aligned to 16 bytes."""
    return t.new_empty(t.numel() + 1)[1:].copy_(t)


@each_kernel
def test_first_and_later_launches_are_accurate(kernel):
    sinks = torch.randn(4, device="cuda")
    attend = lambda *x, **options: onchip.attention(*x, return_lse=True, kernel=kernel, **options)
    for turn in range(3):
        for each in (sinks, shifted(sinks), sinks.bfloat16(), None):
            for n in (199, 256, 400):
                q, k, v = ot.make_qkv(1 + turn, n, num_heads=4, dtype=torch.bfloat16, device="cuda")
                options = {"causal": True} if each is None else {"causal": True, "sinks": each}
                ot.assert_accurate(attend, q, k, v, grad=True, **options)


@each_kernel
def test_a_direct_launch_uses_the_current_stream_and_can_be_captured(kernel):
    q, k, v = ot.make_qkv(2, 200, num_heads=4, dtype=torch.bfloat16, device="cuda")
    attend = lambda: onchip.attention(q, k, v, causal=True, kernel=kernel)
    expected = attend()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        torch.testing.assert_close(attend(), expected, rtol=0, atol=0)
        torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
