"""The tree of shared pages, against comparing all pairs of sequences."""

import random

import pytest
import torch

from onchip.kvcache import HostTier, KVCache, Spec
from onchip.kvcache.prefix_tree import PrefixTree


def num_common(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def find_common(tree, a, b):
    nodes = {*tree.find(a).ancestors()} & {*tree.find(b).ancestors()}
    return max([node.stop for node in nodes], default=0)


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_adding_and_removing_gives_the_common_pages(seed):
    draw, tree, pages = random.Random(seed), PrefixTree(), {}
    for i in range(70):
        if pages and draw.random() < 0.45:
            out = draw.choice(list(pages))
            tree.remove(out)
            del pages[out]
        else:
            pages[i] = [draw.randrange(2) + 2 * at for at in range(draw.randrange(1, 9))]
            tree.add(i, pages[i])
        tree.check(pages.items())
        assert len(tree) == len(pages) and {*tree.sequences} == pages.keys()
        assert tree.has_shared == (len({p[0] for p in pages.values()}) < len(pages))
        for a in pages:
            assert tree.num_pages(a) == len(pages[a])
            assert all(find_common(tree, a, b) == num_common(pages[a], pages[b]) for b in pages)
    for i in [*pages]:
        tree.remove(i)
    assert not len(tree) and not tree._root.children


def test_the_version_changes_with_the_sequences_alone():
    tree = PrefixTree()
    tree.add("a", [1, 2])
    version = tree.version
    tree.remove("b")
    assert tree.version == version and tree.num_pages("b") == 0 and tree.find("b") is None
    tree.remove("a")
    assert tree.version != version


@pytest.mark.parametrize("pages", [[], [3]])
def test_a_sequence_is_added_once_and_with_pages(pages):
    tree = PrefixTree()
    tree.add("a", [1])
    with pytest.raises(ValueError, match="at least one, and added once"):
        tree.add("a", pages)


def make_cache(**options):
    return KVCache(Spec(1, 1, 4, 4, 4, torch.float32, "cpu"), 40, max_seqs=6, **options)


def open_computed(cache, tokens):
    sequence = cache.open(tokens)
    cache.append(sequence, tokens[sequence.length :])
    cache.commit(sequence)
    cache.track_prefixes([sequence])
    return sequence


def test_the_cache_removes_sequences_that_lose_a_page():
    cache = make_cache(offload_pages=60)
    tier = HostTier(cache, 20)
    first = open_computed(cache, list(range(18)))
    fork = cache.fork(first)
    cache.track_prefixes([fork, first])  # a sequence is entered once
    tree = cache.prefix_tree
    assert tree.num_pages(first) == tree.num_pages(fork) == 4 and tree.has_shared
    cache.truncate(fork, 16)
    cache.check()
    assert fork in tree
    cache.truncate(fork, 15)
    assert fork not in tree and first in tree
    cache.track_prefixes([fork])
    assert find_common(tree, first, fork) == 3
    group = tier.swap_out([fork])
    assert fork not in tree
    tier.synchronize()
    tier.swap_in(group)
    cache.track_prefixes([fork])
    cache.check()
    cache.free(fork)
    assert fork not in tree and len(tree) == 1
    long = cache.open(list(range(30, 60)), offload_pages=20)
    cache.append(long, list(range(30, 60)))
    cache.commit(long)
    cache.track_prefixes([long])
    assert tree.num_pages(long) == 7 and cache.offload(long, 2) == 2 and long not in tree
    cache.track_prefixes([long])
    assert long not in tree  # its table does not begin with its first token
    cache.reset()
    assert not len(cache.prefix_tree)


def test_a_sequence_without_a_full_page_is_not_entered():
    cache = make_cache()
    open_computed(cache, [1, 2, 3])
    assert not len(cache.prefix_tree)
