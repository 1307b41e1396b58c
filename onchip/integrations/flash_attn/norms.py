"""flash_attn.ops.triton.layer_norm, ops.layer_norm and ops.rms_norm in torch's operations: in fp32,
rounded once, not fused.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from onchip.core.problem import UnsupportedError

NormResult = Tensor | tuple[Tensor | None, ...]  # more than one with prenorm, weight1 or a mask


class NormKind(NamedTuple):
    """LayerNorm (mean and variance) or RMSNorm (mean square alone)."""

    eps: float
    is_rms_norm: bool
    zero_centered_weight: bool = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x: fp32."""
        centered = x if self.is_rms_norm else x - x.mean(-1, keepdim=True)
        scaled = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + self.eps)
        scaled = scaled * (weight.float() + 1.0 if self.zero_centered_weight else weight.float())
        return scaled if bias is None else scaled + bias.float()


def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None,
    x1: Tensor | None = None, weight1: Tensor | None = None, bias1: Tensor | None = None,
    eps: float = 1e-6, dropout_p: float = 0.0, rowscale: Tensor | None = None,
    prenorm: bool = False, residual_in_fp32: bool = False, zero_centered_weight: bool = False,
    is_rms_norm: bool = False, return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None, out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> NormResult:  # fmt: skip
    """norm(dropout(x * rowscale) + dropout(x1) + residual) of the last dimension; with weight1 a
    second norm of the same sum. prenorm: also return the sum, in the dtype of residual, or without
    one in fp32 if residual_in_fp32. return_dropout_mask: append the masks of x and x1.
    """
    if out is not None or residual_out is not None:
        raise UnsupportedError(
            "out= and residual_out= are not supported: assign the result instead"
        )
    if x1 is not None and rowscale is not None:
        raise ValueError("rowscale cannot be combined with x1, as in flash_attn")
    norm = NormKind(eps, is_rms_norm, zero_centered_weight)
    total = x.float() if rowscale is None else x.float() * rowscale[..., None].float()
    total, mask = _drop(total, dropout_p)
    mask1 = None
    if x1 is not None:
        dropped, mask1 = _drop(x1.float(), dropout_p)
        total = total + dropped
    total = total if residual is None else total + residual.float()
    dtype = x.dtype if out_dtype is None else out_dtype
    results: list[Any] = [norm(total, weight, bias).to(dtype)]  # the masks may be None
    if weight1 is not None:
        results.append(norm(total, weight1, bias1).to(dtype))
    if prenorm:
        results.append(total.to(_residual_dtype(x, residual, residual_in_fp32)))
    if return_dropout_mask:
        results += [mask, mask1]
    return results[0] if len(results) == 1 else tuple(results)


def rms_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None,
    x1: Tensor | None = None, weight1: Tensor | None = None, bias1: Tensor | None = None,
    eps: float = 1e-6, dropout_p: float = 0.0, rowscale: Tensor | None = None,
    prenorm: bool = False, residual_in_fp32: bool = False, zero_centered_weight: bool = False,
    return_dropout_mask: bool = False, out_dtype: torch.dtype | None = None,
    out: Tensor | None = None, residual_out: Tensor | None = None,
) -> NormResult:  # fmt: skip
    """layer_norm_fn of the mean square alone."""
    args = x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale
    kind = prenorm, residual_in_fp32, zero_centered_weight, True
    return layer_norm_fn(*args, *kind, return_dropout_mask, out_dtype, out, residual_out)


class RMSNorm(nn.Module):
    """rms_norm_fn as a module, of ops.triton.layer_norm."""

    eps: float
    zero_centered_weight: bool
    drop: nn.Dropout | None
    weight: nn.Parameter

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0,
        zero_centered_weight: bool = False, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.eps, self.zero_centered_weight = eps, zero_centered_weight
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> NormResult:  # fmt: skip
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    return cast(Tensor, layer_norm_fn(x, weight, bias, eps=epsilon))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return cast(Tensor, rms_norm_fn(x, weight, None, eps=epsilon))


