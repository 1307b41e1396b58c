"""examples/sharpness.py: products with the Hessian, its largest eigenvalue, the bound 2 / lr."""

import pytest
import sharpness
import torch
from relative_bias import NUM_TOKENS, Model
from torch.func import functional_call, hessian

import onchip.testing as ot


@pytest.fixture
def small(monkeypatch):
    """A model with 300 parameters in use, in fp64, and tokens."""
    torch.manual_seed(2)
    model = Model().double()
    return model, torch.randint(NUM_TOKENS, (2, 9))


def by_the_oracle(model, tokens, monkeypatch):
    """The Hessian by the table of the bias and the norm of the queries, of plain operations."""
    monkeypatch.setattr("onchip.attention", ot.unfused)

    def loss(table):
        weights = dict(model.named_parameters()) | {"bias.table": table}
        parts = functional_call(model, weights, (tokens,))
        wanted = torch.nn.functional.one_hot(tokens[:, : -sharpness.DISTANCE], NUM_TOKENS)
        return (parts[:, sharpness.DISTANCE :] - wanted).square().sum(-1).mean()

    table = model.bias.table.detach()
    return hessian(loss)(table).reshape(table.numel(), table.numel())


def test_products_are_those_of_the_dense_hessian(small, monkeypatch):
    model, tokens = small
    product = sharpness.hessian_product(sharpness.loss_of(model, tokens), [model.bias.table])
    vectors = torch.randn(5, model.bias.table.numel(), dtype=torch.float64)
    got = torch.stack([product([v.view_as(model.bias.table)])[0].flatten() for v in vectors])
    dense = by_the_oracle(model, tokens, monkeypatch)
    assert dense.abs().max() > 1e-3
    torch.testing.assert_close(got, vectors @ dense, rtol=1e-9, atol=1e-12)


def test_the_largest_eigenvalue():
    torch.manual_seed(0)
    matrix = torch.randn(30, 30, dtype=torch.float64)
    matrix = matrix @ matrix.T
    start = [torch.randn(10, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)]

    def product(vectors):
        image = matrix @ torch.cat([v.flatten() for v in vectors])
        return image[:10], image[10:].view(4, 5)

    value, _ = sharpness.largest_eigenvalue(product, start, 300)
    assert value == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-6)


def test_sharpness_stays_at_the_bound():
    """Below it the sharpness rises; gradient descent holds it near 2 / lr."""
    measured = sharpness.descend(0.4, 300, 50, say=lambda _: None)
    assert measured[0].sharpness > 6.5 and measured[-1].loss < 0.05
    for at in measured[3:]:
        assert 4.0 < at.sharpness < 6.0  # 2 / lr is 5


def test_the_program(capsys, tmp_path):
    file = tmp_path / "sharpness.svg"
    sharpness.main(["--steps", "4", "--every", "2", "--lr", "0.1", "0.2", "--plot", str(file)])
    printed = capsys.readouterr().out
    assert printed.count("sharpness") == 7 and "2 / lr 20.00" in printed
    assert "<svg" in file.read_text()
