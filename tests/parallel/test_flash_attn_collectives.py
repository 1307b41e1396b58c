"""flash_attn.utils.distributed of the alias: collectives with gradients, on gloo."""

import torch

from onchip.integrations.flash_attn import collectives


def on_rank(comm):
    """(result, gradient) of each collective; rank r has rows of 1 + r."""
    rows = torch.full((2, 3), 1.0 + comm.rank)
    results = []
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        x = rows.clone().requires_grad_()
        out = getattr(collectives, name)(x, comm.group)
        weights = torch.arange(1.0, 1 + len(out))[:, None] * (1 + comm.rank)
        (out * weights).sum().backward()
        results.append((out.detach(), x.grad))
    return results


def test_collectives_and_their_gradients(pool):
    for rank, (gathered, scattered, reduced) in enumerate(pool.run(2, on_rank)):
        column = lambda *values: torch.tensor(values)[:, None].expand(-1, 3)
        assert torch.equal(gathered[0], column(1.0, 1.0, 2.0, 2.0))
        # the weights of both ranks, 1 2 3 4 and twice that, at this rank's rows
        assert torch.equal(gathered[1], column(3.0, 6.0) if rank == 0 else column(9.0, 12.0))
        assert torch.equal(scattered[0], column(3.0))
        assert torch.equal(scattered[1], column(1.0, 2.0))
        assert torch.equal(reduced[0], column(3.0, 3.0))
        assert torch.equal(reduced[1], column(1.0 + rank, 2.0 + 2 * rank))
