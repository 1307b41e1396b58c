"""Trees of drafts: outputs are those without drafts, and accepted paths move together."""

import random

import pytest
import torch

from onchip.engine import LLM, Request, SamplingParams
from onchip.engine.cuda_graphs import StepGraphs
from onchip.engine.sampler import make_sampling_metadata
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.engine.speculation.draft import choose_children, chunk_length
from onchip.engine.speculation.tree import MAX_CHUNK_TOKENS, DraftTree, TreeShape, find_path
from onchip.kvcache import draft_trees
from onchip.models import ModelConfig, builtin, random_model
from tests.engine.replayed import Replayed

LEAVES = "[(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1)]"
BRANCHES = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1)]"


def config(tree, **options):
    return SpeculativeConfig.parse({"speculative_token_tree": tree} | options)


def ngram(tree=BRANCHES):
    return config(tree, prompt_lookup_max=3, prompt_lookup_min=1)


def draft(tree, **options):
    return config(tree, method="draft", model="given as draft_model", **options)


class Forest:
    """Random trees that have the known continuation of a request among their paths."""

    def __init__(self, outputs):
        self.outputs, self.draw = outputs, random.Random(1)

    def propose(self, wanted):
        return [self.grow(*one) for one in wanted]

    def grow(self, sample, limit):
        choices = self.outputs[sample.request.request_id].outputs
        is_known = sample.index < len(choices)  # best_of: the others are not
        tokens = choices[sample.index].token_ids[len(sample.token_ids) :] if is_known else ()
        paths, parents = [], []
        for i in range(limit):
            parents.append(self.draw.randrange(-1, i))
            before = paths[parents[i]] if parents[i] >= 0 else []
            right = [*tokens[: len(before) + 1]]
            is_right = (
                right[:-1] == before and self.draw.random() < 0.8 and len(right) > len(before)
            )
            paths.append(right if is_right else [*before, 65])
        return DraftTree(tuple([path[-1] for path in paths]), tuple(parents))


def other(tiny):
    torch.manual_seed(3)
    return random_model(ModelConfig.from_hf(tiny.CONFIG | {"num_hidden_layers": 1}))


@pytest.fixture(scope="module")
def plain(tiny):
    with tiny.engine(prefix_caching=False, budget=500, num_pages=900) as one:
        tiny.ask(one)
        return tiny.drain(one)[0]


def test_a_tree_is_named_by_its_paths():
    shape = TreeShape.parse("[(1,), (0, 0), (0,), (0, 1), (0, 0, 0)]")
    assert shape.paths == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    assert shape.parents == (-1, -1, 0, 0, 2) and shape.depth == 3
    assert shape.num_children == (2, 0, 1, 0, 0, 2)
    assert shape.levels == ((-1,), (0,), (2,)) and not shape.branches_late
    assert [find_path(shape.parents, i) for i in (-1, 1, 4)] == [[], [1], [0, 2, 4]]
    assert TreeShape.parse(BRANCHES).levels == ((-1,), (0, 1), (3, 5))
    assert TreeShape.parse(BRANCHES).branches_late and not TreeShape.parse(LEAVES).branches_late
    assert TreeShape.parse("[(0,), (0, 0)]") == TreeShape.chain(2) and TreeShape.chain(2).is_chain
    assert [chunk_length(TreeShape.parse(tree)) for tree in (LEAVES, BRANCHES)] == [2, 4]


def test_a_part_of_a_tree_is_a_tree():
    shape = TreeShape.parse(BRANCHES)
    assert shape.cut(9) is shape and shape.cut(20) is shape
    assert shape.cut(4).paths == ((0,), (1,), (0, 0), (0, 0, 0))
    for count in range(1, 10):
        part = shape.cut(count)
        assert len(part.paths) == count and TreeShape.parse(str(list(part.paths))) == part
    assert TreeShape.chain(5).cut(3) == TreeShape.chain(3)


def test_a_first_path_is_a_chain():
    tree = DraftTree((4, 5, 6, 7, 8), (-1, -1, 1, 0, 3))
    assert tree.first_path() == DraftTree((4, 7, 8))
    assert DraftTree((4, 5)).first_path() == DraftTree((4, 5))


