"""Functions that users of FlexAttention write, and whether onchip serves them: the last section of
docs/coming_from/flexattention.md.

    python tests/integrations/flex_programs.py

Every function of attention-gym (commit 7fdb85d0), of its notebook and examples, and of models known
for a function of the score, stated anew in a few lines. A verdict is the result of a call.
"""

import math
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PAGE = Path(__file__).parents[2] / "docs" / "coming_from" / "flexattention.md"
HEADING = "## Their functions\n"
BATCH, HEADS, TOKENS = 2, 4, 35
WIDTH, HEIGHT = 7, 5  # of an image of TOKENS pixels


class Program(NamedTuple):
    """`make` returns the function and the tensors that learn in it. `instead`: what is served of a
    refused one.
    """

    name: str
    computes: str
    make: Callable[[], tuple[Callable, list[Tensor]]]
    instead: str = ""


class Group(NamedTuple):
    title: str
    argument: str  # of flex_attention
    programs: tuple[Program, ...]


def _learned(*sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, dtype=torch.float64, generator=generator).requires_grad_()


def _fixed(function: Callable) -> Callable[[], tuple[Callable, list[Tensor]]]:
    """`make` of a function without learned tensors."""
    return lambda: (function, [])


def _indices(high: int, *sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(high)
    return torch.randint(high, sizes, generator=generator, dtype=torch.int32)


# Functions of the score.


def _alibi(s, b, h, q, k):
    return s + (k - q) * torch.exp2((h + 1) * (-8.0 / HEADS))


def _alibi_by_slopes():
    slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / HEADS) for i in range(HEADS)])
    return lambda s, b, h, q, k: s + slopes[h] * (k - q), []


def _softcap(s, b, h, q, k):
    return 20 * torch.tanh(s / 20)


