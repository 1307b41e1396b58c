"""A T5 bias that learns: one number for each head and each bucket of distances, trained through
the gradient of `bias`.

    python examples/relative_bias.py                 # 20 seconds on a CPU
    python examples/relative_bias.py --distance 5 --plot bias.svg

The task needs positions, and the model has them from the bias alone: token i is to be the token
`distance` places before it. After training the heads look there, which the plot of the bias shows.
The buckets are T5's (Raffel et al., arXiv 1910.10683): one for each distance below 16, then wider
and wider ones. The keys of one bucket look alike, so at distance 20 half of the tokens are wrong.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onchip

NUM_TOKENS, SEQLEN, BATCH = 16, 64, 32
HEADS, HEAD_DIM = 2, 16
BUCKETS, MAX_DISTANCE = 32, 128  # T5's


def buckets_of(distance: Tensor) -> Tensor:
    """The bucket of each distance to a key: half of them for one distance each, the others grow
    like its logarithm up to MAX_DISTANCE, as T5's decoder has them. Keys to come have bucket 0.
    """
    distance, exact = distance.clamp(min=0), BUCKETS // 2
    far = torch.log(distance.clamp(min=1) / exact) / math.log(MAX_DISTANCE / exact)
    far = exact + (far * (BUCKETS - exact)).long()
    return torch.where(distance < exact, distance, far.clamp(max=BUCKETS - 1))


class RelativeBias(nn.Module):
    """bias (1, heads, seqlen, seqlen) from a learned table (heads, buckets)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(HEADS, BUCKETS))

    def forward(self, seqlen: int) -> Tensor:
        at = torch.arange(seqlen)
        return self.table[:, buckets_of(at[:, None] - at)][None]


class Model(nn.Module):
    """One layer of causal attention between an embedding and a head, without other positions."""

    def __init__(self):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.embed = nn.Embedding(NUM_TOKENS, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.bias = RelativeBias()
        self.head = nn.Linear(width, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, HEAD_DIM)).chunk(3, dim=-2)
        out = onchip.attention(q, k, v, causal=True, bias=self.bias(tokens.shape[1]))
        return self.head(out.flatten(-2))


def loss_and_share(model: Model, distance: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """The loss of one batch, and the share of its tokens that the model predicts."""
    tokens = torch.randint(NUM_TOKENS, (BATCH, SEQLEN), generator=generator)
    logits, targets = model(tokens)[:, distance:], tokens[:, : SEQLEN - distance]
    share = (logits.argmax(-1) == targets).float().mean()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), float(share)


def train(distance: int, steps: int, seed: int = 0, say=print) -> tuple[Model, float]:
    """The trained model, and its share of right tokens in a batch that it was not trained on."""
    torch.manual_seed(seed)
    model, generator = Model(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss, share = loss_and_share(model, distance, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            say(f"step {step:4}: loss {loss.item():.3f}, right {share:.0%}")
    with torch.no_grad():
        return model, loss_and_share(model, distance, generator)[1]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--distance", type=int, default=5, help="places to look back (1 to 60)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="a picture of the bias (.svg, .png)"
    )
    args = parser.parse_args(arguments)
    if not 1 <= args.distance <= SEQLEN - 4:
        parser.error(f"--distance must be 1 to {SEQLEN - 4}")
    model, share = train(args.distance, args.steps)
    used = buckets_of(torch.tensor(SEQLEN - 1)) + 1
    bias = model.bias.table.detach()[:, :used]
    print(f"held out: right {share:.0%}; the largest bias of each head:")
    for head, row in enumerate(bias):
        best = int(row.argmax())
        print(f"  head {head}: {float(row[best]):+.1f} at bucket {best}")
    if args.plot:
        draw(bias, args.distance, args.plot)


def draw(bias: Tensor, distance: int, file: Path) -> None:
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for head, row in enumerate(bias):
        axes.plot(row, marker=".", label=f"head {head}")
    axes.axvline(int(buckets_of(torch.tensor(distance))), color="gray", linestyle=":")
    axes.set(xlabel="bucket of distances", ylabel="learned bias", title=f"look back {distance}")
    axes.legend()
    plt.savefig(file)
    print(f"drawn to {file}")


if __name__ == "__main__":
    main()
