"""The papers as running code. Tensors lie in HBM, tiles are loaded to the chip and stored back, and
a ledger notes every byte that crosses and every operation that runs between.

    from onchip.kernels.papers import ledger

    with ledger(sram=51_200) as book:      # M, in elements of the inputs
        out = onchip.attention(q, k, v, kernel="paper_v1")
    print(book)

Each function is the published algorithm in the published letters, for all heads of a batch at once:
what a ledger says is the sum over them. `onchip.iomodel.traffic` predicts ledgers without running.
"""

from .ledger import Ledger, TileVisit, ledger

__all__ = ["Ledger", "TileVisit", "ledger"]
