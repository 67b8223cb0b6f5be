"""Losslessness by exact enumeration: the joint law of two and three tokens is the verifier's, to 1e-9."""

import itertools

import pytest
import torch

from kernels.accept import (
    leviathan,
    match,
    node_matches,
    node_probabilities,
    score_drafts,
    select_chain,
    self_select,
)
from kernels.tree import Tree, best_first, chain, prefix_trie
from tests.kernels.laws import (
    Verifier,
    add,
    after,
    drafts_of,
    expected_accepted,
    leviathan_law,
    match_law,
    mix,
    p_rows,
    random_q,
    total_variation,
    vanilla,
    walk,
)

EXACT = 1e-9
SIZES = [(3, 2), (4, 2), (5, 2), (3, 3)]  # (vocabulary, window)


def assert_lossless(cycle, verifier, *, cycles=2):
    for count in (2, 3):
        law = after(cycle, verifier, count=count, cycles=cycles)
        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        assert total_variation(law, vanilla(verifier, (), count)) < EXACT


def marginals(vocab, window, prefix, *, support=0):
    """Another q for another prefix, as a drafter's would be."""
    return random_q(window, vocab, seed=1 + sum((t + 1) * 7**i for i, t in enumerate(prefix)), support=support)


def draft_sets(q_GV, num_drafts):
    for chosen in itertools.product(list(drafts_of(q_GV)), repeat=num_drafts):
        weight = 1.0
        for _, w in chosen:
            weight *= w
        yield torch.tensor([draft for draft, _ in chosen]), weight


@pytest.mark.parametrize(("vocab", "window"), SIZES)
def test_match_on_a_chain(vocab, window):
    verifier = Verifier(vocab, seed=vocab)

    def cycle(prefix):
        q_GV = marginals(vocab, window, prefix)
        return mix((match_law(chain(torch.tensor(d)), verifier, prefix), w) for d, w in drafts_of(q_GV))

    assert_lossless(cycle, verifier)


@pytest.mark.parametrize(("vocab", "window"), [*SIZES, (4, 3)])
def test_leviathan(vocab, window):
    verifier = Verifier(vocab, seed=vocab)

    def cycle(prefix):
        q_GV = marginals(vocab, window, prefix, support=vocab - 1)  # p > 0 where q = 0
        return mix(
            (leviathan_law(d, q_GV, p_rows(chain(torch.tensor(d)), verifier, prefix)), w) for d, w in drafts_of(q_GV)
        )

    assert_lossless(cycle, verifier, cycles=1)


@pytest.mark.parametrize(
    ("vocab", "window", "num_drafts"),
    [(3, 2, 2), (4, 2, 2), (5, 2, 2), (3, 2, 3), (4, 2, 3), (3, 3, 2), (3, 3, 3), (5, 3, 2)],
)
def test_trie_walk(vocab, window, num_drafts):
    verifier = Verifier(vocab, seed=vocab)
    q_GV = marginals(vocab, window, (), support=2 if num_drafts * window > 6 else 3)

    def cycle(prefix):
        return mix((match_law(prefix_trie(d).tree, verifier, prefix), w) for d, w in draft_sets(q_GV, num_drafts))

    assert_lossless(cycle, verifier, cycles=1)


@pytest.mark.parametrize(
    ("vocab", "window", "num_drafts"), [(3, 2, 2), (4, 2, 2), (5, 2, 2), (3, 2, 3), (3, 3, 2), (3, 3, 3)]
)
def test_self_selection_then_match(vocab, window, num_drafts):
    verifier = Verifier(vocab, seed=vocab)
    q_GV = marginals(vocab, window, (), support=2 if num_drafts * window > 6 else 3)

    def one(drafts_KG, prefix):
        tree, paths = prefix_trie(drafts_KG)
        p_MV = p_rows(tree, verifier, prefix)
        branch = select_chain(tree, paths[self_select(paths, tree, p_MV)])
        tokens, law = branch.tree.tokens_N.tolist(), {}
        for verdict, weight in walk(lambda coins: match(branch.tree, coins), p_MV[branch.rows]):
            add(law, [*(tokens[node] for node in verdict.path), verdict.token], weight)
        return law

    assert_lossless(
        lambda prefix: mix((one(d, prefix), w) for d, w in draft_sets(q_GV, num_drafts)), verifier, cycles=1
    )


@pytest.mark.parametrize(("vocab", "window"), SIZES)
@pytest.mark.parametrize(("nodes", "threshold"), [(1, 0.0), (4, 0.0), (7, 0.0), (7, 0.15), (7, 0.4)])
def test_best_first_tree(vocab, window, nodes, threshold):
    verifier = Verifier(vocab, seed=vocab)

    def law(prefix):
        logq_GV = marginals(vocab, window, prefix).log()
        return match_law(best_first(logq_GV, nodes=nodes, width=2, threshold=threshold), verifier, prefix)

    assert_lossless(law, verifier)