class _ApproximateTanh(torch.autograd.Function):
    """As attention-gym: an instruction of GPUs in the forward, a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads


def _softcap_by_a_custom_op():
    op = torch.library.custom_op("onchip_tests::approximate_tanh", torch.tanh, mutates_args=(),
                                 schema="(Tensor x) -> Tensor")  # fmt: skip
    return lambda s, b, h, q, k: 20 * op(s / 20), []


def _activation(function):
    return lambda s, b, h, q, k: torch.log(function(s) + 1.0)


def _graphormer_spatial():
    bias, distances = _learned(HEADS, 6), _indices(6, BATCH, TOKENS, TOKENS)
    return lambda s, b, h, q, k: s + bias[h, distances[b, q, k]], [bias]


def _graphormer_edges():
    hops, kinds = 3, 5
    tables = _learned(HEADS, hops, kinds)
    edges = _indices(kinds, BATCH, TOKENS, TOKENS, hops)
    lengths = _indices(hops + 1, BATCH, TOKENS, TOKENS)

    def score_mod(s, b, h, q, k):
        length = lengths[b, q, k]
        terms = (
            torch.where(length > i, tables[:, i][h, edges[b, q, k, i]], 0.0) for i in range(hops)
        )
        return s + sum(terms) / length.clamp(min=1)

    return score_mod, [tables]


def _latent_rope():
    q_rope, k_rope = _learned(BATCH, HEADS, TOKENS, 8), _learned(BATCH, 1, TOKENS, 8)

    def score_mod(s, b, h, q, k):
        return s + 0.3 * torch.dot(q_rope[b, h, q], k_rope[b, h // HEADS, k])

    return score_mod, [q_rope, k_rope]


def _sandwich():
    waves = 1e4 ** (-torch.arange(0, 16, 2) / 16)
    distances = torch.arange(1.0 - TOKENS, TOKENS)
    by_distance = torch.cos(distances[:, None] * waves).sum(-1)
    ratios = HEADS / (8.0 * torch.arange(1, HEADS + 1))
    return lambda s, b, h, q, k: s + by_distance[q - k + TOKENS - 1] * ratios[h], []


def _relative_bias():
    """A learned bias by distance, beyond 8 tokens the same."""
    table = _learned(17)
    return lambda s, b, h, q, k: s + table[(q - k).clamp(-8, 8) + 8], [table]


def _checkerboard(s, b, h, q, k):
    odd = torch.abs(k - q) % 2 == 1
    return torch.where(odd, s * 0.5, s * 2.0)


def _boost_far(s, b, h, q, k):
    distance = torch.abs(q - k)
    return torch.where(distance <= 4, s - 1.0, s + distance)


def _decode_offset():
    """A query that is not the first: its position is captured."""
    offset = torch.tensor(TOKENS // 2)
    return lambda s, b, h, q, k: s + (q + offset - k), []


def _physical_pages():
    size = 5
    logical = _indices(9, BATCH, TOKENS // size) - 1  # -1: not a page of this sequence

    def score_mod(s, b, h, q, k):
        block = logical[b, k // size]
        return torch.where(block >= 0, _alibi(s, b, h, q, block * size + k % size), -math.inf)

    return score_mod, []


def _document_bias():
    """Another bias within a document than between documents."""
    document, bias = _indices(3, BATCH, TOKENS), _learned(2, HEADS)
    inside = lambda b, q, k: (document[b, q] == document[b, k]).int()
    return lambda s, b, h, q, k: s + bias[inside(b, q, k), h], [bias]


def _t5():
    """Buckets of distances: exact below 8, then logarithmic, by a captured table."""
    distance = torch.arange(TOKENS)
    far = 8 + (torch.log(distance.clamp(min=1) / 8) / math.log(16) * 8).long()
    buckets = torch.where(distance < 8, distance, far.clamp(max=15))
    bias = _learned(32, HEADS)

    def score_mod(s, b, h, q, k):
        return s + bias[buckets[(q - k).abs()] + torch.where(k > q, 16, 0), h]

    return score_mod, [bias]


def _t5_computed():
    """The same buckets, computed from the distance."""
    bias = _learned(32, HEADS)

    def score_mod(s, b, h, q, k):
        distance = (q - k).abs()
        far = 8 + (torch.log(distance.clamp(min=1) / 8) / math.log(16) * 8).long()
        bucket = torch.where(distance < 8, distance, far.clamp(max=15))
        return s + bias[bucket + torch.where(k > q, 16, 0), h]

    return score_mod, [bias]


def _swin():
    table = _learned(2 * HEIGHT - 1, 2 * WIDTH - 1, HEADS)

    def score_mod(s, b, h, q, k):
        rows, columns = q // WIDTH - k // WIDTH, q % WIDTH - k % WIDTH
        return s + table[rows + HEIGHT - 1, columns + WIDTH - 1, h]

    return score_mod, [table]


def _sam():
    rows, columns = _learned(BATCH, HEADS, TOKENS, HEIGHT), _learned(BATCH, HEADS, TOKENS, WIDTH)

    def score_mod(s, b, h, q, k):
        return s + rows[b, h, q, k // WIDTH] + columns[b, h, q, k % WIDTH]

    return score_mod, [rows, columns]


def _temperature():
    log_scale = _learned(HEADS)
    return lambda s, b, h, q, k: s * log_scale[h].exp(), [log_scale]


def _distance_decay():
    rate = _learned(HEADS)
    return lambda s, b, h, q, k: s - F.silu(rate[h]) * torch.log((q - k).abs() + 1.0), [rate]


def _gate():
    gate = _learned(BATCH, HEADS, TOKENS)
    return lambda s, b, h, q, k: s * torch.sigmoid(gate[b, h, q]), [gate]


def _pair_bias():
    bias = _learned(BATCH, HEADS, TOKENS, TOKENS)
    return lambda s, b, h, q, k: s + bias[b, h, q, k], [bias]


def _dropped_scores():
    """Scores at captured random cells are dropped."""
    kept = _indices(10, TOKENS, TOKENS) > 2
    return lambda s, b, h, q, k: torch.where(kept[q, k] | (q == k), s, -math.inf), []


def _branch(s, b, h, q, k):
    return s if q >= k else s * 0.5


def _sum_of_row():
    features = _learned(TOKENS, 4)
    return lambda s, b, h, q, k: s + features[q].sum(), [features]


# Masks.


def _causal(b, h, q, k):
    return q >= k


OFFSETS = torch.tensor([0, 9, 10, 26, 35])
DOCUMENTS = torch.repeat_interleave(torch.arange(4), OFFSETS.diff())


def _documents(b, h, q, k):
    start = lambda i: OFFSETS[DOCUMENTS[i]]
    return (DOCUMENTS[q] == DOCUMENTS[k]) & _causal(b, h, q - start(q), k - start(k))


def _packed_documents(b, h, q, k):
    return (k >= OFFSETS[DOCUMENTS[q]]) & _causal(b, h, q, k)


def _shared_prefix(b, h, q, k):
    parents = torch.tensor([0, 0, 2, 2])
    own, shared = DOCUMENTS[q], parents[DOCUMENTS[q]]
    inside = (k >= OFFSETS[own]) & _causal(b, h, q, k)
    before = (own != shared) & (k >= OFFSETS[shared]) & (k < OFFSETS[shared + 1])
    return inside | before


def _groups_of_tokens(b, h, q, k):
    return (q // 6 == k // 6) & _causal(b, h, q % 6, k % 6)


def _block_diffusion(b, h, q, k):
    half, size = 18, 4
    block = lambda i: (i % half) // size
    q_noised, k_noised = q < half, k < half
    same = (block(q) == block(k)) & (q_noised == k_noised)
    clean_before = (block(q) > block(k)) & q_noised & ~k_noised
    return same | clean_before | ((block(q) >= block(k)) & ~q_noised & ~k_noised)


def _dilated_window(b, h, q, k):
    distance = (q - k).abs()
    return (distance <= 9) & (distance % 3 == 0)


def _images_of_text(b, h, q, k):
    spans = torch.tensor([[0, 35], [4, 12], [12, 30], [30, 31], [5, 35]])
    first, end = spans[k // 7][0], spans[k // 7][1]
    return (q >= first) & (q < end)


def _images_by_row(b, h, q, k):
    """As attention-gym: the row of a captured tensor is indexed once more."""
    span = torch.tensor([[0, 35], [4, 12], [12, 30], [30, 31], [5, 35]])[IMAGES[k]]
    return (q >= span[0]) & (q < span[1])


IMAGES = torch.repeat_interleave(torch.arange(5), 7)
GLOBAL = torch.arange(TOKENS) % 11 == 0


def _longformer(b, h, q, k):
    return ((q - k).abs() <= 4) | GLOBAL[q] | GLOBAL[k]


def _tree(b, h, q, k):
    ancestors = torch.eye(24, dtype=torch.bool)
    for i in range(1, 24):
        ancestors[i] |= ancestors[(i - 1) // 2]
    node = (k - 11).clamp(0, 23)
    return (k < 11) | ancestors[q.clamp(max=23), node]


def _draft_training(b, h, q, k):
    size, prefix = 5, 10
    own = (q // size == (k - prefix) // size) & ((k - prefix) % size <= q % size)
    return (k < prefix) | ((k >= prefix) & own)


def _around(q, k, size, reach):
    """Keys around a query whose window is moved into the image."""
    return (q.clamp(reach, size - 1 - reach) - k).abs() <= reach


def _natten(b, h, q, k):
    rows = _around(q // WIDTH, k // WIDTH, HEIGHT, 1)
    return rows & _around(q % WIDTH, k % WIDTH, WIDTH, 2)


def _square(b, h, q, k):
    return ((q // WIDTH - k // WIDTH).abs() <= 1) & ((q % WIDTH - k % WIDTH).abs() <= 1)


def _tiled_natten(b, h, q, k):
    def at(i):
        tile, cell = i // 4, i % 4
        return tile // 4 * 2 + cell // 2, tile % 4 * 2 + cell % 2

    (q_row, q_column), (k_row, k_column) = at(q), at(k)
    return _around(q_row, k_row, 10, 1) & _around(q_column, k_column, 8, 1)


def _morton(b, h, q, k):
    def every_other_bit(i):
        i = i & 0x55
        i = (i | (i >> 1)) & 0x33
        return (i | (i >> 2)) & 0x0F

    rows = _around(every_other_bit(q >> 1), every_other_bit(k >> 1), 8, 1)
    return rows & _around(every_other_bit(q), every_other_bit(k), 8, 1)


def _prefix(b, h, q, k):
    return (k < 12) | _causal(b, h, q, k)


def _window(b, h, q, k):
    return (q - k <= 8) & _causal(b, h, q, k)


def _tiles(b, h, q, k, tiles=(2, 4), cells=4):
    """Tiles of an image, and text after it."""
    pixels = math.prod(tiles) * cells
    visible = None
    stride = math.prod(tiles)
    for size in tiles:
        stride //= size
        q_tile, k_tile = q // cells // stride % size, k // cells // stride % size
        near = (q_tile.clamp(0, size - 2) - k_tile).abs() <= 1
        visible = near if visible is None else visible & near
    is_text = (q >= pixels) | (k >= pixels)
    return ((q < pixels) & (k < pixels) & visible) | is_text


def _video_tiles(b, h, q, k):
    return _tiles(b, h, q, k, tiles=(2, 2, 2))


def _spatial_head(b, h, q, k):
    width = math.floor(2 * 7 / 4) * 4
    return (k < 5) | (q < 5) | (torch.abs(q - k) < width)


def _temporal_head(b, h, q, k):
    in_frame = lambda i: (i - 5) % 10
    return (k < 5) | (q < 5) | (torch.abs(in_frame(q) - in_frame(k)) < 3)


CHOSEN = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:3]
                      for i in range(BATCH * HEADS * 5)]).view(BATCH, HEADS, 5, 3)  # fmt: skip
CHOSEN_MAP = torch.zeros(BATCH, HEADS, 5, 5, dtype=torch.bool).scatter_(-1, CHOSEN, True)
TILE_SIZES = torch.tensor([7, 7, 3, 7, 6])


def _chosen_tiles(b, h, q, k):
    chosen = CHOSEN[b, h, q // 7] == (k // 7).unsqueeze(-1)
    return chosen.any(dim=-1) & (k % 7 < TILE_SIZES[k // 7])


def _chosen_tiles_by_map(b, h, q, k):
    return CHOSEN_MAP[b, h, q // 7, k // 7] & (k % 7 < TILE_SIZES[k // 7])


def _padded_tiles(b, h, q, k):
    return k % 7 < TILE_SIZES[k // 7]


def _all_but_a_corner(b, h, q, k):
    return torch.where((q == 0) & (k < 8), False, True)


def _completed_blocks(b, h, q, k):
    return k < (q + 1) // 4


PAGES = _indices(8, BATCH, 7) - 1


def _physical_causal(b, h, q, k):
    page = PAGES[b, k // 5]
    return torch.where(page >= 0, _causal(b, h, q, page * 5 + k % 5), False)


def _shard(b, h, q, k, first_q=8, first_k=3):
    return _causal(b, h, q + first_q, k + first_k)


GROUPS = (
    Group("attention-gym: `attn_gym/mods`", "score_mod", (
        Program("generate_alibi_bias", "ALiBi, slopes computed from h", _fixed(_alibi)),
        Program("generate_tanh_softcap", "c tanh(s / c)", _fixed(_softcap)),
        Program("generate_tanh_softcap(approx=True)", "the same by a custom op",
                _softcap_by_a_custom_op, "torch.tanh"),
        Program("the same in an autograd.Function", "c tanh(s / c), an own gradient",
                _fixed(lambda s, b, h, q, k: 20 * _ApproximateTanh.apply(s / 20)), "torch.tanh"),
        Program("generate_activation_score_mod", "log(gelu(s) + 1)", _fixed(_activation(F.gelu))),
        Program("generate_activation_score_mod(relu)", "log(relu(s) + 1)",
                _fixed(_activation(F.relu))),
        Program("generate_graphormer_spatial_bias", "bias by distance in a graph",
                _graphormer_spatial),
        Program("generate_graphormer_edge_bias", "mean bias of the edges of a path",
                _graphormer_edges),
        Program("generate_sandwich_bias", "bias by distance, scaled by head", _sandwich),
        Program("generate_mla_rope_score_mod", "dot product of captured rows", _latent_rope,
                "concatenate these columns, scaled, to those of q and k"),
    )),
    Group("attention-gym: notebook, examples, benchmarks", "score_mod", (
        Program("noop", "s", _fixed(lambda s, b, h, q, k: s)),
        Program("causal_bias", "-inf above the diagonal", _fixed(
            lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")))),
        Program("checkerboard", "s / 2 or 2 s by parity", _fixed(_checkerboard)),
        Program("relative_bias", "s + q - k", _fixed(lambda s, b, h, q, k: s + (q - k))),
        Program("head_bias", "s + 2 h", _fixed(lambda s, b, h, q, k: s + 2 * h)),
        Program("alibi_and_causal_closure", "ALiBi, captured slopes", _alibi_by_slopes),
        Program("score_mod_w_offset", "a captured scalar shifts q", _decode_offset),
        Program("create_broken_mod", "another score within a window", _fixed(_boost_far)),
        Program("PagedAttention.get_score_mod", "ALiBi at logical positions of pages",
                _physical_pages),
    )),
    Group("Models and tutorials", "score_mod", (
        Program("relative position", "learned bias by clamped distance", _relative_bias),
        Program("T5", "bias by bucket of a captured table", _t5),
        Program("T5, computed buckets", "bias by logarithm of distance", _t5_computed),
        Program("Swin", "bias by distance in an image", _swin),
        Program("SAM", "rel_h[b, h, q, kh] + rel_w[b, h, q, kw]", _sam),
        Program("pair bias", "bias[b, h, q, k]", _pair_bias),
        Program("document bias", "bias by captured document ids", _document_bias),
        Program("temperature", "s exp(t[h])", _temperature),
        Program("distance decay", "s - rate[h] log(distance + 1)", _distance_decay),
        Program("gate", "s sigmoid(g[b, h, q])", _gate),
        Program("tanh", "tanh(s)", _fixed(lambda s, b, h, q, k: torch.tanh(s))),
        Program("dropped scores", "-inf at captured cells", _dropped_scores),
        Program("a branch of Python", "s if q >= k else s / 2", _fixed(_branch), "torch.where"),
        Program("a sum over a captured row", "s + x[q].sum()", _sum_of_row,
                "capture the sums, x.sum(-1)"),
    )),
    Group("attention-gym: `attn_gym/masks`", "block_mask", (
        Program("causal_mask", "q >= k", _fixed(_causal)),
        Program("batchify_mask_mod", "causal in groups of tokens", _fixed(_groups_of_tokens)),
        Program("generate_block_diffusion_mask", "noised and clean halves",
                _fixed(_block_diffusion)),
        Program("generate_dilated_sliding_window", "every third key of a window",
                _fixed(_dilated_window)),
        Program("generate_doc_mask_mod", "causal in documents", _fixed(_documents)),
        Program("generate_packed_causal_doc_mask_mod", "the same by starts",
                _fixed(_packed_documents)),
        Program("generate_shared_prefix_mask_mod", "a document sees its parent",
                _fixed(_shared_prefix)),
        Program("generate_vision_cross_attention_mask_mod", "text sees its images",
                _fixed(_images_by_row)),
        Program("generate_global_sliding_window", "window and global tokens", _fixed(_longformer)),
        Program("generate_jetspec_tree_causal_mask_mod", "ancestors in a tree", _fixed(_tree)),
        Program("generate_jetspec_training_mask_mod", "prefix and own block",
                _fixed(_draft_training)),
        Program("generate_natten", "neighbours in an image", _fixed(_natten)),
        Program("generate_tiled_natten", "the same, pixels in tiles", _fixed(_tiled_natten)),
        Program("generate_morton_natten", "the same, pixels in Z-order", _fixed(_morton)),
        Program("generate_prefix_lm_mask", "a prefix, then causal", _fixed(_prefix)),
        Program("generate_sliding_window", "a causal window", _fixed(_window)),
        Program("generate_sta_mask_mod_2d", "near tiles of an image", _fixed(_tiles)),
        Program("generate_sta_mask_mod_3d", "near tiles of a video", _fixed(_video_tiles)),
        Program("generate_spatial_head_mask_mod", "prompt and near tokens", _fixed(_spatial_head)),
        Program("generate_temporal_head_mask_mod", "prompt and near pixels",
                _fixed(_temporal_head)),
        Program("generate_vsa_mask_mod", "chosen tiles, by a list", _fixed(_chosen_tiles)),
        Program("generate_vsa_block_map_mask_mod", "chosen tiles, by a map",
                _fixed(_chosen_tiles_by_map)),
        Program("generate_vsa_padding_mask_mod", "tokens that tiles have", _fixed(_padded_tiles)),
    )),
    Group("attention-gym: masks of the notebook and examples", "block_mask", (
        Program("sasa_mask", "a square around a pixel", _fixed(_square)),
        Program("vision_x_attention_mask", "text sees its images", _fixed(_images_of_text)),
        Program("create_njt_wrapper", "a mask in nested sequences", _fixed(_documents)),
        Program("subtle_mask_mod", "all but a corner", _fixed(_all_but_a_corner)),
        Program("make_block_mask", "completed blocks only", _fixed(_completed_blocks)),
        Program("PagedAttention.get_mask_mod", "causal at logical positions",
                _fixed(_physical_causal)),
        Program("causal_shard_mask", "causal with offsets by default", _fixed(_shard)),
    )),
)  # fmt: skip


def qkv(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = BATCH, HEADS, TOKENS, 16
    return [torch.randn(sizes, dtype=dtype, generator=generator) for _ in range(3)]


def refusal(group: Group, program: Program) -> str | None:
    """The sentence that a call with the function raises; None if it is served."""
    from onchip import UnsupportedError
    from onchip.integrations.flex import flex_attention

    function, _ = program.make()
    options: dict[str, Any] = {group.argument: function}
    try:
        flex_attention(*qkv(), **options)
    except UnsupportedError as error:
        return str(error).partition("; served:")[0]
    return None


def section() -> str:
    """The generated section of the page."""
    tables, refused, served = [], [], 0
    for group in GROUPS:
        lines = []
        for program in group.programs:
            sentence = refusal(group, program)
            served += sentence is None
            if sentence is not None:
                refused.append(f"{program.name}: {sentence}. Instead: {program.instead}.")
            verdict = "served" if sentence is None else "refused"
            name = f"`{program.name}`" if "_" in program.name else program.name
            lines.append(f"| {name} | {program.computes} | {verdict} |\n")
        head = f"| function | computes | `{group.argument}=` |\n|---|---|---|\n"
        tables += [f"\n### {group.title}\n\n", head, *lines]
    reasons = [_fill(f"- {reason}", subsequent_indent="  ") for reason in refused]
    return "".join([_introduction(served, len(refused)), *tables, "\n### Refused\n\n", *reasons])


def _introduction(served: int, refused: int) -> str:
    text = (
        f"{served} functions are served and {refused} are refused by name. They are functions of"
        " [attention-gym](https://github.com/meta-pytorch/attention-gym) and of known models,"
        " stated anew in [flex_programs.py](../../tests/integrations/flex_programs.py), which"
        " writes this section. A test compares each served one with torch's own `flex_attention`,"
        " forward and backward, and this section with the verdicts of today. What looks into the"
        " tensors of vmap, as `debug_score_mod.py` does to print them, raises a TypeError."
    )
    return f"{HEADING}\n{_fill(text)}"


def _fill(text: str, **options: Any) -> str:
    return (
        textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False, **options) + "\n"
    )


def rewrite(page: str) -> str:
    """The page with the section of today."""
    return page.partition(HEADING)[0] + section()


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
