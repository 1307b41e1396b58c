"""The rounds of a ring attention step on machines that are not here, and their times: from measured
kernel times and stated memory speeds. benchmarks/ring_timeline.py orders them, with their messages.
"""

from typing import NamedTuple

from onchip.parallel.machines import H200, Machine

LAYOUTS = ("contiguous", "zigzag", "striped")
FP32 = 4
FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10  # per visible pair, head and head_dim


class LayerShape(NamedTuple):
    """The sizes of a token in one attention layer. The default is Llama 3 8B in 16 bits."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    itemsize: int = 2

    @property
    def q_elements(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_elements(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim


class RingStep(NamedTuple):
    """One attention layer, forward or backward, over `tokens` on `num_devices`."""

    tokens: float
    num_devices: int = 8
    layout: str = "zigzag"
    causal: bool = True
    backward: bool = False
    shape: LayerShape = LayerShape()

    @property
    def chunk(self) -> float:
        """Tokens of a device."""
        return self.tokens / self.num_devices

    @property
    def flops(self) -> float:
        pairs = self.tokens * (self.tokens + 1) / 2 if self.causal else self.tokens**2
        return pairs * self.pair_flops

    @property
    def pair_flops(self) -> int:
        return (BACKWARD_FLOPS if self.backward else FORWARD_FLOPS) * self.shape.q_elements

    @property
    def kv_bytes(self) -> float:
        """Bytes of a round's message: K and V of a chunk."""
        return self.chunk * self.shape.kv_elements * self.shape.itemsize

    @property
    def dkv_bytes(self) -> float:
        """Bytes of the message that follows in the backward pass: dK and dV in fp32."""
        return self.chunk * self.shape.kv_elements * FP32 if self.backward else 0.0

    def check(self) -> None:
        """Raise ValueError if the tokens cannot be laid out."""
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r} must be one of: {', '.join(LAYOUTS)}")
        if self.num_devices < 1 or self.tokens < self.num_devices:
            sizes = f"tokens={self.tokens:g}, num_devices={self.num_devices}"
            raise ValueError(f"every device needs at least one token, got {sizes}")


class SimulatedRound(NamedTuple):
    """A kernel call: `queries` over `keys`, of which `pairs` are visible. The first result becomes
    the running state; the others are merged into it.
    """

    queries: float
    keys: float
    pairs: float
    causal: bool
    first: bool = False


class RoundKinds(NamedTuple):
    """The rounds over a device's own keys, over keys of a lower rank, and of a higher rank."""

    own: SimulatedRound
    lower: SimulatedRound
    upper: SimulatedRound


def rounds(step: RingStep) -> RoundKinds:
    """The three kinds of rounds of a layout. Their pairs are exact and add up to the mask's."""
    c = step.chunk
    full, idle = SimulatedRound(c, c, c * c, False), SimulatedRound(0, 0, 0, False)
    if not step.causal:
        return RoundKinds(full._replace(first=True), full, full)
    own = SimulatedRound(c, c, c * (c + 1) / 2, True, first=True)
    if step.layout == "contiguous":
        return RoundKinds(own, full, idle)
    if step.layout == "striped":
        return RoundKinds(
            own, own._replace(first=False), SimulatedRound(c, c, c * (c - 1) / 2, True)
        )
    return RoundKinds(
        own, SimulatedRound(c, c / 2, c * c / 2, False), SimulatedRound(c / 2, c, c * c / 2, False)
    )


def rate(step: RingStep, kind: SimulatedRound, machine: Machine = H200) -> float:
    """flop/s of the kernel in a round of this kind."""
    kernel = machine.kernel(step.backward, kind.causal, step.shape.head_dim)
    length = min(kind.keys, kind.queries)  # self-attention was measured
    return kernel.rate(length) * machine.filled(kind.queries, step.shape.num_heads)


def seconds(step: RingStep, kind: SimulatedRound, machine: Machine = H200) -> float:
    """Time of the kernel in a round of this kind; 0 if no pair is visible."""
    if not kind.pairs:
        return 0.0
    return max(kind.pairs * step.pair_flops / rate(step, kind, machine), machine.call_s)


def merge_seconds(step: RingStep, kind: SimulatedRound, machine: Machine = H200) -> float:
    """Time to merge a round's fp32 result into the running state. Backward, the round's dq, dk and
    dv are added to the sums: two reads and a write.
    """
    if step.num_devices == 1 or not kind.pairs:
        return 0.0
    shape = step.shape
    if step.backward:
        moved = 3 * (shape.q_elements * kind.queries + shape.kv_elements * kind.keys)
    else:
        moved = 0 if kind.first else machine.merge_moves * shape.q_elements * kind.queries
    return FP32 * moved / machine.memory_bytes_s
