"""Expressions: what is traced is what torch computes, with the derivatives of autograd, and text
holds all of it.
"""

import pytest
import torch
from torch.autograd import grad

import onchip
from onchip.core.problem import Tensors
from onchip.kernels.cpu.score_mod import ModifiedTile
from onchip.score_mods import ScoreMod, trace
from onchip.score_mods.evaluate import Cells
from onchip.score_mods.expression import from_text, to_text
from tests.grids import mark_all_after
from tests.score_mods.functions import CASES, RandomFunction

F64 = torch.float64
BATCH, HEADS, ROWS, KEYS = 2, 3, 6, 7


@pytest.fixture(autouse=True)
def wide_default():
    """torch computes 0.5 * q of an integer q in the default dtype, and onchip in that of scores."""
    torch.set_default_dtype(F64)
    yield
    torch.set_default_dtype(torch.float32)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def indices():
    shapes = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
    return [
        torch.arange(n).view(s) for n, s in zip((BATCH, HEADS, ROWS, KEYS), shapes, strict=True)
    ]


def random_function(seed):
    function = RandomFunction(seed)
    tensors = draw(HEADS, seed=seed), draw(ROWS, 5, seed=seed + 1)
    function.tensors = *(t.requires_grad_() for t in tensors), torch.arange(KEYS) % 5
    return function


def tile_of(mod: ScoreMod, score, visible=None):
    floats, integers = mod.flatten()
    x = Tensors(score, score, score, captured=floats, captured_ints=integers)
    b, h, q, k = (i.view(i.shape[:1] + (1,) * 3) if n == 0 else i for n, i in enumerate(indices()))
    cells = Cells(b, h.view(1, -1, 1, 1), q.view(1, 1, -1, 1), k.view(1, 1, 1, -1), visible)
    return ModifiedTile(mod.text, x, score, cells)


def check(function, tensors, seed):
    """Values, first and second derivatives of one function on one tile, against autograd."""
    score = draw(BATCH, HEADS, ROWS, KEYS, seed=seed + 7).requires_grad_()
    expected = function(score, *indices()) + 0 * score
    mod = trace(function)
    assert from_text(to_text(from_text(mod.text))) == from_text(mod.text)
    tile = tile_of(mod, score.detach())
    torch.testing.assert_close(tile.scores(), expected.detach(), rtol=1e-12, atol=1e-12)
    used = [t for t in mod.tensors if t.requires_grad]
    ds = draw(BATCH, HEADS, ROWS, KEYS, seed=seed + 8)
    floats = mod.flatten()[0]
    dcaptured = None if floats is None else torch.zeros(floats.shape, dtype=F64)
    if dcaptured is not None:
        tile.add_captured_gradient(dcaptured, ds)
    wanted = grad(expected, [score, *used], ds, create_graph=True, materialize_grads=True)
    near(tile.score_gradient(ds), wanted[0])
    near_captured(dcaptured, wanted[1:])
    check_second_order(tile, score, used, wanted, ds, seed)


def check_second_order(tile, score, used, gradients, ds, seed):
    """The gradient of the tangent in a random direction, plus that of the value."""
    direction = draw(*score.shape, seed=seed + 9)
    floats = tile.evaluator.floats
    t_captured = None if floats is None else draw(*floats.shape, seed=seed + 10)
    split = [] if floats is None else t_captured.split([t.numel() for t in used])
    along = [direction, *(part.view(t.shape) for part, t in zip(split, used, strict=True))]
    tangent = sum((g * u).sum() for g, u in zip(gradients, along, strict=True))
    zeros = torch.zeros_like(score)
    wanted = [zeros, *(torch.zeros_like(t) for t in used)]
    if tangent.requires_grad:
        wanted = grad(tangent, [score, *used], materialize_grads=True)
    dcaptured = None if floats is None else torch.zeros(floats.shape, dtype=F64)
    grads = tile.second_order(zeros, ds, direction, t_captured, dcaptured)
    near(grads[0], wanted[0])
    near_captured(dcaptured, wanted[1:])


def near(got, wanted):
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-9, atol=1e-9)


def near_captured(dcaptured, wanted):
    if dcaptured is not None and wanted:
        near(dcaptured, torch.cat([w.reshape(-1) for w in wanted]))


@pytest.mark.parametrize("name", CASES)
def test_named_functions(name):
    make, tensors = CASES[name]
    captured = tensors(HEADS, ROWS, KEYS, draw)
    for t in captured:
        t.requires_grad_(t.is_floating_point())
    check(make(*captured), captured, 0)


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_functions(first):
    for seed in range(first, first + 20):
        function = random_function(seed)
        check(function, function.tensors, seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", mark_all_after(4, range(1000, 3500, 250)))
def test_more_random_functions(first):
    for seed in range(first, first + 250):
        function = random_function(seed)
        check(function, function.tensors, seed)


def test_no_operation_is_recorded_twice_and_none_that_is_not_used():
    def twice(score, b, h, q, k):
        unused = score * 3.0 + q
        del unused
        return torch.tanh(score / 2) + torch.tanh(score / 2)

    assert trace(twice).text == "|score;const f 2.0;div 0 1;tanh 2;add 3 3"


def test_a_branch_that_is_not_chosen_has_no_share():
    """Reverse mode would give 0 * inf = NaN there, as autograd does."""
    mod = trace(lambda score, b, h, q, k: torch.where(score > 0, torch.sqrt(score), score))
    score = torch.tensor([-1.0, 0.0, 4.0, 1.0], dtype=F64).expand(BATCH, HEADS, ROWS, 4)
    tile = tile_of(mod, score.contiguous())
    wanted = torch.tensor([1.0, 1.0, 0.25, 0.5], dtype=F64).expand_as(score)
    near(tile.score_gradient(torch.ones_like(score)), wanted)


def test_a_hidden_cell_has_no_share():
    """log has an infinite derivative at 0, the score of a hidden key of zeros."""
    q = torch.ones(1, 2, 1, 4, dtype=F64)
    k = torch.ones(1, 3, 1, 4, dtype=F64)
    k[:, 2] = 0.0
    leaves = [t.requires_grad_() for t in (q, k)]
    for kernel in ("tiled", "reference"):
        out = onchip.attention(
            *leaves, k, score_mod=lambda s, b, h, q, k: torch.log(s), causal=True, kernel=kernel,
            window_size=(0, 0),
        )  # fmt: skip
        keep = onchip.attention(
            *leaves, k, score_mod=lambda s, b, h, q, k: torch.log(s), kernel=kernel,
            mask=lambda b, h, q, k: k < 2,
        )  # fmt: skip
        assert torch.isfinite(keep).all() and out.shape == keep.shape
        for g in grad(keep.square().sum(), leaves):
            assert torch.isfinite(g).all()
