"""flash_attn.losses.cross_entropy and flash_attn.ops.triton.cross_entropy in torch's operations: in
fp32, not fused.
"""

from torch import Tensor, nn

from onchip.core.problem import UnsupportedError


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0, logit_scale: float = 1.0, lse_square_scale: float = 0.0,
    ignore_index: int = -100, inplace_backward: bool = False, process_group: object = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(losses, z_losses), fp32 (rows,), of logits (rows, classes) and labels (rows,). A loss is

        lse - (1 - label_smoothing) * x[label] - label_smoothing * mean(x) + z

    with x = logit_scale * logits, lse = logsumexp(x) and z = lse_square_scale * lse**2; both are 0
    where the label is ignore_index. z_losses carries no gradient. precomputed_lse and
    inplace_backward save time and memory upstream; here they have no effect.
    """
    _check_group(process_group)
    x = logits.float() * logit_scale
    ignored = labels == ignore_index
    lse = x.logsumexp(-1)
    picked = x.gather(-1, labels.masked_fill(ignored, 0).long()[..., None])[..., 0]
    losses = lse - (1 - label_smoothing) * picked
    if label_smoothing:
        losses = losses - label_smoothing * x.mean(-1)
    z_losses = lse_square_scale * lse.square()
    losses = (losses + z_losses).masked_fill(ignored, 0.0)
    return losses, z_losses.detach().masked_fill(ignored, 0.0)


class CrossEntropyLoss(nn.Module):
    """cross_entropy_loss as a module; "mean" counts the labels that are not ignored."""

    ignore_index: int
    label_smoothing: float
    logit_scale: float
    lse_square_scale: float
    inplace_backward: bool
    process_group: object
    return_z_loss: bool

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0,
        logit_scale: float = 1.0, lse_square_scale: float = 0.0, inplace_backward: bool = False,
        process_group: object = None, return_z_loss: bool = False,
    ):  # fmt: skip
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise NotImplementedError(f"{reduction=} must be 'mean', 'sum' or 'none'")
        _check_group(process_group)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.logit_scale = label_smoothing, logit_scale
        self.lse_square_scale, self.inplace_backward = lse_square_scale, inplace_backward
        self.process_group, self.return_z_loss = process_group, return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """input: (rows, classes); target: (rows,). loss, or (loss, z_loss)."""
        both = cross_entropy_loss(
            input,
            target,
            precomputed_lse,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.ignore_index,
        )
        loss, z_loss = (self._reduce(t, target) for t in both)
        return (loss, z_loss) if self.return_z_loss else loss

    def _reduce(self, losses: Tensor, target: Tensor) -> Tensor:
        if self.reduction == "none":
            return losses
        total = losses.sum()
        return total / (target != self.ignore_index).sum() if self.reduction == "mean" else total


def _check_group(process_group) -> None:
    if process_group is not None and process_group.size() > 1:
        raise UnsupportedError(
            "cross entropy over classes on several ranks is not supported: gather the logits and"
            " pass process_group=None"
        )
