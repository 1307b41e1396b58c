"""Dispatch: the first backend that supports a call runs it, unless it defers; a named one runs it
or refuses. The registry: names, priorities, lazy loading.
"""

import subprocess
import sys

import pytest
import torch

import onchip
from onchip.core import dispatch
from onchip.core.backend import Backend, Result, make_backend
from onchip.core.device import DeviceInfo
from onchip.core.dispatch import plan
from onchip.core.problem import Problem, Tensors, has_uniform_lengths
from onchip.testing import make_qkv

H200 = DeviceInfo("cuda", "H200", (9, 0))
BF16 = torch.bfloat16


def problem(seqlen_q, seqlen_k, **fields):
    return Problem(1, seqlen_q, seqlen_k, 32, 8, 128, 128, BF16, BF16, 0.1, **fields)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "kernel"),
    [(8, 4096, "triton"), (16, 60, "hopper"), (4096, 4096, "hopper"), (16, 16, "hopper")],
)
def test_hopper_defers_queries_that_fill_no_tile_over_many_keys(seqlen_q, seqlen_k, kernel):
    chosen = plan(problem(seqlen_q, seqlen_k), H200)
    assert chosen.kernel == kernel
    reason = chosen.reasons.get("hopper", "")
    assert reason.startswith(f"leaves seqlen_q={seqlen_q} to triton") == (kernel == "triton")


@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        ({}, "hopper"),
        ({"page_size": 16}, "hopper"),
        ({"page_size": 8}, "triton"),
        ({"deterministic": True}, "triton"),
        ({"page_size": 16, "has_tree_mask": True}, "triton"),
    ],
)
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_few_queries_go_to_hopper_unless_cuts_must_be_fixed(seqlen_q, fields, kernel):
    assert plan(problem(seqlen_q, 4096, **fields), H200).kernel == kernel


@pytest.mark.parametrize(
    ("num_kv_heads", "seqlen", "fields", "kernel"),
    [
        (32, 64, {}, "triton"),
        (32, 64, {"has_mask": True}, "hopper"),
        (32, 65, {}, "hopper"),
        (8, 64, {}, "hopper"),
    ],
)
def test_hopper_leaves_half_empty_tiles_to_triton(num_kv_heads, seqlen, fields, kernel):
    call = problem(seqlen, seqlen, **fields)._replace(num_kv_heads=num_kv_heads)
    assert plan(call, H200).kernel == kernel


KV8_DTYPES = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("page_dtype", KV8_DTYPES)
def test_few_queries_over_pages_of_8_bits_go_to_hopper(page_dtype):
    call = problem(1, 4096, page_size=16, page_dtype=page_dtype)
    assert plan(call, H200).kernel == plan(call._replace(batch=2048), H200).kernel == "hopper"
    assert plan(call, DeviceInfo("cuda", "A100", (8, 0))).kernel == "triton"
    odd = plan(call._replace(head_dim=63), H200)
    assert odd.kernel == "tiled" and "pairs of elements" in odd.reasons["triton"]


@pytest.mark.parametrize("page_dtype", KV8_DTYPES)
@pytest.mark.parametrize(
    "changed",
    [
        {"seqlen_q": 512},
        {"head_dim": 64, "head_dim_v": 64},
        {"head_dim": 72, "head_dim_v": 72},
        {"head_dim": 256, "head_dim_v": 256},
        {"deterministic": True},
        {"batch": 2049},
    ],
)
def test_other_calls_over_pages_of_8_bits_go_to_triton(page_dtype, changed):
    call = problem(1, 4096, page_size=16, page_dtype=page_dtype)._replace(**changed)
    chosen = plan(call, H200)
    assert chosen.kernel == "triton" and "8-bit pages for few queries" in chosen.reasons["hopper"]
    with pytest.raises(onchip.UnsupportedError, match="'hopper' cannot serve this call"):
        plan(call, H200, "hopper")


def test_small_pages_of_8_bits_go_to_triton():
    chosen = plan(problem(1, 4096, page_size=8, page_dtype=torch.int8), H200)
    assert chosen.kernel == "triton" and "not of 8" in chosen.reasons["hopper"]


