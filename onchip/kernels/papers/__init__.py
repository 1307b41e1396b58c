"""The published algorithms as running code, with an exact account of memory traffic. Tensors are in
HBM, tiles are loaded to the chip and stored back, and a ledger counts every byte that crosses and
every operation in between.

    from onchip.kernels.papers import ledger

    with ledger(sram=51_200) as book:      # M, in elements of the inputs
        out = onchip.attention(q, k, v, kernel="paper_v1")
    print(book)

Each function is the published algorithm with the published names, for all heads of a batch at once;
a ledger holds the sum over them. `onchip.iomodel.traffic` predicts ledgers without running.
"""

from .ledger import Ledger, TileVisit, ledger

__all__ = ["Ledger", "TileVisit", "ledger"]
