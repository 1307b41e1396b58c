"""Parallel sampling and beam search on one paged cache: shared pages, and copy on write.

    python examples/fork.py

A tiny decoder with random weights continues one prompt four times, by forks of a sequence. Printed
are the page tables before and after a write, coloured by holders with rich (`.[cli]`).
"""

from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

import onchip
from onchip.kvcache import KVCache, NoRoom, Sequence, Spec

unshared = lambda group: sum(len(sequence.table) for sequence in group)
Watcher = Callable[[str, list[Sequence]], None]  # (event, its sequences)
COLOURS = {1: "white", 2: "bright_blue", 3: "bright_green", 4: "bright_yellow"}


class Decoder:
    """A decoder with random weights: attention and a residual, no more."""

    vocabulary, num_layers, heads, head_dim = 97, 2, (4, 2, 2), 16  # heads of q, k and v

    def __init__(self, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        width = self.heads[0] * self.head_dim
        draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
        self.embed, self.place = draw(self.vocabulary, width), 0.5 * draw(512, width)
        self.qkv = draw(self.num_layers, width, sum(self.heads) * self.head_dim) / width**0.5
        self.out = draw(self.num_layers, width, width) / width**0.5
        self.head = 2 * draw(width, self.vocabulary) / width**0.5

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Log probabilities after each new token; attend(layer, q, k, v) sees cached tokens."""
        x = self.embed[tokens] + self.place[positions]
        for layer in range(self.num_layers):
            qkv = (x @ self.qkv[layer]).unflatten(-1, (-1, self.head_dim))
            x = x + attend(layer, *qkv.split(self.heads, dim=1)).flatten(1) @ self.out[layer]
        return (x @ self.head).log_softmax(-1)


def new_cache(num_pages: int = 64, page_size: int = 8) -> KVCache:
    sizes = Decoder.num_layers, Decoder.heads[1], Decoder.head_dim
    spec = Spec(*sizes, page_size=page_size, dtype=torch.float64)
    return KVCache(spec, num_pages, max_seqs=16, prefix_reuse=False)


def forward(model: Decoder, cache: KVCache, sequences: list[Sequence]) -> Tensor:
    """Compute the appended tokens; log probabilities after the last one of each sequence."""
    batch = cache.view(sequences)
    new = [(s.tokens[i], i) for s in sequences for i in range(s.computed, s.length)]
    tokens, positions = torch.tensor(new).T

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor):
        cache.write(layer, k, v, batch.slot_mapping)
        packing = {"cu_seqlens_q": batch.cu_seqlens_q, "max_seqlen_q": batch.max_seqlen_q}
        where = batch.page_table, batch.cache_seqlens
        return onchip.paged_attention(q, *cache.layer(layer), *where, **packing)

    logprobs = model(tokens, positions, attend)
    for sequence in sequences:
        cache.commit(sequence)
    return logprobs[batch.cu_seqlens_q[1:].long() - 1]


def unwrap(result):
    """The cache's result; MemoryError if it has no free pages or rows."""
    if isinstance(result, NoRoom):
        raise MemoryError(f"{result.needed} {result.what} are needed, {result.free} are free")
    return result


def start(model: Decoder, cache: KVCache, prompt: list[int]) -> tuple[Sequence, Tensor]:
    """Compute the prompt once."""
    sequence = unwrap(cache.open())
    unwrap(cache.append(sequence, prompt))
    return sequence, forward(model, cache, [sequence])


def sample(model: Decoder, cache: KVCache, prompt: list[int], n: int, steps: int, watch: Watcher):
    """n continuations of a prompt; continuation i samples with seed i."""
    first, rows = start(model, cache, prompt)
    group = [first, *(unwrap(cache.fork(first)) for _ in range(n - 1))]
    watch("forked", group)
    generators = [torch.Generator().manual_seed(i) for i in range(n)]
    for _ in range(steps):
        drawn = zip(rows.exp().expand(n, -1), generators, strict=True)
        tokens = [torch.multinomial(p, 1, generator=g).tolist() for p, g in drawn]
        unwrap(cache.append_all(group, tokens))
        watch("wrote", group)
        rows = forward(model, cache, group)
    return finish(cache, group, len(prompt))


def search(model: Decoder, cache: KVCache, prompt: list[int], n: int, steps: int, watch: Watcher):
    """The n most probable continuations that a beam search finds, best first."""
    first, rows = start(model, cache, prompt)
    beams, scores = [first], torch.zeros(1, dtype=torch.float64)
    for _ in range(steps):
        scores, places = (scores[:, None] + rows).flatten().topk(n)
        parents, tokens = places // rows.shape[1], places % rows.shape[1]
        beams = fork_beams(cache, beams, parents.tolist())
        watch("chosen", beams)
        unwrap(cache.append_all(beams, tokens[:, None].tolist()))
        watch("wrote", beams)
        rows = forward(model, cache, beams)
    return finish(cache, beams, len(prompt))


def fork_beams(cache: KVCache, beams: list[Sequence], parents: list[int]) -> list[Sequence]:
    """The first child continues its parent's sequence, others fork; childless beams are freed."""
    children: list[Sequence] = []
    for parent in parents:
        is_taken = beams[parent] in children
        children.append(unwrap(cache.fork(beams[parent])) if is_taken else beams[parent])
    for beam in beams:
        if beam not in children:
            cache.free(beam)
    return children


def finish(cache: KVCache, group: list[Sequence], prompt: int) -> list[list[int]]:
    """The generated tokens; all pages are freed."""
    outputs = [sequence.tokens[prompt:] for sequence in group]
    for sequence in group:
        cache.free(sequence)
    return outputs


class PageWatch:
    """Counts pages after every write, and prints the first writes that copied pages."""

    def __init__(self, cache: KVCache, console: Console | None = None, prints: int = 2):
        self.cache, self.console, self.prints = cache, console, prints
        self.steps = self.held = self.unshared = self.copied = 0
        self.before: dict[Sequence, tuple[int, ...]] = {}
        self.picture = Table()

    def __call__(self, what: str, group: list[Sequence]) -> None:
        earlier, self.picture = self.picture, self.draw(what, group)
        if what == "wrote":
            copied = sum(len(self.copies(s)) for s in group)
            self.steps, self.copied = self.steps + 1, self.copied + copied
            self.held, self.unshared = self.held + self.in_use, self.unshared + unshared(group)
            if self.console and copied and self.prints:
                self.console.print(earlier, "", self.picture, "")
                self.prints -= 1
        self.before = {s: s.table.pages for s in group}

    @property
    def in_use(self) -> int:
        return self.cache.pool.capacity - self.cache.pool.num_free

    def copies(self, sequence: Sequence) -> list[tuple[int, int]]:
        """(source, destination) of the pages that changed since the last call."""
        pairs = zip(self.before.get(sequence, ()), sequence.table.pages, strict=False)
        return [(old, new) for old, new in pairs if old != new]

    def draw(self, what: str, group: list[Sequence]) -> Table:
        """One line per sequence: its pages, each with its number of holders, and copies."""
        total = f"{self.in_use} pages in use, {unshared(group)} if none were shared"
        table = Table(what, f"step {self.steps}", total, box=None)
        for name, sequence in zip("ABCDEFGH", group, strict=False):
            pages = Text()
            for page in sequence.table.pages:
                refs = self.cache.pool.refs(page)
                pages.append(f"{page:>3}", COLOURS[min(refs, 4)]).append(f"×{refs}", "dim")
            for old, new in self.copies(sequence):
                pages.append(f"   copied {old} → {new}")
            table.add_row(name, f"{sequence.length} tokens", pages)
        return table

    def summary(self) -> str:
        free = f"{self.cache.pool.num_free} of {self.cache.pool.capacity} are free again"
        return f"Pages saved: {1 - self.held / self.unshared:.0%}; copied: {self.copied}; {free}."


def main() -> None:
    console, model = Console(highlight=False), Decoder()
    prompt = [(7 * i) % Decoder.vocabulary for i in range(21)]
    console.print("Four continuations of 21 tokens, in pages of 8. 3×2 is page 3, which 2 of")
    console.print("them hold; the colours of", end="")
    console.print(*(f"[{c}] {n}[/]" for n, c in COLOURS.items()), sep=",", end=" holders.\n\n")
    for name, run in (("Parallel sampling", sample), ("Beam search", search)):
        watch = PageWatch(new_cache(), console)
        console.rule(name)
        for i, tokens in enumerate(run(model, watch.cache, prompt, 4, 24, watch)):
            console.print(f"{'ABCD'[i]}: {' '.join(map(str, tokens))}")
        console.print(watch.summary() + "\n")


if __name__ == "__main__":
    main()
