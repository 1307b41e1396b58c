"""Widths of the Hopper backward that are no powers of two, raced against padding and the peers.

  python -m benchmarks.backward_widths                    every width, 1,024 and 8,192 tokens
  python -m benchmarks.backward_widths 96 192x128 --seqlens 4096

All versions are captured as graphs in one process and replayed in turns, as `onchip bench backward`
does: "own", with tiles of the width (tiles.HOPPER_BACKWARD_WIDTHS), "padded", with tiles of the
next power of two, and FlashAttention-4, cuDNN and FlashAttention-2. The first two are checked by
the accuracy rule before they are timed; what raises is printed and left out.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch

import onchip
from onchip.cli.bench import gpu, patterns
from onchip.cli.bench.backward import SDPA, GradientCheck
from onchip.cli.bench.forward import fa4_rivals, sdpa_rivals
from onchip.cli.bench.gpu import Capture, GpuCandidate, Timing
from onchip.cli.bench.harness import Case, Session
from onchip.kernels import tiles

TABLE = "HOPPER_BACKWARD_WIDTHS"
OWN, PADDED = "own", "padded"
SEQLENS = (1024, 8192)
Key = int | tuple[int, int]


def parse_key(text: str) -> Key:
    """96, or (192, 128) of 192x128."""
    width, *narrow = map(int, text.split("x"))
    key = (width, narrow[0]) if narrow else width
    if key not in tiles.HOPPER_BACKWARD_WIDTHS:
        raise ValueError(f"no width {text}: {TABLE} has {list(tiles.HOPPER_BACKWARD_WIDTHS)}")
    return key


def padded(key: Key) -> Key:
    """The powers of two that hold the columns of a width."""
    if isinstance(key, tuple):
        return tiles.hopper_width(key[0]), tiles.hopper_width(key[0])
    return tiles.hopper_width(key)


def cells(keys: Sequence[Key], seqlens: Sequence[int]) -> Iterator[tuple[Key, Case]]:
    """The papers' protocol (gpu.grid): as many tokens and channels in every cell."""
    for key, mask, n in product(keys, ("none", "causal"), seqlens):
        head_dim, head_dim_v = key if isinstance(key, tuple) else (key, key)
        sizes = (head_dim, n, max(1, gpu.TOKENS // n), gpu.HIDDEN // head_dim)
        kind = {"backward": True, "way": "backward", "head_dim_v": head_dim_v}
        yield key, Case("backward", mask, torch.bfloat16, *sizes, **kind)


def race(session: Session, key: Key, case: Case) -> Timing:
    """The times of all versions of one cell."""
    pattern, sets = patterns.plain(case.seqlen, case.mask), gpu.draw_sets(case, session.device)
    check = GradientCheck({"normal": sets[0]}, pattern.visible)
    attend = partial(onchip.attention, kernel="hopper", **pattern.options)
    ours = GpuCandidate("onchip", attend, sets, check, ours=True)
    captures = {}
    for name, row in {OWN: key, PADDED: padded(key)}.items():
        with tiles.trial(TABLE, key, row):  # a graph keeps the row it is captured with
            check(ours, strict=True)
            captures[name] = gpu.capture_calls(ours, True)
    with tiles.trial(TABLE, key, key):
        control = gpu.capture_calls(ours, True)
    rivals = fa4_rivals(session, case, sets, check) + sdpa_rivals(case, sets, check, SDPA)
    captures |= capture_rivals(session, rivals)
    rounds = gpu.QUICK_ROUNDS if session.quick else gpu.ROUNDS
    return gpu.time_captures(captures, control, rounds)


def capture_rivals(session: Session, rivals: Sequence[GpuCandidate]) -> dict[str, Capture]:
    """By label. The reason of a peer that refuses the call is printed."""
    captures = {}
    for rival in rivals:
        try:
            captures[rival.label] = gpu.capture_calls(rival, True)
        except Exception as error:
            gpu.still_there(session.device)
            session.note(f"{rival.label} is left out: {gpu.sentence(error)}")
    return captures


def describe(case: Case, timing: Timing) -> str:
    """The TFLOP/s of every version, own over padded and over the best peer, and the A/A control."""
    times = {name: timing.ms(name) for name in timing.times}
    speeds = ", ".join(f"{name} {gpu.flops(case) / ms / 1e9:.0f}" for name, ms in times.items())
    peers = {name: ms for name, ms in times.items() if name not in (OWN, PADDED)}
    over = [f"{timing.against(OWN, PADDED).ratio:.3f} of padded"]
    if peers:
        best = min(peers, key=peers.__getitem__)
        over.append(f"{timing.against(OWN, best).ratio:.3f} of {best}")
    return f"{case}: {speeds} TFLOP/s; own {', '.join(over)}; control {timing.control:.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("widths", nargs="*", type=parse_key, help="80, 96, 192x128 ...")
    parser.add_argument("--seqlens", nargs="+", type=int, default=SEQLENS)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this needs a Hopper GPU, and torch finds none")
    session = Session(options.quick, device=torch.device("cuda"), say=print)
    for key, case in cells(options.widths or list(tiles.HOPPER_BACKWARD_WIDTHS), options.seqlens):
        try:
            line = describe(case, race(session, key, case))
        except Exception as error:
            gpu.still_there(session.device)  # raises if the GPU is lost
            line = f"{case} is left out: {gpu.sentence(error)}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
