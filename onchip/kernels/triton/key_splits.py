"""How kernels/triton/decode.py splits the keys of each sequence over programs, for
`onchip.explain`. The device does the same with lengths that the host does not read (splits.py).
"""

from collections.abc import Callable, Sequence

from onchip.core.backend import KeySplits
from onchip.core.problem import Problem, Tensors
from onchip.cost.hardware import Hardware
from onchip.cost.splits import SplitTiles, TileWork, count_key_tiles, even_splits, seconds
from onchip.kernels.tiles import SPLIT_WAVES, TritonConfig


def plan_splits(
    problem: Problem, x: Tensors, lengths: Sequence[tuple[int, int]], hardware: Hardware | None
) -> KeySplits | None:
    """None where another kernel of this package serves the problem, which splits no keys."""
    from onchip.kernels.triton import decode, launch

    if not decode.serves(problem) or problem.reproducible:
        return None
    hardware = hardware or decode.machine(x.q.device)
    config = decode.choose_config(problem, launch.LaunchArgs.of(problem, x), hardware.processors)
    return describe_splits(problem, config, x.q.shape[-3], lengths, hardware)


def describe_splits(
    problem: Problem,
    config: TritonConfig,
    total_q: int,
    lengths: Sequence[tuple[int, int]],
    hardware: Hardware,
    waves: tuple[float, ...] = (SPLIT_WAVES,),
) -> KeySplits:
    """The plan of a kernel with tiles of config.tile_m rows and config.tile_n keys."""
    from onchip.kernels.triton import decode

    launched = decode.plan_launch(problem, total_q, config, hardware, waves)
    tiles_q = [-(-seqlen_q * problem.group_size // config.tile_m) for seqlen_q, _ in lengths]
    tiles = count_key_tiles(problem, lengths, config.tile_n)
    counts = count_splits(launched.cut, tiles_q, tiles)
    units = [a * b for a, b in zip(tiles_q, counts, strict=True)]
    slots = sum(n for n, count in zip(units, counts, strict=True) if count > 1)
    row_bytes = 4 * (problem.head_dim_v + 1)  # out and lse in fp32
    work, parts = TileWork.of(problem, *config[:2]), list(map(SplitTiles, tiles_q, tiles, counts))
    uncut = [part._replace(splits=1) for part in parts]
    return KeySplits(
        tuple(counts),
        sum(units) * problem.num_kv_heads,
        config.tile_n,
        2 * slots * problem.num_kv_heads * launched.part_rows * row_bytes,
        _explain_cut(problem, launched.cut, config.tile_n, hardware.processors, sum(tiles)),
        seconds(work, parts, hardware, merged=launched.num_records > 0),
        seconds(work, uncut, hardware, merged=False),
    )


def count_splits(
    cut: tuple[int | None, int | None, int | None], tiles_q: Sequence[int], tiles: Sequence[int]
) -> list[int]:
    """Splits of each sequence, which has tiles_q tiles of queries and `tiles` of keys. cut: units,
    least and fixed as kernels/triton/splits.py explains them.
    """
    units, least, fixed = cut
    if units is None or least is None:
        return [1] * len(tiles)
    work = sum(a * b for a, b in zip(tiles_q, tiles, strict=True))
    even = max(-(-work // units), least)
    most: Callable[[int, int], int] = lambda a, n: even if fixed is None else n if a > 1 else fixed
    return [even_splits(n, max(1, most(a, n))) for a, n in zip(tiles_q, tiles, strict=True)]


def _explain_cut(problem: Problem, cut: tuple, tile_n: int, processors: int, tiles: int) -> str:
    units, least, fixed = cut
    if problem.return_stats:
        return "statistics of rows cannot be merged"
    if units is None:
        return f"no cut of {problem.seqlen_k} keys is predicted to pay for its merge"
    if fixed is not None:
        return f"every {fixed * tile_n} keys, whatever else is in the batch (deterministic)"
    share = f"{tiles} tiles of {tile_n} keys for {units} programs a key head"
    return f"{share} ({processors} processors), {least * tile_n} keys each at least"