def test_a_kernel_that_is_named_does_not_defer():
    assert plan(problem(8, 4096), H200, "hopper").kernel == "hopper"


def test_only_the_forward_is_deferred():
    assert plan(problem(8, 4096), H200, None, backward=True).kernel == "hopper"


@pytest.mark.parametrize(
    ("seqlen_q", "fields", "reason"),
    [
        (8, {}, "splits the keys"),
        (128, {"packed": True}, "splits the keys"),
        (512, {"deterministic": True}, "one kernel for all lengths"),
    ],
)
def test_few_or_deterministic_queries_over_pages_are_left_to_triton(seqlen_q, fields, reason):
    paged = problem(seqlen_q, 4096, page_size=16, **fields)
    chosen = plan(paged, H200)
    assert chosen.kernel == "triton" and reason in chosen.reasons["hopper"]
    assert plan(paged, H200, "hopper").kernel == "hopper"


@pytest.mark.parametrize("packed", (False, True))
def test_chunks_over_pages_go_to_hopper(packed):
    assert plan(problem(512, 4096, page_size=16, packed=packed), H200).kernel == "hopper"


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "uniform", "kernel"),
    [
        (16, 32, True, "hopper"),  # segments of a cascade: each fills a tile
        (16, 32, False, "triton"),  # a chunk among decodes
        (512, 1, True, "triton"),  # decodes: a tile for each would be empty
        (2, 32, True, "triton"),
    ],
)
def test_packed_queries_of_uniform_lengths_fill_tiles_together(batch, seqlen_q, uniform, kernel):
    packed = problem(seqlen_q, 4096, page_size=16, packed=True, uniform_lengths=uniform)
    assert plan(packed._replace(batch=batch), H200).kernel == kernel


def test_lengths_are_uniform_if_few_queries_are_missing():
    packed = problem(32, 4096, page_size=16, packed=True)._replace(batch=4)
    tensors = lambda total: Tensors(*[torch.empty(total, 32, 128)] * 3)
    is_uniform = lambda total, p=packed: has_uniform_lengths(p, tensors(total))
    assert is_uniform(128) and is_uniform(96) and not is_uniform(95)
    assert not is_uniform(128, packed._replace(packed=False))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"page_size": 8}, "of 16, 32, 64, 128, 256 slots, not of 8"),
        ({"page_size": 16, "has_tree_mask": True}, "has no tree_mask"),
        ({"page_size": 16, "aligned": False}, "whole slots apart"),
    ],
)
def test_pages_that_hopper_refuses(fields, reason):
    paged = problem(512, 4096, **fields)
    assert plan(paged, H200).kernel == "triton"
    with pytest.raises(onchip.UnsupportedError, match=reason):
        plan(paged, H200, "hopper")


A100 = DeviceInfo("cuda", "A100", (8, 0))
MI300X = DeviceInfo("hip", "MI300X")
WIDE_CALLS = ({}, {"page_size": 16}, {"packed": True}, {"has_bias": True}, {"has_mask": True})


@pytest.mark.parametrize("device", [H200, A100, MI300X], ids=lambda device: device.name)
@pytest.mark.parametrize("dims", [(257, 257), (320, 64), (64, 320), (512, 512)])
@pytest.mark.parametrize("fields", WIDE_CALLS, ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 512])
@pytest.mark.parametrize("backward", [False, True])
def test_wide_heads_go_to_triton(device, dims, fields, seqlen_q, backward):
    call = problem(seqlen_q, 4096, **fields)._replace(head_dim=dims[0], head_dim_v=dims[1])
    chosen = plan(call, device, None, backward)
    assert chosen.kernel == "triton"
    if device is H200:
        assert f"up to 256 columns, not for head dims {dims[0]} and" in chosen.reasons["hopper"]


