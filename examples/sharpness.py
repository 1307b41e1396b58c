"""How sharp the loss of a transformer is while it learns, by Hessian-vector products through
attention.

    python examples/sharpness.py                     # half a minute on a CPU
    python examples/sharpness.py --lr 0.3 0.4 0.5 --plot sharpness.svg

The sharpness is the largest eigenvalue of the Hessian of the loss by the parameters. The Hessian
itself would have 17 million numbers here; its product with a vector is one more backward pass,
through the gradient: second derivatives of attention. The power method needs such products alone.

Gradient descent with a step of lr is stable while the sharpness is below 2 / lr. Trained so, the
sharpness of networks rises to this bound and stays there (Cohen et al., arXiv 2103.00065): that of
this model, too, which is that of examples/relative_bias.py with the squared error as its loss.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from relative_bias import NUM_TOKENS, Model
from torch import Tensor

SEQLEN, BATCH, DISTANCE = 24, 16, 3
ITERATIONS = 12  # of the power method, which starts at the eigenvector found before


class Measured(NamedTuple):
    step: int
    loss: float
    sharpness: float


def hessian_product(loss: Tensor, parameters: Sequence[Tensor]) -> Callable:
    """vectors, one for each parameter -> their product with the Hessian of the loss."""
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)

    def product(vectors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(gradients, parameters, vectors, retain_graph=True)

    return product


def largest_eigenvalue(
    product: Callable, start: Sequence[Tensor], iterations: int
) -> tuple[float, list[Tensor]]:
    """The eigenvalue of largest magnitude and its vector, by the power method from `start`."""
    vector, value = list(start), 0.0
    for _ in range(iterations):
        norm = torch.sqrt(sum(v.square().sum() for v in vector))
        vector = [v / norm for v in vector]
        image = product(vector)
        value = float(sum((v * w).sum() for v, w in zip(vector, image, strict=True)))
        vector = list(image)
    return value, vector


def loss_of(model: Model, tokens: Tensor) -> Tensor:
    """The squared error of logits that should be 1 for the token DISTANCE places before."""
    logits, targets = model(tokens)[:, DISTANCE:], tokens[:, :-DISTANCE]
    return (logits - F.one_hot(targets, NUM_TOKENS)).square().sum(-1).mean()


def descend(lr: float, steps: int, every: int, say=print) -> list[Measured]:
    """Full-batch gradient descent, with the sharpness every few steps."""
    torch.manual_seed(0)
    model, tokens = Model(), torch.randint(NUM_TOKENS, (BATCH, SEQLEN))
    parameters = list(model.parameters())
    vector, measured = [torch.randn_like(p) for p in parameters], []
    for step in range(steps + 1):
        loss = loss_of(model, tokens)
        if step % every == 0:
            product = hessian_product(loss, parameters)
            value, vector = largest_eigenvalue(product, vector, ITERATIONS)
            measured.append(Measured(step, loss.item(), value))
            say(
                f"step {step:5}: loss {loss.item():.4f}, sharpness {value:.2f}, 2 / lr {2 / lr:.2f}"
            )
        gradients = torch.autograd.grad(loss_of(model, tokens), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= lr * gradient
    return measured


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lr", type=float, nargs="+", default=[0.4])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=25, help="steps between two measurements")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw both (.svg, .png)")
    args = parser.parse_args(arguments)
    runs = {lr: descend(lr, args.steps, args.every) for lr in args.lr}
    if args.plot:
        draw(runs, args.plot)


def draw(runs: dict[float, list[Measured]], file: Path) -> None:
    import matplotlib.pyplot as plt

    _, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for lr, measured in runs.items():
        steps = [at.step for at in measured]
        (line,) = left.plot(steps, [at.loss for at in measured], label=f"lr {lr:g}")
        right.plot(steps, [at.sharpness for at in measured], color=line.get_color())
        right.axhline(2 / lr, color=line.get_color(), linestyle=":", label=f"2 / {lr:g}")
    left.set(xlabel="step", ylabel="loss", yscale="log")
    left.legend()
    right.set(xlabel="step", ylabel="largest eigenvalue of the Hessian")
    right.legend()
    plt.savefig(file)
    print(f"drawn to {file}")


if __name__ == "__main__":
    main()