@pytest.mark.parametrize(
    "tree, message",
    [
        ("[(0,), (1, 0)]", r"has \(1, 0\) without \(1,\)"),
        ("[(0,), (2,)]", r"has \(2,\) without \(1,\)"),
        ("[(0,), (0,)]", "none of them twice"),
        ("[]", "1 to 63 paths"),
        (str([(i,) for i in range(64)]), "1 to 63 paths"),
        ("[(-1,)]", "not a list of tuples"),
        ("[()]", "not a list of tuples"),
        ("[(True,)]", "not a list of tuples"),
        ("__import__('os')", "not a list of tuples"),
        ("[0, 1]", "not a list of tuples"),
        (7, "must be a str"),
    ],
)
def test_invalid_trees_are_named(tree, message):
    with pytest.raises(ValueError, match=message):
        config(tree)


def test_the_number_of_drafts_is_that_of_the_paths():
    assert config(LEAVES).num_speculative_tokens == 7
    assert config(LEAVES, num_speculative_tokens=7) == config(LEAVES)
    with pytest.raises(ValueError, match="num_speculative_tokens=5 .* has 7 paths"):
        config(LEAVES, num_speculative_tokens=5)


def test_masks_of_trees_have_a_bit_for_each_token():
    """As many tokens as a tree may have; the last rows are the padding of a static batch."""
    draw = random.Random(4)
    trees = [[draw.randrange(-1, i) for i in range(n)] for n in (64, 1, 33, 0)]
    assert MAX_CHUNK_TOKENS == draft_trees.MAX_CHUNK_TOKENS == 64
    numbers = torch.tensor([*draft_trees.pack_trees(trees), *[0] * 9], dtype=torch.int32)
    assert len(numbers) == draft_trees.count_tree_numbers(98 + 3)
    cu = torch.tensor([0, 64, 65, 98, 98], dtype=torch.int32)
    rows = draft_trees.read_trees(numbers, cu, 64)
    assert rows.mask.shape == (4, 64, 64) and rows.depths.shape == (101,)
    for b, parents in enumerate(trees):
        for i in range(len(parents)):
            path = find_path(parents, i)
            assert rows.mask[b, i].nonzero().flatten().tolist() == path
            assert rows.depths[cu[b] + i] == len(path) - 1
    with pytest.raises(ValueError, match="65 tokens of a tree exceed 64"):
        draft_trees.pack_trees([range(-1, 64)])