def dropout_add_layer_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float,
    epsilon: float, rowscale: Tensor | None = None, layerscale: Tensor | None = None,
    prenorm: bool = False, residual_in_fp32: bool = False, return_dropout_mask: bool = False,
) -> NormResult:  # fmt: skip
    """norm(layerscale * dropout(x0 * rowscale) + residual), with the extra results of
    layer_norm_fn.
    """
    outputs = prenorm, residual_in_fp32, return_dropout_mask
    norm = NormKind(epsilon, is_rms_norm=False)
    return _add_and_norm(
        x0, residual, (weight, bias), dropout_p, (rowscale, layerscale), outputs, norm
    )


def dropout_add_rms_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float,
    epsilon: float, rowscale: Tensor | None = None, layerscale: Tensor | None = None,
    prenorm: bool = False, residual_in_fp32: bool = False, return_dropout_mask: bool = False,
) -> NormResult:  # fmt: skip
    """dropout_add_layer_norm of the mean square alone."""
    outputs = prenorm, residual_in_fp32, return_dropout_mask
    norm = NormKind(epsilon, is_rms_norm=True)
    return _add_and_norm(
        x0, residual, (weight, bias), dropout_p, (rowscale, layerscale), outputs, norm
    )


class _DropoutAddNorm(nn.Module):
    """The modules of ops.layer_norm and ops.rms_norm."""

    prenorm: bool
    p: float
    eps: float
    residual_in_fp32: bool
    weight: nn.Parameter
    has_bias: bool
    is_rms_norm: bool

    def __init__(
        self, hidden_size: int, prenorm: bool = False, p: float = 0.0, eps: float = 1e-5,
        residual_in_fp32: bool = False, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.prenorm, self.p, self.eps = prenorm, p, eps
        self.residual_in_fp32 = residual_in_fp32
        empty = lambda: nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.weight = empty()
        self.register_parameter("bias", empty() if self.has_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> NormResult:
        outputs = self.prenorm, self.residual_in_fp32, False
        norm, p = NormKind(self.eps, self.is_rms_norm), self.p if self.training else 0.0
        weights = self.weight, self.bias
        return _add_and_norm(x0, residual, weights, p, (None, None), outputs, norm)


class DropoutAddLayerNorm(_DropoutAddNorm):
    has_bias, is_rms_norm = True, False


class DropoutAddRMSNorm(_DropoutAddNorm):
    has_bias, is_rms_norm = False, True


class PlainRMSNorm(RMSNorm):
    """RMSNorm of ops.rms_norm, which has neither dropout nor a residual."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(hidden_size, eps, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> NormResult:  # pyright: ignore[reportIncompatibleMethodOverride]
        return rms_norm(x, self.weight, self.eps)


def _add_and_norm(x0, residual, weights, dropout_p, scales, outputs, norm: NormKind):
    prenorm, residual_in_fp32, return_dropout_mask = outputs
    rowscale, layerscale = scales
    total = x0.float() if rowscale is None else x0.float() * rowscale[..., None].float()
    total, mask = _drop(total, dropout_p)
    total = total if layerscale is None else total * layerscale.float()
    total = total if residual is None else total + residual.float()
    results = [norm(total, *weights).to(x0.dtype)]
    if prenorm:
        results.append(total.to(_residual_dtype(x0, residual, residual_in_fp32)))
    if return_dropout_mask:
        results.append(torch.ones_like(x0, dtype=torch.bool) if mask is None else mask)
    return results[0] if len(results) == 1 else tuple(results)


def _drop(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    if not p:
        return x, None
    keep = torch.rand_like(x) >= p
    return x * keep / (1.0 - p), keep


def _residual_dtype(x: Tensor, residual: Tensor | None, in_fp32: bool) -> torch.dtype:
    if residual is not None:
        return residual.dtype
    return torch.float32 if in_fp32 else x.dtype
