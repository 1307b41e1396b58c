"""Which tensors of score_mod the Triton kernels take, and in which order they sum gradients.
Dispatch asks, so this is decided without Triton.
"""

from onchip.score_mods.derivative import first_derivatives
from onchip.score_mods.expression import Expression, from_text

MAX_SIZES = 12  # of the tensors that score_mod indexes, in all: arguments of the kernels
IndexNames = tuple[str | int, ...]


def index_names(expression: Expression, load: int) -> IndexNames | None:
    """What indexes the tensor of a load, if that is b, h, q and k, each at most once, and
    constants; else None.
    """
    operations = [expression.operations[a] for a in expression.operations[load].args]
    names = tuple(int(o.value or 0) if o.name == "const" else o.name for o in operations)
    inputs = [name for name in names if isinstance(name, str)]
    is_plain = all(name in ("b", "h", "q", "k") for name in inputs)
    return names if is_plain and len(set(inputs)) == len(inputs) else None


def refuse_tensors(text: str) -> str | None:
    """Why the kernels do not index the tensors of a score_mod, or None if they do."""
    sizes = [n for captured in from_text(text).captured for n in captured.sizes]
    if 0 in sizes:
        return "has no score_mod that indexes an empty tensor"
    if len(sizes) > MAX_SIZES:
        return (
            f"has score_mod with tensors of {MAX_SIZES} dimensions in all, this one indexes"
            f" {len(sizes)}"
        )
    return None


def has_any_order(text: str) -> bool:
    """Whether a gradient of a tensor that score_mod indexes is summed in any order."""
    first = first_derivatives(text)
    loads = zip(first.loads, first.by_load, strict=True)
    return any(d is not None and index_names(first.expression, n) is None for n, d in loads)
