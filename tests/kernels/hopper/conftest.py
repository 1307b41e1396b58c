import pytest
import torch

from onchip import masks


def _bits(heads, seqlen_q, seqlen_k):
    """Some blocks EMPTY, some FULL, the others arbitrary."""
    g = torch.Generator("cuda").manual_seed(0)
    num_blocks = (1, heads, -(-seqlen_q // 128), -(-seqlen_k // 128))
    kinds = torch.randint(3, num_blocks, generator=g, device="cuda")
    kinds = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :seqlen_q, :seqlen_k]
    noise = torch.rand(kinds.shape, generator=g, device="cuda") < 0.5
    return (kinds == 1) | ((kinds == 2) & noise)


def _make_mask(kind, seqlen_q, seqlen_k):
    if kind == "causal":
        return masks.causal()
    if kind == "documents":
        return (
            masks.document(torch.tensor([0, 5, 400, 401, seqlen_q], dtype=torch.int32))
            & masks.causal()
        )
    if kind == "nothing":
        return torch.zeros(1, 1, seqlen_q, seqlen_k, dtype=torch.bool, device="cuda")
    return _bits(8 if "head" in kind else 1, seqlen_q, seqlen_k)


@pytest.fixture
def make_mask():
    return _make_mask
