"""`python -m benchmarks products` without a GPU: every product is a row for each number of rows."""

import pytest
import torch

from benchmarks import products
from benchmarks.serving import TINY
from onchip.cli.bench.harness import RowRefused, Session, check_thresholds
from onchip.models import ModelConfig

CPU = torch.device("cpu")


@pytest.fixture
def ran(monkeypatch):
    """The candidates that ran: with fused products a microsecond, without two."""
    ran = []

    def replay_us(job, rounds, device):
        job()
        ran.append(job.args[1])
        return 1.0 if job.args[1] else 2.0

    monkeypatch.setattr(products, "replay_us", replay_us)
    monkeypatch.setattr(products, "ROTATED_BYTES", 1)
    return ran


def test_every_product_is_a_row(ran, monkeypatch):
    monkeypatch.setattr(products, "MODELS", {"tiny": TINY, "other": TINY})
    session = Session(device=CPU)
    rows = [row for _, job in products.steps(session) for row in job()]
    assert [row["batch"] for row in rows] == [1, 2, 4, 8] * 5 * 2
    assert len({(row["mask"], row["batch"]) for row in rows}) == len(rows)
    assert ran == [True, False] * len(rows)
    assert all(row["ratio"] == 2.0 and row["copy_share"] > 0 for row in rows)
    assert all(verdict.ok for verdict in check_thresholds(rows, products.THRESHOLDS))


def test_large_weights_have_no_rows():
    parts = [title for title, _ in products.steps(Session(device=CPU))]
    small = ["qwen3-0.6b qkv", "qwen3-0.6b out", "qwen3-0.6b up", "qwen3-0.6b down"]
    assert parts == [*small, "llama-3-8b qkv", "llama-3-8b out"]


def test_shapes_are_those_of_the_model():
    shapes = products.shapes(ModelConfig.from_hf(products.QWEN3))
    sizes = {name: (shape.columns, shape.width) for name, shape in shapes.items()}
    assert sizes == {
        "qkv": (4096, 1024),
        "out": (1024, 2048),
        "up": (6144, 1024),
        "down": (1024, 3072),
        "head": (151_936, 1024),
    }


def test_larger_errors_are_refused(monkeypatch):
    shape = products.Shape(24, 40, has_norm=True)
    weights = products.Weights.of(shape, torch.float32, CPU)
    x = torch.randn(3, 40)
    weights.check(x)
    is_fused = []
    exact = products.norm_product

    def wrong(x, *rest):
        total, out = exact(x, *rest)
        is_fused.append(x.dtype)
        return total, out * (1.001 if len(is_fused) == 2 else 1.0)

    monkeypatch.setattr(products, "norm_product", wrong)
    with pytest.raises(RowRefused, match="3 rows: an RMSE of"):
        weights.check(x)
