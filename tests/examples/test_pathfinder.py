"""examples/pathfinder*.py: labels that the images bear out, and runs that go on where they were."""

import json

import pathfinder
import pytest
import torch
import torch.nn.functional as F
from pathfinder_images import GAP, draw
from torch._dynamo.testing import CompileCounterWithBackend

import onchip

CPU = torch.device("cpu")


def piece(image, row, column):
    """What a pixel is in one piece with once gaps are closed: pixels within GAP + 1 are joined."""
    reach = int(GAP) + 1
    reached = torch.zeros_like(image)
    reached[row, column] = 1
    while True:
        wider = F.max_pool2d(reached[None], 2 * reach + 1, stride=1, padding=reach)[0] * image
        if torch.equal(wider, reached):
            return reached
        reached = wider


@pytest.mark.parametrize(("size", "count"), [(16, 100), (32, 100), (64, 40), (128, 12)])
def test_labels_match_the_images(size, count):
    scene = draw(count, size, seed=7)
    assert scene.images.shape == (count, size, size) and set(scene.images.unique().tolist()) == {
        0,
        1,
    }
    for image, label, dots, marked in zip(*scene, strict=True):
        row, column = dots.round().long().unbind(-1)
        pieces = [piece(image, row[i], column[i]) for i in range(2)]
        assert bool(pieces[0][row[1], column[1]]) == bool(label)
        assert torch.equal(pieces[0].maximum(pieces[1]), marked)


@pytest.fixture(scope="module")
def many():
    return draw(1500, 32, seed=3)


def test_labels_are_even(many):
    assert abs(many.labels.float().mean() - 0.5) < 4 * 0.5 / len(many.labels) ** 0.5


def test_the_distance_of_the_dots_does_not_tell(many):
    """The best threshold is right in less than 65 % of the images."""
    apart = (many.dots[:, 0] - many.dots[:, 1]).norm(dim=-1)
    bounds = apart.sort().values[::20]
    right = ((apart[:, None] < bounds) == many.labels.bool()[:, None]).float().mean(0)
    assert max(right.max(), (1 - right).max()) < 0.65


def test_nor_does_how_much_is_lit(many):
    lit = many.images.flatten(1).sum(1)
    yes, no = lit[many.labels == 1], lit[many.labels == 0]
    assert abs(yes.mean() - no.mean()) < 4 * lit.std() * (1 / len(yes) + 1 / len(no)) ** 0.5


def test_images_depend_on_the_seed_alone():
    one, same, other = (draw(9, 32, seed) for seed in (5, 5, 6))
    assert torch.equal(one.images, same.images) and not torch.equal(one.images, other.images)


def test_the_seeds_that_are_held_out_are_others():
    """A generator of the CPU reads 32 bits of a seed."""
    assert pathfinder.HELD_OUT % (1 << 32) == pathfinder.HELD_OUT
    trained_on, held_out = draw(4, 32, 0 * 1009 + 32), draw(4, 32, pathfinder.HELD_OUT + 32)
    assert not torch.equal(trained_on.images, held_out.images)


def test_half_of_a_head_turns_with_the_row_and_half_with_the_column():
    cos, sin = pathfinder.turns_of(16, CPU)
    half = pathfinder.HEAD_DIM // 4
    assert cos.shape == sin.shape == (256, 1, 2 * half)
    same_row, same_column = [3 * 16 + 5, 3 * 16 + 9], [3 * 16 + 5, 7 * 16 + 5]
    for turned in (cos[:, 0], sin[:, 0]):
        rows, columns = turned[:, :half], turned[:, half:]
        assert torch.equal(*rows[same_row]) and not torch.equal(*columns[same_row])
        assert torch.equal(*columns[same_column]) and not torch.equal(*rows[same_column])