def test_match_walks_to_coins():
    tree = Tree(torch.tensor([5, 6, 7, 8]), [-1, -1, 0, 2])
    assert match(tree, torch.tensor([5, 7, 0, 8, 9])) == ([0, 2, 3], 9)  # bonus at the leaf
    assert match(tree, [5, 7, 0, 1, 9]) == ([0, 2], 1)
    assert match(tree, [6, 7, 3, 1, 9]) == ([1], 3)  # the second child, itself a leaf
    assert match(tree, [9, 7, 3, 1, 9]) == ([], 9)
    assert match(chain(torch.tensor([], dtype=torch.int64)), [4]) == ([], 4)


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_expected_lengths(seed):
    verifier = Verifier(4, seed=seed)
    drafts_KG = torch.randint(0, 2, (3, 3), generator=torch.Generator().manual_seed(seed))
    tree, paths = prefix_trie(drafts_KG)
    p_MV = p_rows(tree, verifier, ())
    scores_K = score_drafts(paths, tree, p_MV)
    for draft_G, score in zip(drafts_KG, scores_K.tolist(), strict=True):
        alone = chain(draft_G)
        assert score == pytest.approx(expected_accepted(alone, p_rows(alone, verifier, ())), abs=1e-12)
    assert expected_accepted(tree, p_MV) >= scores_K.max() - 1e-12, "a trie never does worse than its best draft"
    assert self_select(paths, tree, p_MV) == int(scores_K.argmax())
    p_N = node_probabilities(tree, p_MV.log() + 3.0)  # scores need no normalisation
    torch.testing.assert_close(score_drafts(paths, tree, p_N), scores_K, atol=1e-5, rtol=0)


def test_greedy_scores_count_leading_matches():
    tree, paths = prefix_trie(torch.tensor([[1, 9, 3], [1, 2, 9], [1, 2, 4], [7, 2, 3]]))
    choices_M = torch.zeros(len(tree.parents) + 1, dtype=torch.int64)
    choices_M[0] = 1
    choices_M[paths[0][0] + 1] = 2
    p_N = node_matches(tree, choices_M)
    assert score_drafts(paths, tree, p_N).tolist() == [1, 2, 2, 0]
    assert self_select(paths, tree, p_N) == 1  # the lowest index of equals
    one_hot_MV = torch.nn.functional.one_hot(choices_M, 10).double()
    assert score_drafts(paths, tree, one_hot_MV).tolist() == [1, 2, 2, 0]


def test_select_chain_maps_rows():
    tree, paths = prefix_trie(torch.tensor([[1, 2], [1, 3], [4, 2]]))
    branch = select_chain(tree, paths[1])
    assert branch.tree.tokens_N.tolist() == [1, 3]
    assert branch.rows == [0, *(node + 1 for node in paths[1])]
    choices_M = torch.tensor([1, 3, 2, 8, 0, 0])
    verdict = match(branch.tree, choices_M[branch.rows])
    assert [branch.nodes[node] for node in verdict.path] == paths[1]
    assert verdict.token == choices_M[paths[1][-1] + 1]
    with pytest.raises(AssertionError):
        select_chain(tree, [paths[0][0], paths[2][1]])


def lev(tokens, q, p, uniforms, final=0.5):
    return leviathan(
        torch.tensor(tokens),
        torch.tensor(q, dtype=torch.float64),
        torch.tensor(p, dtype=torch.float64),
        uniforms_G=torch.tensor(uniforms, dtype=torch.float64),
        final_uniform=final,
    )


def test_leviathan_edges():
    same = [0.2, 0.8]
    assert lev([1], [same], [same, [1, 0]], [1 - 1e-12]) == ([0], 0)  # p = q always accepts
    hot = [0.0, 1.0]
    assert lev([0], [[1.0, 0.0]], [hot, hot], [1e-12]) == ([], 1)  # disjoint points: never
    for final in (1e-12, 0.5, 1 - 1e-12):
        assert lev([2], [[0, 0, 1.0]], [[0, 0.3, 0.7], [*hot, 0]], [0.9], final) == (
            [],
            1,
        )  # never the rejected id
    nan = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        lev([1], [same], [[nan, 1], same], [0.5])
    with pytest.raises(ValueError, match="NaN"):
        lev([1], [[0.5, nan]], [same, same], [0.5])
    with pytest.raises(ValueError, match="q = 0"):
        lev([0], [hot], [same, same], [0.5])


def test_nan_scores_raise():
    tree, paths = prefix_trie(torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="NaN"):
        score_drafts(paths, tree, torch.full((3, 2), float("nan")))
