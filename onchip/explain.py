"""Which kernel serves a call and why each other one does not, with the operations and bytes the
call cannot avoid.
"""

from typing import NamedTuple

from torch import Tensor

from onchip.dispatch import Plan, plan
from onchip.ops import Extras, Packing, pose
from onchip.problem import DeviceInfo, Options, Problem, Tensors, device_info


class Explanation(NamedTuple):
    problem: Problem
    device: DeviceInfo
    plan: Plan
    flops: int  # forward, over visible pairs; non-empty blocks of a mask count whole
    min_bytes: int  # each input read once, each output written once
    scores_bytes: int  # what standard attention would allocate for S alone

    def __str__(self) -> str:
        p = self.problem
        where = self.device.name or self.device.type
        lines = [
            f"attention of {p.batch} x {p.seqlen_q} queries over {p.seqlen_k} keys on {where}",
            f"  shape       {p.num_heads} heads over {p.num_kv_heads}, "
            f"head_dim {p.head_dim} / {p.head_dim_v}, {str(p.dtype).removeprefix('torch.')}",
            f"  served by   {self.plan.kernel}",
            *(f"  not by      {name}: {reason}" for name, reason in self.plan.reasons.items()),
            f"  flops       {self.flops:.3e} forward, {2.5 * self.flops:.3e} backward",
            f"  min bytes   {human_bytes(self.min_bytes)}, "
            f"{self.flops / max(1, self.min_bytes):.0f} flops for each",
            f"  not stored  {human_bytes(self.scores_bytes)} of scores",
        ]
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    kernel: str | None = None,
    return_lse: bool = False,
    **options: object,
) -> Explanation:
    """What attention() (with cu_seqlens: varlen_attention()) would do with the same arguments.
    Nothing is computed.
    """
    packing = None
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scalars = {n: options.pop(n) for n in Options._fields if n in options}
    problem, x = pose(q, k, v, Options(**scalars), Extras(**options), packing)
    device = device_info(q.device)
    parts = _dense_parts(problem, x)
    flops = sum(p.flops for p in parts)
    if x.mask is not None:
        flops = min(flops, round(x.mask.density() * sum(p.all_flops for p in parts)))
    return Explanation(
        problem,
        device,
        plan(problem, device, kernel),
        flops,
        min_bytes=sum(p.min_bytes for p in parts),
        scores_bytes=sum(4 * p.batch * p.num_heads * p.seqlen_q * p.seqlen_k for p in parts),
    )


def _dense_parts(problem: Problem, x: Tensors) -> list[Problem]:
    """The problem as dense ones: itself, or one per packed sequence."""
    if not problem.packed:
        return [problem]
    lengths = zip(x.cu_seqlens_q.diff().tolist(), x.cu_seqlens_k.diff().tolist(), strict=True)
    return [problem._replace(batch=1, seqlen_q=a, seqlen_k=b, packed=False) for a, b in lengths]


def human_bytes(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