@pytest.mark.parametrize("device", [H200, A100, MI300X], ids=lambda device: device.name)
@pytest.mark.parametrize(
    ("dims", "dtype", "limit"),
    [
        ((513, 512), BF16, "512 columns of bfloat16"),
        ((576, 512), torch.float16, "512 columns of float16"),
        ((257, 64), torch.float32, "256 columns of float32"),
        ((64, 512), torch.float32, "256 columns of float32"),
    ],
)
@pytest.mark.parametrize(
    "fields", [call for call in WIDE_CALLS if "page_size" not in call], ids=str
)
@pytest.mark.parametrize("backward", [False, True])
def test_heads_wider_than_tiles_of_gpus_go_to_tiled(device, dims, dtype, limit, fields, backward):
    call = problem(512, 4096, **fields)._replace(head_dim=dims[0], head_dim_v=dims[1])
    call = call._replace(dtype=dtype, out_dtype=dtype)
    chosen = plan(call, device, None, backward)
    assert chosen.kernel == "tiled"
    assert f"up to {limit}, not for head dims {dims[0]} and" in chosen.reasons["triton"]
    with pytest.raises(onchip.UnsupportedError, match=f"up to {limit}.*kernel=None picks one"):
        plan(call, device, "triton", backward)


@pytest.mark.parametrize("device", [H200, A100, MI300X], ids=lambda device: device.name)
@pytest.mark.parametrize("seqlen_q", [1, 512])
@pytest.mark.parametrize(
    ("change", "kernel"),
    [({}, "triton"), ({"dtype": torch.float32}, "tiled"), ({"page_dtype": torch.int8}, "tiled")],
)
def test_latent_pages_of_16_bits_go_to_triton(device, seqlen_q, change, kernel):
    call = problem(seqlen_q, 4096, page_size=16)._replace(head_dim=576, head_dim_v=512, **change)
    assert plan(call, device, None).kernel == kernel


@pytest.mark.parametrize("device", [H200, A100, MI300X], ids=lambda device: device.name)
@pytest.mark.parametrize("page_dtype", KV8_DTYPES)
def test_wide_heads_over_pages_of_8_bits_go_to_tiled(device, page_dtype):
    call = problem(1, 4096, page_size=16, page_dtype=page_dtype)
    chosen = plan(call._replace(head_dim=320, head_dim_v=256), device)
    assert chosen.kernel == "tiled"
    assert "up to 256 columns of " in chosen.reasons["triton"]


def test_wide_heads_are_refused_by_hopper_in_a_sentence():
    call = problem(512, 4096)._replace(head_dim=320, head_dim_v=64)
    with pytest.raises(onchip.UnsupportedError, match="up to 256 columns, not for head dims 320 a"):
        plan(call, H200, "hopper")


class Constant(Backend):
    """out = 1 and lse = 0, for fp32 on the CPU."""

    def supports(self, problem, device):
        return None if problem.dtype == torch.float32 else f"takes float32, not {problem.dtype}"

    def forward(self, problem, x):
        return Result(torch.ones_like(x.q), x.q.new_zeros(x.q.shape[:-1]).transpose(1, 2))


@pytest.fixture
def register():
    """register_backend, undone after the test."""
    before = dispatch.backend_names()
    yield onchip.register_backend
    for name in set(dispatch.backend_names()) - set(before):
        onchip.unregister_backend(name)


def test_built_in_backends_are_in_order_and_complete():
    names = [name for name in dispatch.backend_names() if name in dispatch.BUILT_IN]
    assert names == list(dispatch.BUILT_IN)
    for name in names:
        backend = dispatch.get_backend(name)
        assert isinstance(backend, Backend) and None in backend.precisions
        assert backend.has_backward == (name != "pages_cpu")


def test_a_registered_backend_runs_calls_that_name_it(register):
    q, k, v = make_qkv(1, 8)
    register("constant", Constant())
    assert onchip.attention(q, k, v, kernel="constant").eq(1).all()
    assert not onchip.attention(q, k, v).eq(1).all()
    with pytest.raises(onchip.UnsupportedError, match="takes float32, not torch.float64"):
        onchip.attention(*(t.double() for t in (q, k, v)), kernel="constant")


