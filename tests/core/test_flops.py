"""FlopCounterMode counts attention as it counts torch's own."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

import onchip

SHAPES = {  # batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v
    "plain": (2, 63, 63, 4, 4, 32, 32),
    "grouped": (1, 17, 111, 6, 2, 16, 16),
    "narrow values": (2, 31, 31, 2, 2, 48, 16),
    "multi-query": (1, 1, 111, 4, 1, 16, 24),
    "latent": (1, 3, 17, 4, 1, 576, 512),
}


def count(function, *args, **options):
    with FlopCounterMode(display=False) as counter:
        function(*args, **options)
    return counter.get_total_flops()


def inputs(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v, **kind):
    shapes = (seqlen_q, heads, head_dim), (seqlen_k, kv_heads, head_dim)
    shapes += ((seqlen_k, kv_heads, head_dim_v),)
    return [torch.randn(batch, *shape, requires_grad=True, **kind) for shape in shapes]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (7, 3)}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_to_sdpa(shape, options):
    """The formulas of scaled_dot_product_attention; pairs that are hidden are counted, too."""
    x = inputs(*SHAPES[shape], device="meta")
    batch, _, heads, _ = x[0].shape  # older formulas take as many heads of k and v
    q, k, v = shapes = [(batch, heads, t.shape[1], t.shape[3]) for t in x]
    forward = flop_counter.sdpa_flop_count(*shapes)
    with torch.no_grad():
        assert count(onchip.attention, *x, **options) == forward
    backward = flop_counter.sdpa_backward_flop_count((*q[:3], v[3]), *shapes)
    step = lambda: onchip.attention(*x, **options).sum().backward()
    assert count(step) == forward + backward


def test_equal_to_the_ops_of_sdpa():
    """The ops that scaled_dot_product_attention calls on a GPU, under the same counter."""
    x = inputs(*SHAPES["plain"], device="meta")
    q, k, v = (t.detach().transpose(1, 2) for t in x)
    forward, backward = (
        getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{end}")
        for end in ("", "_backward")
    )

    def step():
        out, lse, cu_q, cu_k, max_q, max_k, *rng, _ = forward(q, k, v)
        saved = out, lse, cu_q, cu_k, max_q, max_k, 0.0, False, *rng
        backward(torch.empty_like(out), q, k, v, *saved)

    assert count(step) == count(lambda: onchip.attention(*x).sum().backward())


@pytest.mark.parametrize("shape", SHAPES)
def test_devices_and_fakes_count_alike(shape):
    step = lambda q, k, v: onchip.attention(q, k, v).sum().backward()
    numbers = [count(step, *inputs(*SHAPES[shape], device=device)) for device in ("cpu", "meta")]
    with FakeTensorMode():
        numbers.append(count(step, *inputs(*SHAPES[shape])))
    assert len(set(numbers)) == 1


def test_packed_sequences_count_their_own_pairs():
    q, k, v = (t[0] for t in inputs(1, 40, 40, 4, 2, 16, 8))
    cu = torch.tensor([0, 7, 40], dtype=torch.int32)
    step = lambda: onchip.varlen_attention(q, k, v, cu, cu, 33, 33).sum().backward()
    pairs = 4 * (7 * 7 + 33 * 33)
    assert count(step) == pairs * 2 * (16 + 8) + pairs * 2 * (3 * 16 + 2 * 8)
    meta = [t.detach().to("meta") for t in (q, k, v, cu, cu)]  # lengths without values
    assert count(onchip.varlen_attention, *meta, 33, 33) == 4 * 2 * 33 * 33 * 2 * (16 + 8)


def test_pages_count_the_keys_that_are_used():
    pages = torch.randn(2, 5, 16, 2, 8)
    table = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    seqlens = torch.tensor([19, 6], dtype=torch.int32)
    call = lambda q, **options: onchip.paged_attention(q, *pages, table, seqlens, **options)
    assert count(call, torch.randn(2, 3, 4, 8)) == 4 * 3 * (19 + 6) * 4 * 8
    cu = torch.tensor([0, 1, 4], dtype=torch.int32)
    packed = count(call, torch.randn(4, 4, 8), cu_seqlens_q=cu, max_seqlen_q=3)
    assert packed == 4 * (1 * 19 + 3 * 6) * 4 * 8


def test_a_graph_that_calls_the_ops_is_counted():
    """The registry of torch has the formulas: no public function runs here."""
    x = [t.detach() for t in inputs(*SHAPES["grouped"])]
    graph = make_fx(lambda *x: onchip.attention(*x))(*x)
    assert count(graph, *x) == count(onchip.attention, *x) > 0


def test_tangents_count_their_products():
    """The forward runs first, then one pass with the products that the tangents need."""
    q, k, v = (t.detach().to("cpu") for t in inputs(*SHAPES["narrow values"]))
    pairs, dim, dim_v = 2 * 2 * 31 * 31 * 2, 48, 16
    forward = pairs * (dim + dim_v)
    attend = lambda q, k, v: onchip.attention(q, k, v)
    jvp = torch.func.jvp
    assert count(jvp, attend, (q, k, v), (q, k, v)) == forward + pairs * 3 * (dim + dim_v)
    of_q = lambda q: onchip.attention(q, k, v)
    assert count(jvp, of_q, (q,), (q,)) == forward + pairs * 2 * (dim + dim_v)
    of_v = lambda v: onchip.attention(q, k, v)
    assert count(jvp, of_v, (v,), (v,)) == forward + pairs * (dim + 3 * dim_v)
