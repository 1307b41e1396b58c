"""The hide condition of a ring: no message takes longer than the kernel of its round. docs/ring.md
derives it.
"""

from onchip.parallel.machines import H200, Fabric, Link, Machine
from onchip.parallel.simulate import BACKWARD_FLOPS, FORWARD_FLOPS, FP32, RingStep, rate, rounds


def hide_factor(step: RingStep) -> float:
    """k in the hide condition c >= k (H_kv / H_q) F / B: bytes over flops of the lightest round, in
    units of a full forward round in 16 bits.

    Forward it is itemsize / 2. Causal doubles it, because half of the pairs are visible. Backward
    it is (itemsize + 4) / 5, because dK and dV are fp32 and a pair takes 10 instead of 4 flops.
    """
    message = step.shape.itemsize + (FP32 if step.backward else 0)
    flops = BACKWARD_FLOPS if step.backward else FORWARD_FLOPS
    return message / 2 * FORWARD_FLOPS / flops * (2 if step.causal else 1)


def hides(step: RingStep, link: Link, machine: Machine = H200) -> bool:
    """The hide condition: no message takes longer than its round's kernel, latency aside."""
    message = (step.kv_bytes + step.dkv_bytes) / link.bytes_s
    flops = (
        kind.pairs * step.pair_flops / rate(step, kind, machine)
        for kind in rounds(step)
        if kind.pairs
    )
    return step.num_devices == 1 or message <= min(flops)


def unhidden(step: RingStep, link: Link) -> float:
    """The most seconds exposed if the condition holds: the latency of every message, and the last
    hop of dK and dV, with which no kernel overlaps.
    """
    if step.num_devices == 1:
        return 0.0
    messages = (2 if step.backward else 1) * step.num_devices
    return messages * link.latency_s + step.dkv_bytes / link.bytes_s


def hide_length(step: RingStep, link: Link, machine: Machine = H200) -> float:
    """The chunk from which on messages are hidden: hide_factor (H_kv / H_q) F / B, with F the rate
    of long calls. Shorter calls are slower, so that a smaller chunk may be enough.
    """
    heads = step.shape.num_kv_heads / step.shape.num_heads
    best = machine.best(step.backward, step.shape.head_dim)
    return hide_factor(step) * heads * best / link.bytes_s


def slowest_link(fabric: Fabric, num_devices: int) -> Link:
    """The slowest link in a ring of so many devices."""
    links = [fabric.inside]
    if fabric.between is not None and bool(fabric.crosses(num_devices).any()):
        links.append(fabric.between)
    return min(links, key=lambda link: link.bytes_s)
