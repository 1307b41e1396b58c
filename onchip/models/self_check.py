"""The self check: a model over pages must give the logits of its own attention on a few tokens."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from onchip.core.problem import UnsupportedError
from onchip.kvcache import KVCache
from onchip.models.decoder import positions_of
from onchip.models.protocol import Model

MAX_TOKENS = 16  # a self check needs at most so many positions
# The largest error of logits over pages against the model's own attention, RMS over RMS. Measured
# on tiny models: 6e-7 in fp32, 0.02 in bf16, 0.07 with many experts chosen in many layers; 0.58 or
# more where the model counts positions differently.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-2}
_ROUNDING_16 = 0.25
_ENDS = ((0, 4, 5, 6), (0, 0, 9, 11))  # the ends of the steps of two sequences


@torch.no_grad()
def run_self_check(model: Model, own: Callable[[Tensor], Tensor]) -> None:
    """Compare two short sequences over pages, in chunks and packed, with own(tokens), the logits of
    each sequence alone. UnsupportedError if they differ by more than rounding errors.
    """
    texts = [_some_tokens(model, ends[-1]) for ends in _ENDS]
    ours, exact = _over_pages(model, texts), torch.cat([own(text) for text in texts]).double()
    spread = (exact - exact.mean(-1, keepdim=True)).square().mean()
    error = float(((ours - exact).square().mean() / spread).sqrt())
    bound = _ROUNDING.get(model.cache_spec().dtype, _ROUNDING_16)
    if not error <= bound:
        raise UnsupportedError(
            f"in a self check its logits over pages differ from its own by {error:.2g} of their"
            f" size, more than rounding errors do ({bound:g})"
        )


def _some_tokens(model: Model, count: int) -> Tensor:
    """Arbitrary tokens, but not 0 to 2, which are often special."""
    each = torch.arange(count, device=model.device)
    return (3 + count + 7 * each) % model.config.vocab_size


def _over_pages(model: Model, texts: list[Tensor]) -> Tensor:
    """Logits of all tokens, sequence after sequence, computed step by step."""
    cache = KVCache(model.cache_spec(page_size=4), num_pages=8, max_seqs=2, prefix_reuse=False)
    sequences, parts = [cache.open(), cache.open()], ([], [])
    for spans in zip(*map(pairwise, _ENDS), strict=True):
        running = [i for i, (start, stop) in enumerate(spans) if start < stop]
        new = [texts[i][slice(*spans[i])] for i in running]
        rows = _step(model, cache, [sequences[i] for i in running], new)
        for i, part in zip(running, rows.split([len(chunk) for chunk in new]), strict=True):
            parts[i].append(model.logits(part).double())
    return torch.cat([*parts[0], *parts[1]])


def _step(model: Model, cache: KVCache, sequences: list, new: list[Tensor]) -> Tensor:
    cache.append_all(sequences, [chunk.tolist() for chunk in new])
    batch = cache.view(sequences)
    rows = model(torch.cat(new), positions_of(batch), batch, cache)
    for sequence in sequences:
        cache.commit(sequence)
    return rows
