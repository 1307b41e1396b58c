"""Models of torchvision and timm run onchip after one line, `sdpa.activate()`. Outputs and
gradients are those of torch, in training and in inference.
"""

import pytest
import torch

from onchip.integrations import sdpa

pytestmark = pytest.mark.programs


def run(model, x):
    """The output, the gradient of the input, and the output in inference."""
    leaf = x.clone().requires_grad_()
    out = model(leaf)
    (grad,) = torch.autograd.grad(out.square().sum(), leaf)
    with torch.no_grad():
        return [out.detach(), grad, model(x)]


def compare(model, size):
    """Each layer is served in all three passes: forward, backward, inference."""
    model = model.double().eval()
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    expected = run(model, x)
    with sdpa.active():
        found = run(model, x)
        counts = sdpa.counts()
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference)
    assert sum(counts.served.values()) == 3 * 2 and not counts.left


def test_torchvision():
    """Its ViT calls nn.MultiheadAttention, whose fast path would bypass SDPA in inference."""
    models = pytest.importorskip("torchvision.models")
    compare(models.VisionTransformer(32, 8, 2, 2, 32, 64), 32)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_timm(name):
    timm = pytest.importorskip("timm")
    size = 4 * int(name.split("patch")[1][:2])
    compare(timm.create_model(name, img_size=size, depth=2, num_classes=10), size)