def test_the_sparse_mask_is_a_butterfly_of_rows():
    """At 128 x 128 a block of 128 tokens is a row of pixels: it sees 8 of 128."""
    q, k = torch.zeros(1, 16384, 1, 16), torch.randn(1, 16384, 1, 16)
    mask = pathfinder.sparse_mask(128, CPU)
    _, lse = onchip.attention(q, k, k, mask=mask, return_lse=True)
    torch.testing.assert_close(lse.exp(), torch.full_like(lse, 8 * 128.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("sparse", [False, True])
def test_compiled_blocks_learn_the_same(sparse):
    """No graph break, dense or with a mask; one program serves all blocks."""
    torch.manual_seed(0)
    model, scene = pathfinder.Pixels(32, 2), draw(2, 16, 1)
    mask = pathfinder.sparse_mask(16, CPU) if sparse else None
    losses = [pathfinder.loss_of(model, scene, mask, 1.0)]
    torch._dynamo.reset()
    programs = CompileCounterWithBackend("aot_eager")
    pathfinder.compile_blocks(model, backend=programs)
    losses.append(pathfinder.loss_of(model, scene, mask, 1.0))
    grads = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads)
    assert programs.frame_count == 1


def test_a_run_resumes_at_its_checkpoint(tmp_path, monkeypatch):
    """The first ends early, at 16 x 16; the second learns it, then goes on with 32 x 32."""
    monkeypatch.setattr(pathfinder, "EVERY", 2)
    monkeypatch.setitem(pathfinder.TOKENS, "cpu", 1024)
    accuracies = iter([0.6, 0.7, 0.96, 0.97])
    monkeypatch.setattr(pathfinder, "accuracy", lambda *args: next(accuracies))
    curves = []
    for sizes, enough in ((["16"], 0.65), (["16", "32"], 0.95)):
        monkeypatch.setattr(pathfinder, "ENOUGH", enough)
        options = ["--sizes", *sizes, "--minutes", "9", "--width", "32", "--layers", "1"]
        options += ["--folder", str(tmp_path), "--device", "cpu", "--held-out", "8"]
        monkeypatch.setattr("sys.argv", ["pathfinder.py", *options])
        pathfinder.main()
        curves.append(json.loads((tmp_path / "curve.json").read_text()))
    first, second = (curve["curve"] for curve in curves)
    assert second[: len(first)] == first
    at = [(size, step, accuracy) for size, step, _, _, accuracy in second]
    assert at == [(16, 2, 0.6), (16, 4, 0.7), (16, 6, 0.96), (32, 2, 0.97)]
    assert set(curves[1]["step_ms"]["32"]) == {"dense", "block-sparse"}
    assert "thread" in curves[1]["device"] and curves[1]["torch"] == torch.__version__
    assert "<svg" in (tmp_path / "curve.svg").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("sparse", [False, True])
def test_a_gpu_computes_the_loss_of_a_cpu(sparse):
    """The same weights and images; bf16 on both."""
    torch.manual_seed(0)
    model, scene, losses = pathfinder.Pixels(64, 2), draw(3, 32, 1), []
    for device in (CPU, torch.device("cuda")):
        there = type(scene)(*(t.to(device) for t in scene))
        mask = pathfinder.sparse_mask(32, device) if sparse else None
        losses.append(pathfinder.loss_of(model.to(device), there, mask, 1.0))
        losses[-1].backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.01)
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.gpu
def test_images_drawn_on_a_gpu_are_of_the_same_kind():
    scene = draw(500, 32, 3, "cuda")
    assert scene.images.device.type == "cuda" and len(scene.labels) == 500
    assert abs(scene.labels.float().mean() - 0.5) < 4 * 0.5 / 500**0.5


def test_accuracy_is_of_images_that_were_held_out(monkeypatch):
    seeds = []

    def drawn(count, size, seed, device):
        seeds.append(seed)
        return draw(count, size, seed, device)

    monkeypatch.setattr(pathfinder, "draw", drawn)
    monkeypatch.setattr(pathfinder, "JUDGED", 8 * 256)
    knows = lambda images, mask: (images.new_full((len(images),), 1.0), None)  # says yes to all
    right = pathfinder.accuracy(knows, pathfinder.held_out(16, 20, CPU), None)
    labels = torch.cat([draw(8, 16, seed).labels for seed in seeds])
    assert right == int(labels.sum()) / 24 and len(labels) == 24
    assert min(seeds) == pathfinder.HELD_OUT
