"""Tries, best-first trees, ancestor tables."""

import itertools
import math
import time

import pytest
import torch

from kernels.tree import (
    Tree,
    ancestors_NN,
    best_first,
    chain,
    children,
    depths,
    prefix_trie,
    validate,
)
from tests.kernels.laws import random_q


def random_tree(num_nodes, seed):
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(-1, n, (), generator=generator)) if n else -1 for n in range(num_nodes)]
    return Tree(torch.arange(num_nodes), parents)


def path_of(parents, node):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def test_chain():
    tree = chain(torch.tensor([4, 4, 5]))
    validate(tree)
    assert tree.parents == [-1, 0, 1]
    assert depths(tree.parents) == [1, 2, 3]
    assert torch.equal(ancestors_NN(tree), torch.ones(3, 3, dtype=torch.bool).tril())


@pytest.mark.parametrize("seed", range(4))
def test_trie_holds_each_prefix_once(seed):
    drafts_KG = torch.randint(0, 3, (5, 4), generator=torch.Generator().manual_seed(seed))
    tree, paths = prefix_trie(drafts_KG)
    validate(tree)
    assert len(tree.parents) == len({tuple(d[: m + 1]) for d in drafts_KG.tolist() for m in range(4)})
    for draft, path in zip(drafts_KG.tolist(), paths, strict=True):
        assert tree.tokens_N[path].tolist() == draft
        assert path == path_of(tree.parents, path[-1])
    assert paths[0] == [0, 1, 2, 3]  # first-seen order


def brute_force_best(logq_GV, nodes):
    """The largest products over all prefixes; a prefix never beats its own ancestors."""
    window, vocab = logq_GV.shape
    rows = logq_GV.tolist()
    scored = [
        (sum(rows[m][t] for m, t in enumerate(prefix)), prefix)
        for depth in range(1, window + 1)
        for prefix in itertools.product(range(vocab), repeat=depth)
    ]
    return sorted(scored, key=lambda item: (-item[0], len(item[1])))[:nodes]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("nodes", [1, 5, 12])
def test_best_first_is_best(seed, nodes):
    logq_GV = random_q(3, 4, seed).float().log()
    tree = best_first(logq_GV, nodes=nodes, width=4)
    validate(tree)
    found = [tuple(tree.tokens_N[path_of(tree.parents, n)].tolist()) for n in range(len(tree.parents))]
    assert found == [prefix for _, prefix in brute_force_best(logq_GV, nodes)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.3, 1.0])
def test_best_first_stops_at_nodes_that_are_too_unlikely(seed, threshold):
    logq_GV = random_q(3, 4, seed).float().log()
    tree = best_first(logq_GV, nodes=12, width=4, threshold=threshold)
    wanted = [prefix for log, prefix in brute_force_best(logq_GV, 12) if threshold == 0 or log >= math.log(threshold)]
    found = [tuple(tree.tokens_N[path_of(tree.parents, n)].tolist()) for n in range(len(tree.parents))]
    assert found == wanted
    assert len(found) == 12 or threshold >= 0.1


def test_best_first_limits():
    log_q = torch.tensor([[0.0, -torch.inf, -torch.inf], [-torch.inf, -0.5, -1.0]])
    tree = best_first(log_q, nodes=99, width=3)
    assert (tree.tokens_N.tolist(), tree.parents) == ([0, 1, 2], [-1, 0, 0])  # q = 0 is never proposed
    assert best_first(log_q, nodes=99, width=1).tokens_N.tolist() == [0, 1]
    empty = best_first(log_q, nodes=0, width=3)
    validate(empty)
    assert ancestors_NN(empty).shape == (0, 0)
    equal = best_first(torch.zeros(2, 1), nodes=5, width=8)
    assert equal.parents == [-1, 0]
    tied = best_first(torch.full((2, 2), 0.5).log(), nodes=2, width=2)
    assert tied.parents == [-1, -1]
    with pytest.raises(ValueError, match="NaN"):
        best_first(torch.full((1, 2), torch.nan), nodes=1, width=2)


def test_best_first_takes_under_a_millisecond():
    log_q = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)).mul(3).log_softmax(-1)
    seconds = []
    for _ in range(30):
        start = time.perf_counter()
        best_first(log_q, nodes=32, width=8)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_ancestors(seed):
    tree = random_tree(20, seed)
    table = ancestors_NN(tree)
    for node in range(20):
        assert table[node].nonzero()[:, 0].tolist() == sorted(path_of(tree.parents, node))
        assert depths(tree.parents)[node] == int(table[node].sum())


def test_children_and_invariants():
    tree = Tree(torch.tensor([3, 4, 3]), [-1, 0, 1])
    assert children(tree) == [{3: 0}, {4: 1}, {3: 2}, {}]
    with pytest.raises(AssertionError, match="merge"):
        children(Tree(torch.tensor([3, 3]), [-1, -1]))
    with pytest.raises(AssertionError, match="before"):
        children(Tree(torch.tensor([3, 4]), [1, -1]))
    with pytest.raises(AssertionError):
        validate(Tree(torch.tensor([-1]), [-1]))
