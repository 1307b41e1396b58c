"""Digests of arguments that must be equal on all ranks and are too long for a message: masks,
documents and the values of small tensors. An error prints them in hexadecimal.
"""

import ctypes
from array import array
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

from onchip.masks import BlockMask, Mask
from onchip.masks.mods import node_of
from onchip.parallel.rounds import MAX_PLANS


def of_tensor(x: Tensor | None) -> str | None:
    """The digest of values in host memory. On a GPU the shape alone, to avoid a synchronisation."""
    if x is None:
        return None
    shape = f"{x.dtype} {tuple(x.shape)}"
    return f"{shape} on {x.device.type}" if x.device.type != "cpu" else f"{shape} {_digest(x)}"


def of_documents(offsets: tuple[int, ...] | None) -> str | None:
    if offsets is None:
        return None
    digest = blake2b(array("q", offsets).tobytes(), digest_size=8).hexdigest()
    return f"{len(offsets) - 1} documents {digest}"


def of_mask(
    mask: Mask | BlockMask | None, planes: tuple[int, int], seqlen: int, device: torch.device
) -> str | None:
    """The digest of a mask's text and of its visible cells: of a large function a sample, of any
    other mask all of them (`Node.identity`).
    """
    return None if mask is None else _of_mask(mask, planes, seqlen, device)


@lru_cache(maxsize=MAX_PLANS)
def _of_mask(
    mask: Mask | BlockMask, planes: tuple[int, int], seqlen: int, device: torch.device
) -> str:
    return f"{mask} {_digest(*node_of(mask, planes, (seqlen, seqlen), device).identity())}"


def _digest(*parts: Tensor | str) -> str:
    digest = blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode())
            continue
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
        values = part.detach().cpu().contiguous()
        if values.numel():
            digest.update((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))
    return digest.hexdigest()
