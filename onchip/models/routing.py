"""The experts of each token and their weights, and a loss that balances the load of experts."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.models.layer_config import ExpertGroups, Experts


class Routing(NamedTuple):
    """The experts of each token, the best first: int64 (tokens, per_token); their weights of the
    same shape; and the scores of all experts (tokens, num_experts). Both are fp32 (fp64 for fp64).
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor


def route(logits: Tensor, experts: Experts, bias: Tensor | None = None) -> Routing:
    """The best experts of each token by its scores, the first of equal ones. bias: added to the
    scores for the choice, in no weight (`Experts.has_choice_bias`).
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scores = wide.sigmoid() if experts.has_choice_bias else wide.softmax(-1)
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if experts.groups is not None and experts.groups.per_token < experts.groups.num_groups:
        ranked = _keep_groups(ranked, experts.groups)
    chosen = _best(ranked, experts.per_token)[1]
    weights = scores.gather(-1, chosen)
    if experts.is_normalised:
        # Sigmoids may all be 0. To the sum of the largest of a softmax this adds nothing.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights if experts.groups is None else weights * experts.groups.scale
    return Routing(chosen, weights, scores)


def _keep_groups(ranked: Tensor, groups: ExpertGroups) -> Tensor:
    """-inf for the experts outside of the best groups of each token."""
    grouped = ranked.unflatten(-1, (groups.num_groups, -1))
    kept = _best(_best(grouped, groups.num_best)[0].sum(-1), groups.per_token)[1]
    is_kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, kept, True)
    return grouped.masked_fill(~is_kept[..., None], -torch.inf).flatten(-2)


def _best(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest numbers of the last dimension, and where they are."""
    # Of equal numbers topk takes any. In 16 bits there are many.
    values, at = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], at[..., :count]


def balance_loss(routings: Sequence[Routing], mask: Tensor | None = None) -> Tensor:
    """The load-balancing loss over the routings of all layers (`Decoder.record_routing`): the
    number of experts, times the sum over experts of the fraction of tokens that chose it and its
    mean score; the scores of a token are divided by their sum. An even load gives per_token, and
    the gradient lowers the scores of the experts with the largest load.

    mask: bool, of the shape of the tokens, False for padding; None: every token counts. Without a
    token that counts the loss is 0.
    """
    if not routings:
        raise ValueError("no routing was recorded: balance_loss needs a model with experts")
    num_experts = routings[0].scores.shape[-1]
    loads, scores, totals = [], [], []
    for routing in routings:
        tokens = len(routing.scores)
        if mask is not None and (mask.dtype != torch.bool or mask.numel() != tokens):
            raise ValueError(
                f"the mask is {mask.dtype} of shape {tuple(mask.shape)}, and {tokens} tokens were"
                " recorded at once: it must hold a boolean for each"
            )
        counts = torch.ones_like(routing.scores[:, 0]) if mask is None else mask.flatten()
        chosen = F.one_hot(routing.experts, num_experts).sum(1)
        shares = routing.scores / routing.scores.sum(-1, keepdim=True)
        loads.append((chosen * counts[:, None]).sum(0))
        scores.append((shares * counts[:, None]).sum(0))
        totals.append(counts.sum())
    load, score, total = (torch.stack(sums).sum(0) for sums in (loads, scores, totals))
    total = total.clamp(min=1)  # a batch of padding alone has a loss of 0
    return num_experts * (load / total * (score / total)).sum()
