"""`python -m benchmarks ring --simulate`: a step of ring attention on 1 to 1,024 devices, 100k to
10^12 tokens, from measured kernel times and stated link speeds (onchip/parallel/machines.py).

Rows "ring" are whole steps by layout, "scaling" steps of one context on more and more devices,
"hybrid" the same with heads distributed inside nodes and a ring between nodes, "link" steps of one
node by its wiring, "hide" the smallest chunk that hides its messages, by the formula and by
simulation, "published" a published measurement, simulated from the speed of its single call.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from benchmarks.hide_condition import hide_length, hides, slowest_link, unhidden
from benchmarks.ring_prediction import predict, resident_bytes, six_blocks_bytes, stored_bytes
from benchmarks.ring_timeline import Timeline
from onchip.cli.bench.harness import Case, Row, Session, Threshold
from onchip.parallel.machines import H200, LENGTHS, LINKS, Fabric, KernelRates, Link, Machine
from onchip.parallel.simulate import LAYOUTS, RingStep

DEVICES, CONTEXTS = (1, 8, 64, 1024), (10**5, 10**6, 10**7, 10**8, 10**10, 10**12)
SCALED, SCALES = 10**6, tuple(2**i for i in range(11))
CHUNKS = (2048, 8192, 32768)
NODES = Fabric(LINKS["NVLink 4"], LINKS["InfiniBand NDR"])
NODE = 8
# Messages count as hidden when they add less than this to a step: latency never hides wholly.
HIDDEN = 0.01
LIMIT_S = 20
MASKS = {"none": False, "causal": True}
PASSES = {"forward": False, "backward": True}
STEPS = "ring", "scaling", "link"
Job = tuple[str, Callable[[], Row]]


def _shown(rows: list[Row]) -> float:
    """The most that shows, beyond what nothing hides, where the condition holds; in per cent."""
    hidden = [row for row in rows if row["hides"]]
    return max(100 * (r["exposed_s"] - r["unhidden_s"]) / r["step_s"] for r in hidden)


THRESHOLDS = (
    Threshold(
        "exposed where the hide condition holds, latency aside",
        lambda row: row["bench"] in STEPS,
        at_most=0.0,
        measure=_shown,
        unit="% of the step",
        optional=True,
    ),
    Threshold(
        "the whole simulation",
        lambda row: row["bench"] == "simulation",
        at_most=LIMIT_S,
        optional=True,
    ),
)


def run(session: Session) -> None:
    start = time.process_time()
    where = f"a simulation of {H200.name}, kernels measured, links stated"
    session.where = {"device": where, "triton": None, "clocks": {}, "flags": "--simulate"}
    clock = lambda: _case("simulation", RingStep(1, 1)).row(
        "", time.process_time() - start, "s of CPU"
    )
    jobs = *hide_steps(), *link_steps(), *published_steps(), *grid_steps(session.quick)
    session.run([*jobs, ("the clock", clock)])


def grid_steps(quick: bool) -> Iterator[Job]:
    """Contexts and devices, and one context on ever more devices."""
    devices = DEVICES[:3] if quick else DEVICES
    for num_devices, tokens, way in product(devices, CONTEXTS, PASSES):
        title = f"{tokens:.0e} tokens on {num_devices}, {way}"
        for layout, mask in (*product(LAYOUTS, ("causal",)), (LAYOUTS[0], "none")):
            step = RingStep(tokens, num_devices, layout, MASKS[mask], PASSES[way])
            yield title, partial(step_row, "ring", step, NODES)
    for num_devices, way in product(SCALES[:7] if quick else SCALES, PASSES):
        step = RingStep(SCALED, num_devices, backward=PASSES[way])
        yield f"{num_devices} devices", partial(step_row, "scaling", step, NODES)
        if num_devices >= NODE:
            yield f"{num_devices} devices, hybrid", partial(hybrid_row, step)


def link_steps() -> Iterator[Job]:
    for link, chunk, way in product(LINKS.values(), CHUNKS, PASSES):
        step = RingStep(NODE * chunk, NODE, backward=PASSES[way])
        yield f"8 devices over {link.name}", partial(step_row, "link", step, Fabric(link))


def hide_steps() -> Iterator[Job]:
    for link, mask, way in product(LINKS.values(), MASKS, PASSES):
        step = RingStep(1e6, NODE, causal=MASKS[mask], backward=PASSES[way])
        yield f"what hides under {link.name}", partial(hide_row, step, link)


class Published(NamedTuple):
    """A table of others: calls a second of 8,192 causal tokens on one device, forward and forward
    with backward; per cent of that which 8 devices reached on 65,536, by layout.
    """

    gpu: str
    link: Link
    memory_bytes_s: float
    calls: tuple[float, float]
    reached: dict[str, tuple[float, float]]

    @property
    def machine(self) -> Machine:
        """Its kernels are as fast in any round: that is all the table says of them. Results are
        merged by torch: out is scaled in place, then added to.
        """
        forward = 1 / self.calls[0]
        alone = RingStep(8192, 1, "contiguous")
        times = {False: forward, True: 1 / self.calls[1] - forward}
        tflops = {b: alone._replace(backward=b).flops / t / 1e12 for b, t in times.items()}
        sizes = product((False, True), (False, True), (alone.shape.head_dim,))
        kernels = {key: KernelRates((tflops[key[0]],) * len(LENGTHS)) for key in sizes}
        memory = {"memory_bytes_s": self.memory_bytes_s, "merge_moves": 5.0}
        return replace(H200, name=self.gpu, kernels=kernels, **memory)


# zhuzilin/ring-flash-attention, README at 01c8baf, batch API, heads of Llama 3.1 8B. Links: half of
# the 400 and 600 GB/s that NVLink has there in both directions; memory: 90 % of its nominal speed.
PUBLISHED = (
    Published(
        "H800",
        Link("NVLink, 200 GB/s", 200e9, LINKS["NVLink 4"].latency_s),
        3.0e12,
        (591.5, 154.7),
        {"contiguous": (52.1, 53.9), "zigzag": (85.2, 90.2), "striped": (74.4, 82.9)},
    ),
    Published(
        "A100",
        Link("NVLink, 300 GB/s", 300e9, LINKS["NVLink 4"].latency_s),
        1.8e12,
        (373.4, 94.7),
        {"contiguous": (51.4, 52.5), "zigzag": (81.7, 89.8), "striped": (69.6, 82.6)},
    ),
)


def published_steps() -> Iterator[Job]:
    for table, layout, both in product(PUBLISHED, LAYOUTS, (False, True)):
        yield f"8 x {table.gpu}", partial(published_row, table, layout, both)


def published_row(table: Published, layout: str, both: bool) -> Row:
    """`value` is simulated: the ideal time of 8 devices over that of a step, in per cent."""
    step = RingStep(NODE * 8192, NODE, layout)
    ways = [step, step._replace(backward=True)] if both else [step]
    took = sum(Timeline(way, Fabric(table.link), table.machine).seconds for way in ways)
    value = 100 * NODE / table.calls[both] / took
    case = _case("published", step)
    case = replace(case, way="forward+backward") if both else case
    peers = {"published": table.reached[layout][both]}
    columns = {"devices": NODE, "gpu": table.gpu, "fabric": table.link.name}
    return case.row(
        layout, value, "%", num_kv_heads=step.shape.num_kv_heads, peers=peers, **columns
    )


def step_row(bench: str, step: RingStep, fabric: Fabric) -> Row:
    """`value` is the efficiency: the flops at the rate of long calls, over the step's time.
    unhidden_s may show where the hide condition holds, exposed_s is what does.
    """
    found = predict(step, fabric)
    slabs, spent, link = found.slabs, found.time, slowest_link(fabric, step.num_devices)
    return _case(bench, step).row(
        step.layout,
        100 * found.efficiency,
        "%",
        num_kv_heads=step.shape.num_kv_heads,
        devices=step.num_devices,
        fabric=fabric.name,
        step_s=spent.total,
        ideal_s=found.ideal,
        exposed_s=spent.exposed,
        waiting_s=spent.waiting,
        critical_s=spent.critical,
        hides=hides(slabs.slab, link),
        unhidden_s=slabs.num_passes * unhidden(slabs.slab, link),
        memory_gb=resident_bytes(slabs.slab) / 1e9,
        six_blocks_gb=six_blocks_bytes(step) / 1e9,
        stored_gb=stored_bytes(step) / 1e9,
        slabs=slabs.num_slabs,
        tier=slabs.tier and slabs.tier.name,
        modules=slabs.num_modules,
    )


def hybrid_row(step: RingStep) -> Row:
    """`value` is the efficiency if the 8 devices of a node distribute heads among them, and nodes
    form a ring in which every device sends its heads' keys over a link of its own. dealt_s: the
    exchange of q, k, v and out (backward dout and the gradients) inside a node, without overlapping
    computation.
    """
    shape, link = step.shape, LINKS["NVLink 4"]
    heads = shape._replace(
        num_heads=shape.num_heads // NODE, num_kv_heads=shape.num_kv_heads // NODE
    )
    ring = step._replace(num_devices=step.num_devices // NODE, shape=heads)
    found = predict(ring, Fabric(LINKS["InfiniBand NDR"]))
    elements = step.chunk * (2 * shape.q_elements + shape.kv_elements) * (NODE - 1) / NODE
    dealt = 2 * link.latency_s + elements * shape.itemsize / link.bytes_s
    total = found.time.total + dealt
    columns = {"devices": step.num_devices, "fabric": NODES.name, "dealt_s": dealt}
    columns |= {"step_s": total, "ideal_s": found.ideal, "exposed_s": found.time.exposed + dealt}
    value = 100 * found.ideal / total
    return _case("hybrid", step).row("hybrid", value, "%", **columns)


def hide_row(step: RingStep, link: Link) -> Row:
    """`value` is the chunk by the formula, in tokens; simulated_tokens the least that hides."""
    tokens = hide_length(step, link)
    row = _case("hide", step._replace(tokens=0))
    columns = {"link": link.name, "gb_s": link.bytes_s / 1e9, "latency_us": link.latency_s * 1e6}
    columns |= {"simulated_tokens": simulated_length(step, link), "devices": step.num_devices}
    return row.row("", tokens, "tokens", num_kv_heads=step.shape.num_kv_heads, **columns)


def simulated_length(step: RingStep, link: Link) -> int:
    """The chunk from which on messages add less than HIDDEN to a step, within 1 %. The hop that
    brings dK and dV home is not counted: it never hides.
    """
    shown = lambda line: line.exposed - line.step.dkv_bytes / link.bytes_s
    low, high = 1.0, 1e6
    while high / low > 1.01:
        chunk = math.sqrt(low * high)
        line = Timeline(step._replace(tokens=chunk * step.num_devices), Fabric(link))
        low, high = (low, chunk) if shown(line) <= HIDDEN * line.seconds else (chunk, high)
    return round(high)


def _case(bench: str, step: RingStep) -> Case:
    shape, mask = step.shape, "causal" if step.causal else "none"
    way = "backward" if step.backward else "forward"
    sizes = shape.head_dim, int(step.tokens), 1, shape.num_heads
    return Case(bench, mask, torch.bfloat16, *sizes, way=way)
