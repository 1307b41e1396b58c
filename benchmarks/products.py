"""`python -m benchmarks products`: the matrix products of a decoding step of 1 to 8 rows, bf16,
Qwen3-0.6B and Llama-3-8B in shape: one launch of llm/products.py against torch's product and the
launches around it (norm, gate), and the share of a plain copy's speed at which the weight is read.
Weights that are left to torch (tiles.PRODUCT_MOST_BYTES) have no rows.

A sample is a CUDA graph of one product after another, each with a weight of its own, more than the
L2 holds together. A row is refused if its error against fp64 exceeds that of torch's launches by
more than the accuracy rule allows.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.serving import LLAMA3, copy_bytes_per_s, least
from benchmarks.step import QUICK_ROUNDS, QWEN3, ROUNDS, replay_us
from onchip.cli.bench import gpu
from onchip.cli.bench.harness import Case, Row, RowRefused, Session, Threshold
from onchip.kernels.tiles import PRODUCT_MOST_BYTES
from onchip.models import ModelConfig
from onchip.models.pointwise import RMSNorm
from onchip.models.products import fuse_products, norm_product, product
from onchip.testing import rmse

MODELS = {"qwen3-0.6b": QWEN3, "llama-3-8b": LLAMA3}
ROW_COUNTS = (1, 2, 4, 8)
MOST_ERROR = 1.05  # times the RMSE of torch's launches: onchip/testing.py
ROTATED_BYTES = 2**28  # of weights, more than twice the L2
MOST_COPIES = 32


class Shape(NamedTuple):
    """weight (columns, width); with a norm before the product; with a gate after it."""

    columns: int
    width: int
    has_norm: bool = False
    activation: str | None = None


def shapes(config: ModelConfig) -> dict[str, Shape]:
    """The products of a layer, and that of the logits."""
    width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads = config.num_heads + 2 * config.num_kv_heads
    return {
        "qkv": Shape(heads * dim, width, has_norm=True),
        "out": Shape(width, config.num_heads * dim),
        "up": Shape(2 * inner, width, has_norm=True, activation=config.activation),
        "down": Shape(width, inner),
        "head": Shape(config.vocab_size, width),
    }


THRESHOLDS = (
    Threshold(
        "products against torch's launches, least",
        lambda row: row["bench"] == "products",
        at_least=1.0,
        measure=least("ratio"),
    ),
)


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    counts = ROW_COUNTS[:1] if session.quick else ROW_COUNTS
    for name, fields in MODELS.items():
        config = ModelConfig.from_hf(fields)
        for part, shape in shapes(config).items():
            if shape.columns * shape.width * torch.bfloat16.itemsize > PRODUCT_MOST_BYTES:
                continue
            title = f"{name} {part}"
            case = Case("products", title, torch.bfloat16, config.head_dim, 1, way="decode")
            yield title, partial(measure, session, case, shape, counts)


def measure(session: Session, case: Case, shape: Shape, counts: tuple[int, ...]) -> list[Row]:
    """A row for each number of rows."""
    with torch.inference_mode():
        rate = copy_bytes_per_s(session.device)
        weights = Weights.of(shape, case.dtype, session.device)
        return [_measure(session, case, weights, num_rows, rate) for num_rows in counts]


class Weights(NamedTuple):
    """Copies of a weight, and the norm weight."""

    shape: Shape
    copies: list[Tensor]
    norm: Tensor

    @classmethod
    def of(cls, shape: Shape, dtype: Any, device: torch.device) -> "Weights":
        each = shape.columns * shape.width * dtype.itemsize
        count = max(1, min(MOST_COPIES, -(-ROTATED_BYTES // each)))
        weight = torch.randn(shape.columns, shape.width, dtype=dtype, device=device)
        norm = 1 + torch.randn(shape.width, dtype=dtype, device=device) / 8
        return cls(shape, [weight * shape.width**-0.5 for _ in range(count)], norm)

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self.shape.has_norm:
            return product(x, weight)
        norm = RMSNorm(self.norm, 1e-6)
        return norm_product(x, x, norm, weight, None, self.shape.activation)[1]

    def run_all(self, x: Tensor, is_fused: bool) -> None:
        with fuse_products(is_fused):
            for weight in self.copies:
                self.run(x, weight)

    def check(self, x: Tensor) -> None:
        """RowRefused if the fused launch has larger errors than the others."""
        exact = self.run(x.double(), self.copies[0].double()).float()
        errors = []
        for is_fused in (True, False):
            with fuse_products(is_fused):
                errors.append(rmse(self.run(x, self.copies[0]).float(), exact))
        if not errors[0] <= MOST_ERROR * errors[1]:
            raise RowRefused(f"{len(x)} rows: an RMSE of {errors[0]:.3g}, of torch {errors[1]:.3g}")


def _measure(session: Session, case: Case, weights: Weights, num_rows: int, rate: float) -> Row:
    first = weights.copies[0]
    x = torch.randn(num_rows, weights.shape.width, dtype=first.dtype, device=first.device)
    weights.check(x)
    rounds = QUICK_ROUNDS if session.quick else ROUNDS
    timed: Callable[[bool], float] = lambda is_fused: (
        replay_us(partial(weights.run_all, x, is_fused), rounds, session.device)
        / len(weights.copies)
    )
    us, theirs = timed(True), timed(False)
    share = 1e6 * first.nbytes / rate / us
    row = case.row("triton", us, "us")
    row |= {"batch": num_rows, "peers": {"torch": theirs}, "best_peer": "torch"}
    session.say(
        f"{case.mask}, {num_rows} rows: {us:.2f} us, torch {theirs:.2f}, {share:.0%} of copy"
    )
    return row | {"ratio": theirs / us, "copy_share": share}