@torch.no_grad()
@pytest.mark.parametrize("dtype, most", [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_logits_of_a_tree_are_those_of_its_paths(tiny, dtype, most):
    """Two trees, a chain and one token in one step; each path alone in a sequence of its own."""
    from onchip.kvcache import KVCache
    from onchip.kvcache.draft_trees import pack_trees
    from onchip.models import positions_of

    model, draw = random_model(ModelConfig.from_hf(tiny.CONFIG)).to(dtype), random.Random(2)
    known = [draw.choices(range(256), k=n) for n in (9, 14, 3, 5)]
    parents = [[-1, 0, 0, 1, 1, 2, 5, 0], [-1, 0, 0, 0], [-1, 0, 1], [-1]]
    new = [draw.choices(range(256), k=len(each)) for each in parents]

    def compute(cache, sequences, ids, trees=None):
        numbers = [] if trees is None else pack_trees(trees)
        for sequence, tokens in zip(sequences, ids, strict=True):
            cache.append(sequence, tokens)
        batch = cache.view(sequences, extra=torch.tensor(numbers, dtype=torch.int32))
        batch = batch.grow_trees(batch.extra) if trees else batch
        flat = torch.tensor([token for tokens in ids for token in tokens])
        hidden = model(flat, positions_of(batch), batch, cache)
        return model.logits(hidden).split([len(tokens) for tokens in ids])

    cache = KVCache(model.cache_spec(4), 60, max_seqs=4)
    sequences = [cache.open() for _ in known]
    compute(cache, sequences, known)
    cache.commit_all(sequences, [len(tokens) for tokens in known])
    logits = compute(cache, sequences, new, parents)
    for i, each in enumerate(parents):
        for j in range(len(each)):
            path = find_path(each, j)
            alone = KVCache(model.cache_spec(4), 60, max_seqs=1)
            tokens = [*known[i], *(new[i][k] for k in path)]
            (expected,) = compute(alone, [alone.open()], [tokens])
            assert (logits[i][j] - expected[-1]).abs().max() < most


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_tokens_move_in_all_layers(tiny, page_size, kv_dtype):
    from onchip.kvcache import KVCache

    cache = KVCache(tiny.model().cache_spec(page_size, kv_dtype), 30, max_seqs=2)
    for number, pages in enumerate(cache.pages.tensors):
        content = torch.arange(pages.numel()) * (number + 3) % 120
        pages.copy_(content.view(pages.shape).to(pages.dtype))
    first, sequence = cache.open(), cache.open()
    cache.append(first, [1] * 3)
    assert cache.append(sequence, [1] * 5) is None and cache.reserve(sequence, 9) is None
    slots = torch.tensor(sequence.table.pages_from(0)).repeat_interleave(page_size) * page_size
    slots = (slots + torch.arange(len(slots)) % page_size)[:14]

    def read():
        rows = [t.flatten(1, 2)[:, slots] for t in cache.pages.tensors[:2]]
        scales = [t.transpose(2, 3).flatten(1, 2)[:, slots] for t in cache.pages.tensors[2:]]
        return [t.clone() for t in (*rows, *scales)]

    before = read()
    cache.move_tokens(sequence, [5, 7, 8, 12], 5)
    for old, new in zip(before, read(), strict=True):
        assert torch.equal(new[:, 5:9], old[:, [5, 7, 8, 12]])
        rest = [*range(5), *range(9, 14)]
        assert torch.equal(new[:, rest], old[:, rest]) and not torch.equal(new, old)
    with pytest.raises(ValueError, match="start=4, but 5 tokens have ids"):
        cache.move_tokens(sequence, [6], 4)
    with pytest.raises(ValueError, match="positions"):
        cache.move_tokens(sequence, [14], 6)


OPTIONS = [
    {},
    {"overlap": True},
    {"budget": 30, "num_pages": 40, "host_pages": 60},
    {"budget": 19, "num_pages": 36, "prefix_caching": False},
    {"cascade": "always"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_outputs_equal_those_without_drafts(tiny, plain, options):
    """Greedy, sampled, penalties, logprobs, stop strings, several samples, beams; with preemption
    by swap and by recomputation, and with shared prefixes that are read once.
    """
    with tiny.engine(speculative_config=ngram(), **options) as one:
        one._speculator._proposer = Forest(plain)
        tiny.ask(one)
        outputs, stats = tiny.drain(one)[0], one.stats()
    assert tiny.visible(outputs) == tiny.visible(plain)
    drafts = stats.speculation
    assert drafts.failure is None and drafts.mean_acceptance_length > 1.2
    assert len(drafts.num_accepted_tokens_per_pos) >= 3 and drafts.num_accepted_tokens_per_pos[1]
    assert "num_pages" not in options or stats.preempted_by_swap + stats.preempted_by_recompute
    assert "cascade" not in options or stats.cascade_steps


@pytest.mark.parametrize("tree", [LEAVES, BRANCHES])
def test_prompt_lookup_merges_several_matches(tiny, plain, tree):
    with tiny.engine(speculative_config=ngram(tree)) as one:
        tiny.ask(one)
        assert tiny.visible(tiny.drain(one)[0]) == tiny.visible(plain)
        assert one.stats().speculation.num_drafts


def test_a_tree_of_prompt_lookup_has_the_preferred_match_first(engine):
    """After 1 2 came 5 6, before that 5 7, before that 9; after 2 alone also 8 8."""
    from onchip.engine.speculation.ngram import NgramProposer

    tokens = [2, 8, 8, 1, 2, 9, 4, 1, 2, 5, 7, 1, 2, 5, 6, 1, 2]
    options = {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    sample = Request("r", tokens).samples[0]
    tree = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0)]"
    (found,) = NgramProposer(config(tree, **options)).propose([(sample, 7)])
    assert found == DraftTree((5, 9, 8, 6, 7, 4, 8), (-1, -1, -1, 0, 0, 1, 2))
    (part,) = NgramProposer(config(tree, **options)).propose([(sample, 3)])
    assert part == DraftTree((5, 9, 6), (-1, -1, 0))
    (chain,) = NgramProposer(config("[(0,), (0, 0)]", **options)).propose([(sample, 9)])
    assert chain == DraftTree((5, 6))


@pytest.mark.parametrize("tree", [LEAVES, BRANCHES])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("options", OPTIONS[1:4:2])
def test_a_draft_model_grows_trees(tiny, plain, tree, same, options):
    model = tiny.model() if same else other(tiny)
    with tiny.engine(speculative_config=draft(tree), draft_model=model, **options) as one:
        tiny.ask(one)
        outputs, stats = tiny.drain(one)[0], one.stats().speculation
        one._draft.cache.check()
        one._draft._release_ended()
        assert not one._draft.cache.pool.tables
    assert tiny.visible(outputs) == tiny.visible(plain)
    assert stats.failure is None and len(stats.num_accepted_tokens_per_pos) == 3
    counts = stats.num_accepted_tokens_per_pos
    assert not same or (counts[0] > 0.9 * stats.num_drafts and counts[2] > 3)


@pytest.mark.parametrize("tree", [LEAVES, BRANCHES])
@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_first_choices_are_what_the_target_samples(tiny, tree, penalty):
    """The same random numbers: a draft model that is the target is right along its first path."""
    params = SamplingParams(
        seed=4,
        temperature=1.5,
        top_p=0.9,
        max_tokens=41,
        ignore_eos=True,
        repetition_penalty=penalty,
    )
    with tiny.engine(speculative_config=draft(tree), draft_model=tiny.model()) as one:
        tiny.ask(one, ["x", "some text"], [params])
        tiny.drain(one)
        counts, steps = one.stats().speculation.num_accepted_tokens_per_pos, one.stats().steps
    assert counts[0] - counts[2] <= 4 and counts[2] >= 18  # cut at the end of both requests
    assert steps <= 2 + 41 / 4 + 4


def test_children_are_the_sampled_token_and_the_largest_others():
    """Greedy, sampled, and with a token that a bias forbids."""
    logits = torch.tensor([[0.0, 3, 2, 1, -1]] * 3)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1, temperature=2.0),
        SamplingParams(temperature=0, logit_bias={1: -100}),
    ]
    samples = [Request(str(i), [1], p).samples[0] for i, p in enumerate(params)]
    metadata = make_sampling_metadata(samples, "cpu")
    first = choose_children(logits, metadata, 1)[:, 0].tolist()
    children = choose_children(logits, metadata, 3).tolist()
    assert [row[0] for row in children] == first and first[0] == 1 and first[2] == 2
    orders = [1, 2, 3, 0, 4], [1, 2, 3, 0, 4], [2, 3, 0, 4, 1]
    for row, order in zip(children, orders, strict=True):
        assert row[1:] == [token for token in order if token != row[0]][:2]


def test_steps_with_long_chunks_have_chains(tiny):
    """A prompt of 100 tokens arrives, which are a chunk of one step."""
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with tiny.engine(speculative_config=ngram(), budget=150) as one:
        tiny.ask(one, ["ab" * 9], [greedy])
        for _ in range(3):
            one.step()
        tiny.ask(one, ["y" * 100], [SamplingParams(max_tokens=2)])
        seen = set()
        schedule = one.scheduler.schedule

        def note():
            step = schedule()
            if step.num_drafts:
                seen.add((max([c.num_tokens for c in step.chunks]) > 64, step.has_trees))
            return step

        one.scheduler.schedule = note
        tiny.drain(one)
    assert (True, True) not in seen and (True, False) in seen


def replay_on_the_cpu(one):
    """Let an engine and its draft model replay graphs, all of which are recorded now."""
    runner, drafts, most = one._runner, one._draft, one.limits.max_num_batched_tokens
    shape = one._speculator.config.shape
    own = {"chunk_lengths": [1 + len(shape.paths)], "has_trees": True}
    runner._graphs = Replayed(one.model, one.cache, runner._last_tokens, **own)
    own = {"chunk_lengths": [chunk_length(shape)], "has_trees": shape.branches_late}
    drafts._graphs = Replayed(drafts.model, drafts.cache, drafts._last_tokens, **own)
    runner._graphs.record_all(most)
    drafts._graphs.record_all(most)
    return runner._graphs, drafts._graphs


@pytest.mark.parametrize("tree, size", [(LEAVES, 8), (BRANCHES, 10)])
def test_replayed_trees_give_the_outputs_without(tiny, plain, monkeypatch, tree, size):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    options = {"budget": 64, "speculative_config": draft(tree), "draft_model": other(tiny)}
    with tiny.engine(**options) as one:
        graphs, draft_graphs = replay_on_the_cpu(one)
        monkeypatch.setattr(Replayed, "_record", None)
        tiny.ask(one)
        assert tiny.visible(tiny.drain(one)[0]) == tiny.visible(plain)
    assert sum([tokens == size * seqs for seqs, tokens in graphs.used]) >= 2
    most = chunk_length(TreeShape.parse(tree))
    used = {tokens / seqs for seqs, tokens in draft_graphs.used}
    assert most in used and (1 in used or most > 2)


@pytest.mark.parametrize("has_trees", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_of_a_short_prompt_are_more_rows_than_tokens(
    tiny, monkeypatch, temperature, has_trees
):
    """Each repeats the row of the prompt: a graph for few tokens has no space for them."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    params = [SamplingParams(n=8, seed=5, temperature=temperature, max_tokens=6)]
    outputs = []
    for replays in (False, True):
        with tiny.engine(budget=64) as one:
            if replays:
                own = {"chunk_lengths": [4], "has_trees": has_trees}
                graphs = Replayed(one.model, one.cache, one._runner._last_tokens, **own)
                graphs.record_all(64)
                one._runner._graphs = graphs
            tiny.ask(one, ["xy"], params)
            outputs.append(tiny.visible(tiny.drain(one)[0]))
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("tree", [LEAVES, BRANCHES])
def test_trees_on_a_gpu_give_the_outputs_without(tiny, monkeypatch, tree, graphs):
    """With graphs and without, in fp32. After the start no graph is recorded."""
    with tiny.engine("cuda", overlap=False, graphs=False) as one:
        tiny.ask(one)
        expected = tiny.visible(tiny.drain(one)[0])
    options = {"speculative_config": draft(tree, enforce_eager=not graphs)}
    with tiny.engine("cuda", draft_model=other(tiny).cuda(), budget=64, **options) as one:
        one.warm_up()
        monkeypatch.setattr(StepGraphs, "_record", None)
        tiny.ask(one)
        assert tiny.visible(tiny.drain(one)[0]) == expected
        stats = one.stats().speculation
        assert stats.failure is None and stats.num_drafts


def test_models_that_compute_no_trees_are_refused(tiny):
    window = {"sliding_window": 16, "model_type": "mistral"}
    narrow = random_model(ModelConfig.from_hf(tiny.CONFIG | window))
    refused = "speculative_token_tree is not served: .* has layers with a window"
    with pytest.raises(ValueError, match=refused):
        tiny.engine(speculative_config=draft(BRANCHES), draft_model=narrow)
    tiny.engine(speculative_config=draft(LEAVES), draft_model=narrow).close()
    with pytest.raises(ValueError, match="the model has layers with a window"):
        LLM(builtin.DRAFT, num_pages=9, speculative_config={"speculative_token_tree": LEAVES})


def test_the_built_in_draft_model_grows_a_tree():
    """Its layers have a window: the drafts with children are a chain. More drafts of a step are
    accepted than of a chain of the same depth.
    """
    params = [SamplingParams(temperature=t, max_tokens=40, seed=1) for t in (0.0, 1.0)]
    prompts, small = ["And God said unto Moses, ", "Blessed are the "], {"num_pages": 100}
    with LLM(**small, device="cpu") as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    lengths = []
    for tree in ("[(0,), (0, 0), (0, 0, 0)]", LEAVES):
        named = {"method": "draft", "model": builtin.DRAFT, "speculative_token_tree": tree}
        with LLM(**small, device="cpu", speculative_config=named) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            lengths.append(llm.stats().speculation.mean_acceptance_length)
        tokens = lambda outputs: [o.outputs[0].token_ids for o in outputs]
        assert tokens(outputs) == tokens(expected)
    assert lengths[1] > lengths[0] > 1.5
