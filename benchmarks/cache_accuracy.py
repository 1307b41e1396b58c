"""The effect of an 8-bit key/value cache on a model's output: the built-in model reads held-out
chapters through pages in bf16, e4m3 or int8.

The reference is the same model over fp32 pages: RMSE and largest difference of the logits, the mean
Kullback-Leibler divergence of the next byte, the share of positions with another most likely byte,
and the perplexity (per byte), which users see. Everything except the pages is fp32, so that all
differences are the cache's.

  python -m benchmarks.cache_accuracy    # a table; half a minute on one core
"""

import lzma
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.cli.bench.harness import Case, Row, RowRefused
from onchip.kvcache import KVCache
from onchip.models import Decoder, builtin, positions_of
from onchip.quant.kv8 import FORMATS

TEXT = Path(__file__).parents[1] / "examples" / "data" / "kjv.txt.xz"
HELD_OUT, FIRST = 20, 10  # of so many chapters the built-in model has not seen this one
CHAPTERS, LENGTH = 8, 1024  # that are read here, and bytes of each
CHUNK = 256  # tokens of a step: the later ones read the pages that the earlier ones wrote
CACHES = (None, "bf16", *FORMATS)
BENCH = "cache"


class Read(NamedTuple):
    """Logits of every position, fp32 (sequences, length, vocab), and the bytes that follow."""

    logits: Tensor
    targets: Tensor

    @property
    def nats(self) -> float:
        """Of a byte, on average."""
        found = F.cross_entropy(self.logits.flatten(0, 1).double(), self.targets.flatten())
        return float(found)


def rows(
    caches: Sequence[str | None] = CACHES, chapters: int = CHAPTERS, length: int = LENGTH
) -> list[Row]:
    """A row for each cache; value: the perplexity; error: the RMSE of the logits."""
    model, texts = builtin.tiny(), held_out(chapters, length)
    exact = read(model, texts, None)
    found = {name: exact if name is None else read(model, texts, name) for name in caches}
    return [_row(model, name, of, exact) for name, of in found.items()]


def held_out(chapters: int, length: int) -> Tensor:
    """int64 (chapters, length + 1): beginnings of chapters that the model has not seen."""
    if not TEXT.exists():
        raise RowRefused(f"the held-out text is not here: {TEXT} comes with the repository")
    all_of_them = lzma.decompress(TEXT.read_bytes()).split(b"\n\n")[FIRST::HELD_OUT]
    long = [c for c in all_of_them if len(c) > length][:chapters]
    if len(long) < chapters:
        raise RowRefused(f"{len(long)} held-out chapters are longer than {length} bytes")
    return torch.stack([torch.tensor(list(c[: length + 1])) for c in long])


@torch.no_grad()
def read(model: Decoder, texts: Tensor, kv_dtype: str | None, page_size: int = 16) -> Read:
    """The model over pages of this dtype, CHUNK tokens of every text a step. "bf16": values are
    rounded to it on their way into fp32 pages.
    """
    count, length = texts.shape[0], texts.shape[1] - 1
    spec = model.cache_spec(page_size, kv_dtype if kv_dtype in FORMATS else None)
    kind = RoundedCache if kv_dtype == "bf16" else KVCache
    pages = 1 + count * -(-length // page_size)
    cache = kind(spec, pages, max_seqs=count, max_seqlen=length, prefix_reuse=False)
    sequences = [cache.open() for _ in range(count)]
    parts = []
    for start in range(0, length, CHUNK):
        chunk = texts[:, start : min(start + CHUNK, length)]
        cache.append_all(sequences, chunk.tolist())
        batch = cache.view(sequences)
        hidden = model(chunk.flatten(), positions_of(batch), batch, cache)
        parts.append(model.logits(hidden).unflatten(0, (count, -1)))
        cache.commit_all(sequences, [start + chunk.shape[1]] * count)
    return Read(torch.cat(parts, 1), texts[:, 1:])


class RoundedCache(KVCache):
    """fp32 pages that hold what bf16 pages would: everything else stays in fp32."""

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        k, v = (t.bfloat16().to(t.dtype) for t in (k, v))
        super().write(layer, k, v, slot_mapping)


def _row(model: Decoder, name: str | None, of: Read, exact: Read) -> Row:
    config, (count, length, _) = model.config, of.logits.shape
    case = Case(BENCH, "tiny", torch.float32, config.head_dim, length, count, config.num_heads)
    off = of.logits - exact.logits
    perplexity, base = math.exp(of.nats), math.exp(exact.nats)
    return case.row(
        "fp32" if name is None else name,
        perplexity,
        "perplexity of a byte",
        error=float(off.double().square().mean().sqrt()),
        num_kv_heads=config.num_kv_heads,
        kv_dtype=name,
        token_bytes=_token_bytes(model, name),
        perplexity_change=perplexity / base - 1,
        bits_per_byte=of.nats / math.log(2),
        largest_logit_error=float(off.abs().max()),
        logit_rms=float(exact.logits.double().square().mean().sqrt()),
        divergence=_divergence(of, exact),
        other_top=float((of.logits.argmax(-1) != exact.logits.argmax(-1)).double().mean()),
    )


def _token_bytes(model: Decoder, name: str | None) -> int:
    """Of a token in the cache, all layers."""
    spec = model.cache_spec(1, name if name in FORMATS else None)
    return spec.page_bytes // (2 if name == "bf16" else 1)


def _divergence(of: Read, exact: Read) -> float:
    """Mean Kullback-Leibler divergence from the exact next byte, in nats."""
    p, q = (F.log_softmax(r.logits.double(), -1) for r in (exact, of))
    return float((p.exp() * (p - q)).sum(-1).mean())


def lines(found: Sequence[Row]) -> Iterator[str]:
    """The rows as a table."""
    heads = ("cache", "bytes", "perplexity", "change", "RMSE", "largest", "KL, nats", "other top")
    yield ("{:>6} {:>6} {:>11} {:>9} {:>9} {:>8} {:>9} {:>10}").format(*heads)
    for row in found:
        yield (
            f"{row['kernel']:>6} {row['token_bytes']:>6} {row['value']:>11.5f}"
            f" {100 * row['perplexity_change']:>+8.4f}% {row['error']:>9.2e}"
            f" {row['largest_logit_error']:>8.3f} {row['divergence']:>9.2e}"
            f" {100 * row['other_top']:>9.3f}%"
        )


if __name__ == "__main__":
    print(*lines(rows()), sep="\n")
