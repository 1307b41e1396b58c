"""The papers on a GPU: the same results under the same rule, and the same ledgers."""

import pytest
import torch

import onchip
import onchip.testing as ot
from onchip import masks
from onchip.lab.published import ledger

pytestmark = pytest.mark.gpu
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 40, "head_dim_v": 24}
OPTIONS = [{"causal": True}, {"window_size": (40, 7)}, {"mask": masks.bigbird(64, 64, 1)}]


@pytest.mark.parametrize("kernel", ["paper_v0", "paper_v1", "paper_v2", "paper_v4"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_ledgers_do_not_depend_on_the_device(kernel, options, dtype):
    books = {}
    for device in ("cpu", "cuda"):
        q, k, v = ot.make_qkv(2, 150, 290, **SIZES, dtype=dtype, device=device)
        attention = lambda *qkv, **o: onchip.attention(*qkv, kernel=kernel, return_lse=True, **o)
        with ledger(sram=5000) as books[device]:
            ot.assert_accurate(attention, q, k, v, grad=True, **options)
    for name in ("reads", "writes", "flops", "exps"):
        assert getattr(books["cpu"], name) == getattr(books["cuda"], name)


@pytest.mark.parametrize("kernel", ["paper_v0", "paper_v1", "paper_v2"])
def test_dropout_is_drawn_on_the_device(kernel):
    q, k, v = ot.make_qkv(2, 63, 111, **SIZES, device="cuda")
    attention = lambda *qkv, **o: onchip.attention(*qkv, kernel=kernel, return_lse=True, **o)
    ot.assert_accurate(attention, q, k, v, grad=True, dropout_p=0.3, dropout_seed=2**40 + 17)
