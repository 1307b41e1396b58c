"""Decoding steps of a whole model: how many tokens cost no more time than one.

A step reads every weight and the cached keys and values once, and multiplies every weight with each
of its tokens. Until the products take as long as the reads, further tokens are free:

    t_read = (weights * itemsize + cached tokens * token_bytes) / bandwidth
    t_multiply = 2 * tokens * weights / rate of the tensor cores

The scores of attention are left out: their keys are read anyway, and few queries use them.
"""

import math
from dataclasses import dataclass

import torch

from onchip.cost.hardware import Hardware


@dataclass(frozen=True)
class DecodeRoofline:
    """weights: parameters that a token is multiplied with. token_bytes: keys and values of a token,
    all layers.
    """

    hardware: Hardware
    dtype: torch.dtype
    weights: int
    token_bytes: float

    def free_tokens(self, num_cached: int) -> float:
        """Tokens at which the products take as long as the reads, with so many cached tokens of all
        sequences; infinite if the rates of the hardware are not known.
        """
        if not self.hardware.is_known:
            return math.inf
        read = self.weights * self.dtype.itemsize + num_cached * self.token_bytes
        read_s = read / self.hardware.memory_bytes_s
        return read_s * self.hardware.flops(self.dtype) / (2 * self.weights)
