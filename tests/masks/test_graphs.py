"""Masks that are not built: one graph for torch.compile, and pickling for other processes."""

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing

import onchip
from onchip import masks
from tests.masks.cases import CALLS, PRESETS, make

N = 200
CU = torch.tensor([0, 70, N])
LENGTHS = torch.tensor([90, N])
DOCUMENTS = torch.repeat_interleave(torch.arange(2), CU.diff())


def in_window(b, h, q, k):
    return (q >= k) & (q - k < 50)


OUTSIDE = masks.document(CU) & masks.causal()
OUTSIDE_MOD = masks.mod(lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k])
RULES = {
    "outside": lambda cu, lengths: OUTSIDE,
    "document": lambda cu, lengths: masks.document(cu) & masks.causal(),
}
MORE = {
    "outside mod": lambda cu, lengths: OUTSIDE_MOD,
    "closure": lambda cu, lengths: lambda b, h, q, k: (k < lengths[b]) & (q >= h),
    "joined": lambda cu, lengths: (OUTSIDE | masks.mod(in_window)) & masks.padding(lengths),
    "function": lambda cu, lengths: in_window,
    "prefix": lambda cu, lengths: masks.prefix_lm(lengths) | masks.window(3, 0),
    "dense": lambda cu, lengths: masks.causal() & masks.dense(DOCUMENTS[:, None] == DOCUMENTS),
    "drawn outside": lambda cu, lengths, mask=masks.bigbird(): mask,  # noqa: B008
    "preset": lambda cu, lengths: masks.dilated(20, 3) & masks.document(cu) | OUTSIDE,
}


def check_one_graph(rule, dynamic):
    torch._dynamo.reset()
    attend = lambda q, k, v, cu, lengths: onchip.attention(q, k, v, mask=rule(cu, lengths))
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    x = [torch.randn(2, N, 2, 16, requires_grad=True) for _ in range(3)]
    results = []
    for fn in (attend, compiled):
        out = fn(*x, CU, LENGTHS)
        results.append([out, *torch.autograd.grad(out.square().sum(), x)])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    return compiled


@pytest.mark.parametrize("name", RULES)
def test_an_unbuilt_mask_compiles_to_one_graph(name):
    compiled = check_one_graph(RULES[name], dynamic=True)
    if name == "document":
        x = torch.randn(3, 2, N, 2, 16)
        with pytest.raises(RuntimeError, match="a mask do not fit the lengths"):
            compiled(*x, torch.tensor([0, 70, N - 1]), LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_masks_compile_to_one_graph(name):
    check_one_graph(MORE[name], dynamic=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_presets_compile_to_one_graph(name):
    sizes = PRESETS[name].calls[0]
    check_one_graph(lambda cu, lengths: getattr(masks, name)(**sizes), dynamic=True)


SIZES = {name: preset.calls[0] for name, preset in PRESETS.items() if preset.calls[0]}
SIZES |= {"window": {"left": 9, "right": 3}, "prefix_lm": {"prefix_len": 20}}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_may_be_variables_of_a_graph(name):
    """The graph has the mask alone, which is all that depends on the sizes."""
    torch._dynamo.reset()
    mask_of = lambda **sizes: getattr(masks, name)(**sizes)
    in_graph = lambda sizes: mask_of(**sizes).in_graph(1, 1, 400, 400, torch.device("cpu"))
    compiled = torch.compile(in_graph, backend="eager", fullgraph=True, dynamic=True)
    for more in (0, 2, 4):
        sizes = {n: size + more if size else 0 for n, size in SIZES[name].items()}
        found = masks.as_mask(compiled(sizes)).build(1, 1, 400, 400)
        assert torch.equal(found.to_dense(), mask_of(**sizes).build(1, 1, 400, 400).to_dense())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "dilated"])  # intervals, and cells
def test_attention_with_sizes_that_are_variables_of_a_graph(name):
    torch._dynamo.reset()
    attend = lambda x, sizes: onchip.attention(*x, mask=getattr(masks, name)(**sizes))
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.randn(3, 2, N, 2, 16)
    for more in (0, 2, 4):
        sizes = {n: size + more if size else 0 for n, size in SIZES[name].items()}
        torch.testing.assert_close(compiled(x, sizes), attend(x, sizes))


def test_a_new_mask_does_not_recompile():
    graphs = torch._dynamo.testing.CompileCounter()
    fn = torch.compile(
        lambda q, k, v, mask: onchip.attention(q, k, v, mask=mask), backend=graphs, fullgraph=True
    )
    q, k, v = torch.randn(3, 2, N, 2, 16)
    for end in (50, 100, 150, 170, 190):
        mask = masks.document([0, end, N]) & masks.causal()
        torch.testing.assert_close(fn(q, k, v, mask), onchip.attention(q, k, v, mask=mask))
    assert graphs.frame_count <= 2  # the second holds the number of a mask as a variable


PICKLED = {
    "document": lambda: masks.document([0, 70, N]) & masks.causal(),
    "lengths": lambda: ~masks.padding(LENGTHS) | masks.prefix_lm(LENGTHS),
    "window": lambda: masks.window(9, 3) | masks.full() & masks.spans(torch.ones(1, 1, N, 2).int()),
    "dense": lambda: masks.dense(DOCUMENTS[:, None] == DOCUMENTS),
    "mod": lambda: masks.mod(in_window),
    **{f"{name} {call}": lambda name=name, call=call: make(name, call) for name, call in CALLS},
}


@pytest.mark.parametrize("name", PICKLED)
def test_rules_are_pickled_and_copied(name):
    mask = PICKLED[name]()
    expected = mask.build(2, 2, N, N).to_dense()
    data = pickle.dumps(mask)
    assert len(data) < 20_000  # the rule, without built masks
    for other in (pickle.loads(data), copy.deepcopy(mask)):
        assert str(other) == str(mask) and other.number != mask.number
        assert torch.equal(other.build(2, 2, N, N).to_dense(), expected)


class Packed(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return masks.document([0, 70 + i, N]) & masks.causal()


def test_a_worker_of_a_data_loader_makes_masks():
    loader = torch.utils.data.DataLoader(Packed(), batch_size=None, num_workers=1)
    for i, mask in enumerate(loader):
        expected = Packed()[i].build(1, 1, N, N).to_dense()
        assert torch.equal(mask.build(1, 1, N, N).to_dense(), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, None])
def test_offsets_of_any_integer_type(dtype):
    given = CU.tolist() if dtype is None else CU.to(dtype)
    expected = DOCUMENTS[:, None] == DOCUMENTS
    assert torch.equal(masks.document(given).build(1, 1, N, N).to_dense()[0, 0], expected)
