"""Who serves: the first that can, unless it defers; who was named serves or refuses."""

import pytest
import torch

import onchip
from onchip.dispatch import plan
from onchip.problem import DeviceInfo, Problem, Tensors, is_even

H200 = DeviceInfo("cuda", "H200", (9, 0))
BF16 = torch.bfloat16


def problem(seqlen_q, seqlen_k, **fields):
    return Problem(1, seqlen_q, seqlen_k, 32, 8, 128, 128, BF16, BF16, 0.1, **fields)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "kernel"),
    [(8, 4096, "triton"), (16, 60, "hopper"), (4096, 4096, "hopper"), (16, 16, "hopper")],
)
def test_hopper_defers_queries_that_fill_no_tile_over_many_keys(seqlen_q, seqlen_k, kernel):
    found = plan(problem(seqlen_q, seqlen_k), H200)
    assert found.kernel == kernel
    reason = found.reasons.get("hopper", "")
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
    asked = problem(seqlen, seqlen, **fields)._replace(num_kv_heads=num_kv_heads)
    assert plan(asked, H200).kernel == kernel


KV8_DTYPES = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("page_dtype", KV8_DTYPES)
def test_few_queries_over_pages_of_8_bits_go_to_hopper(page_dtype):
    asked = problem(1, 4096, page_size=16, page_dtype=page_dtype)
    assert plan(asked, H200).kernel == plan(asked._replace(batch=2048), H200).kernel == "hopper"
    assert plan(asked, DeviceInfo("cuda", "A100", (8, 0))).kernel == "triton"
    odd = plan(asked._replace(head_dim=63), H200)
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
    asked = problem(1, 4096, page_size=16, page_dtype=page_dtype)._replace(**changed)
    found = plan(asked, H200)
    assert found.kernel == "triton" and "8-bit pages for few queries" in found.reasons["hopper"]
    with pytest.raises(onchip.UnsupportedError, match="'hopper' cannot serve this call"):
        plan(asked, H200, "hopper")


def test_small_pages_of_8_bits_go_to_triton():
    found = plan(problem(1, 4096, page_size=8, page_dtype=torch.int8), H200)
    assert found.kernel == "triton" and "not of 8" in found.reasons["hopper"]


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
    found = plan(paged, H200)
    assert found.kernel == "triton" and reason in found.reasons["hopper"]
    assert plan(paged, H200, "hopper").kernel == "hopper"


@pytest.mark.parametrize("packed", (False, True))
def test_chunks_over_pages_go_to_hopper(packed):
    assert plan(problem(512, 4096, page_size=16, packed=packed), H200).kernel == "hopper"


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "even", "kernel"),
    [
        (16, 32, True, "hopper"),  # segments of a cascade: each fills a tile
        (16, 32, False, "triton"),  # a chunk among decodes
        (512, 1, True, "triton"),  # decodes: a tile for each would be empty
        (2, 32, True, "triton"),
    ],
)
def test_packed_queries_count_together_where_all_are_as_many(batch, seqlen_q, even, kernel):
    packed = problem(seqlen_q, 4096, page_size=16, packed=True, even=even)
    assert plan(packed._replace(batch=batch), H200).kernel == kernel


def test_packed_queries_are_even_if_few_are_missing():
    packed = problem(32, 4096, page_size=16, packed=True)._replace(batch=4)
    even = lambda total, asked=packed: is_even(asked, Tensors(*[torch.empty(total, 32, 128)] * 3))
    assert even(128) and even(96) and not even(95)
    assert not even(128, packed._replace(packed=False))


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