@pytest.mark.parametrize(
    ("priority", "before"), [(601, None), (600, "hopper"), (250, "aten_cpu"), (-1, "reference")]
)
def test_priority_orders_backends(priority, before, register, monkeypatch):
    """At equal priority the built-in backend has precedence."""
    built_in = {name: dispatch._registry[name] for name in dispatch.BUILT_IN}
    monkeypatch.setattr(dispatch, "_registry", built_in)
    register("constant", Constant, priority=priority)
    names = dict(zip(dispatch.backend_names(), (None, *dispatch.backend_names()), strict=False))
    assert names["constant"] == before
    onchip.unregister_backend("constant")


def test_a_new_backend_replaces_cached_plans(register):
    q, k, v = make_qkv(1, 8)
    assert not onchip.attention(q, k, v).eq(1).all()
    register("constant", Constant, priority=1000)
    assert onchip.attention(q, k, v).eq(1).all()
    assert onchip.explain(q, k, v).plan.reasons["tiled"] == "constant has precedence"
    onchip.unregister_backend("constant")
    assert not onchip.attention(q, k, v).eq(1).all()


def test_a_factory_is_called_once_and_not_before_a_plan_needs_it(register):
    made = []
    register("constant", lambda: made.append(1) or Constant())
    assert made == []
    for _ in range(2):
        onchip.attention(*make_qkv(1, 8), kernel="constant")
    assert made == [1]


def test_another_backend_computes_a_backward_that_is_missing(register):
    q, k, v = (t.requires_grad_() for t in make_qkv(1, 8))
    register("constant", Constant, priority=1000)
    onchip.attention(q, k, v).sum().backward()
    assert q.grad is not None
    with pytest.raises(onchip.UnsupportedError, match="has no backward"):
        onchip.attention(q, k, v, kernel="constant").sum().backward()


def test_defaults_of_the_hooks():
    backend, x = Constant(), Tensors(*make_qkv(1, 8))
    call = problem(8, 8)
    assert backend.precisions == (None,) and not backend.reads_pages and not backend.has_backward
    assert backend.defers(call) is None and backend.resolve_precision(call) is None
    assert backend.get_merge_fn(call, x) is None and backend.get_accumulate_fn(call) is None
    assert not backend.can_partition_sms(call, call)
    assert backend.plan_splits(call, x, [(8, 8)]) is None
    with pytest.raises(onchip.UnsupportedError, match="Constant has no backward"):
        backend.backward(call, x, x.q, x.q, x.q, None)


def test_a_backend_from_functions():
    backend = make_backend(Constant().supports, Constant().forward, options={"page_size"})
    assert backend.reads_pages and not backend.has_backward
    assert backend.forward(problem(8, 8), Tensors(*make_qkv(1, 8))).out.eq(1).all()


def test_invalid_backends_are_not_registered():
    with pytest.raises(ValueError, match="'tiled' is registered already"):
        onchip.register_backend("tiled", Constant)
    with pytest.raises(ValueError, match="must be an identifier"):
        onchip.register_backend("my backend", Constant)
    with pytest.raises(TypeError, match="neither an onchip.Backend nor a function"):
        onchip.register_backend("constant", 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="name='constant' is not one of hopper, triton"):
        onchip.unregister_backend("constant")


def test_a_factory_that_makes_no_backend(register):
    register("constant", lambda: 3)
    with pytest.raises(TypeError, match="registered as 'constant' returned 3, not a Backend"):
        dispatch.get_backend("constant")
    register("abstract", Backend)
    with pytest.raises(TypeError, match="abstract"):
        dispatch.get_backend("abstract")


def test_paper_kernels_are_registered_by_the_lab():
    code = """
import onchip, torch
q = torch.ones(1, 4, 1, 8)
try:
    onchip.attention(q, q, q, kernel="paper_v1")
except ValueError as error:
    print(error)
import onchip.lab
print(onchip.attention(q, q, q, kernel="paper_v1").sum().item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    assert first == (
        f"kernel='paper_v1' is not one of {', '.join(dispatch.BUILT_IN)}"
        " (the kernels of the papers are registered by `import onchip.lab`)"
    )
    assert second == "32.0"
