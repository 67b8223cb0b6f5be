"""Recursive rejection and K-SEQ over K drafts: the joint law by exact enumeration, and wrong variants it catches."""

import itertools
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch

from kernels import multi_draft as rules
from kernels.accept import leviathan
from kernels.multi_draft import Ending, Pick, k_seq, k_seq_rho, multi_draft, recursive, walk_drafts
from kernels.sampling import keyed_uniform, residual
from kernels.tree import chain, prefix_trie
from tests.kernels.laws import (
    Constant,
    Verifier,
    add,
    after,
    drafts_of,
    first_token,
    p_rows,
    random_q,
    total_variation,
    vanilla,
)

EXACT = 1e-9
RULES = {"recursive": recursive, "k_seq": k_seq}
# (vocabulary, window, drafts, ids with q > 0; 0: all)
SIZES = [(3, 2, 2, 0), (4, 2, 2, 0), (5, 2, 2, 3), (3, 3, 2, 2), (3, 2, 3, 0), (5, 2, 3, 2)]
FAIR_GV = torch.tensor([[0.5, 0.5]], dtype=torch.float64)


class _Fork(Exception):
    def __init__(self, place, chance):
        self.place, self.chance = place, chance


class _Uniform:
    """A uniform that is only ever compared: with what chance it is below is all that counts."""

    def __init__(self, place, known):
        self.place, self.known = place, known

    def __lt__(self, chance):
        if chance >= 1 or chance <= 0:
            return chance >= 1
        if self.place not in self.known:
            raise _Fork(self.place, chance)
        return self.known[self.place]


def endings(tree, paths, q_GV, p_MV, rule) -> Iterator[tuple[Ending, float]]:
    """Every ending of a walk with its probability; a uniform that is looked at twice would be seen."""
    stack = [({}, 1.0)]
    while stack:
        known, weight = stack.pop()
        uniforms_GK = [[_Uniform((g, k), known) for k in range(len(paths))] for g in range(len(q_GV))]
        try:
            yield walk_drafts(tree, paths, q_GV, p_MV.__getitem__, rule=rule, uniforms_GK=uniforms_GK), weight
        except _Fork as fork:
            stack.append(({**known, fork.place: True}, weight * fork.chance))
            stack.append(({**known, fork.place: False}, weight * (1 - fork.chance)))


def law_of(rule, verifier, q_GV, drafts):
    """Law of what one cycle emits, over every set of K drafts."""
    law = {}
    for chosen in itertools.product(list(drafts_of(q_GV)), repeat=drafts):
        weight = 1.0
        for _, w in chosen:
            weight *= w
        tree, paths = prefix_trie(torch.tensor([draft for draft, _ in chosen]))
        tokens = tree.tokens_N.tolist()
        for ending, w in endings(tree, paths, q_GV, p_rows(tree, verifier, ()), rule):
            for token, value in enumerate(ending.law_V.tolist()):
                add(law, [*(tokens[node] for node in ending.path), token], weight * w * value)
    return law


def distance(law, verifier, count):
    """Total variation of the first tokens to the verifier's, once the verifier has completed the cycle."""
    return total_variation(after(lambda _: law, verifier, count=count, cycles=1), vanilla(verifier, (), count))


@pytest.fixture(autouse=True)
def rho_once(monkeypatch):
    """The bisection is a pure function of its arguments, and asked thousands of times for the same."""

    @lru_cache
    def kept(p, q, draws):
        return k_seq_rho(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64), draws)

    monkeypatch.setattr(
        rules, "k_seq_rho", lambda p_V, q_V, draws: kept(tuple(p_V.tolist()), tuple(q_V.tolist()), draws)
    )


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("vocab", "window", "drafts", "support"), SIZES)
def test_the_joint_law_is_the_verifiers(name, vocab, window, drafts, support):
    verifier = Verifier(vocab, seed=vocab + drafts)
    law = law_of(RULES[name], verifier, random_q(window, vocab, seed=7 * vocab + window, support=support), drafts)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    for count in (2, 3):
        assert distance(law, verifier, count) < EXACT
    assert sum(w for tokens, w in law.items() if len(tokens) > 1) > 0.2, "drafts are really accepted"


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("q", [(1.0, 0, 0), (0.5, 0.3, 0.2), (0, 0, 1.0), (0, 0.9, 0.1)], ids=str)
def test_edges_of_p_and_q(name, q):
    """One word in q (T_d = 0), q = p, q where p has nothing."""
    verifier, q_GV = Constant(0.5, 0.3, 0.2), torch.tensor([q, q], dtype=torch.float64)
    assert distance(law_of(RULES[name], verifier, q_GV, 2), verifier, 3) < EXACT
    without = Constant(0.6, 0.4, 0.0)
    assert distance(law_of(RULES[name], without, q_GV, 2), without, 3) < EXACT


# known to be wrong


@pytest.mark.parametrize(("best_first", "emitted"), [(True, 0.80), (False, 0.40)])
def test_recursive_over_siblings_sorted_by_the_verifier(best_first, emitted):
    def sorted_by_p(p_V, q_V, drawn, uniforms):
        order = sorted(range(len(drawn)), key=lambda k: float(p_V[drawn[k]]), reverse=best_first)
        pick = recursive(p_V, q_V, [drawn[k] for k in order], [uniforms[k] for k in order])
        return pick if pick.draw is None else Pick(order[pick.draw], pick.law_V)

    verifier = Constant(0.6, 0.4)
    assert first_token(law_of(sorted_by_p, verifier, FAIR_GV, 2), 2)[0] == pytest.approx(emitted, abs=1e-9)
    assert distance(law_of(recursive, verifier, FAIR_GV, 2), verifier, 1) < EXACT


SKEWED, SKEWED_GV = Constant(0.5, 0.4, 0.1), torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.2, 0.2]], dtype=torch.float64)


@pytest.mark.parametrize("drafts", [2, 3])
def test_equal_draws_merged_into_one(drafts):
    """A trie has each child once: judging children instead of draws is not lossless."""

    def merged(p_V, q_V, drawn, uniforms):
        first = [k for k, token in enumerate(drawn) if token not in drawn[:k]]
        pick = recursive(p_V, q_V, [drawn[k] for k in first], [uniforms[k] for k in first])
        return pick if pick.draw is None else Pick(first[pick.draw], pick.law_V)

    assert distance(law_of(merged, SKEWED, SKEWED_GV[:1], drafts), SKEWED, 1) > 0.01
    assert distance(law_of(recursive, SKEWED, SKEWED_GV[:1], drafts), SKEWED, 1) < EXACT


def test_a_rejection_that_keeps_p():
    def kept(p_V, q_V, drawn, uniforms):
        for draw, (token, uniform) in enumerate(zip(drawn, uniforms, strict=True)):
            if uniform < float(p_V[token] / q_V[token]):
                return Pick(draw, p_V)
        return Pick(None, residual(p_V, q_V))

    assert distance(law_of(kept, SKEWED, SKEWED_GV, 2), SKEWED, 1) > 0.05


@pytest.mark.parametrize(("share", "tv"), [(0.0, 0.04), (0.5, 0.0193), (1.0, 0.0)])
def test_k_seq_with_rho_too_small(monkeypatch, share, tv):
    """rho = 1 is Leviathan's ratio tried K times: p=(.6,.4), q fair, K=2 give (.56, .44)."""
    verifier = Constant(0.6, 0.4)
    right = k_seq_rho(verifier(()), FAIR_GV[0], 2)
    monkeypatch.setattr(rules, "k_seq_rho", lambda *_: 1 + share * (right - 1))
    found = distance(law_of(k_seq, verifier, FAIR_GV, 2), verifier, 1)
    assert found == pytest.approx(tv, abs=1e-9 if share in (0, 1) else 5e-4)


def test_a_larger_rho_is_lossless_but_accepts_less(monkeypatch):
    """Any rho from the right one up to K is lossless: only acceptance is lost."""
    mass, right = {}, rules.k_seq_rho
    for more in (0.0, 0.3):
        monkeypatch.setattr(rules, "k_seq_rho", lambda p_V, q_V, n, more=more: min(n, right(p_V, q_V, n) + more))
        law = law_of(k_seq, SKEWED, SKEWED_GV, 2)
        assert distance(law, SKEWED, 3) < EXACT
        mass[more] = sum(w * (len(tokens) - 1) for tokens, w in law.items())
    assert mass[0.0] > mass[0.3] + 1e-3


# rho, and what the rules reduce to


@pytest.mark.parametrize("draws", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_rho_solves_its_equation(seed, draws):
    p_V, q_V = random_q(1, 6, seed)[0], random_q(1, 6, seed + 50, support=6 - seed % 3)[0]
    rho = k_seq_rho(p_V, q_V, draws)
    beta = float(torch.minimum(q_V, p_V / rho).sum())
    assert 1 <= rho <= draws
    assert 1 - (1 - beta) ** draws == pytest.approx(rho * beta, abs=1e-8)
    assert (1 - (1 - beta) ** draws) / beta <= rho + 1e-12, "valid: nothing is emitted more often than p allows"


def test_rho_where_nothing_or_everything_is_shared():
    one, two = torch.tensor([1.0, 0]).double(), torch.tensor([0, 1.0]).double()
    assert k_seq_rho(one, two, 3) == pytest.approx(3)
    assert k_seq_rho(one, one, 3) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", RULES)
def test_more_drafts_accept_more(name):
    verifier = Verifier(4, seed=2)
    q_GV = random_q(1, 4, seed=5)
    found = [sum(w for t, w in law_of(RULES[name], verifier, q_GV, K).items() if len(t) > 1) for K in (1, 2, 3, 4)]
    assert found[0] == pytest.approx(float(torch.minimum(verifier(()), q_GV[0]).sum()), abs=1e-9)
    assert all(more > less for less, more in itertools.pairwise(found))


@pytest.mark.parametrize("name", RULES)
def test_one_draft_is_leviathan(name):
    verifier = Verifier(5, seed=1)
    for seed in range(40):
        q_GV = random_q(3, 5, seed)
        draft_G = torch.multinomial(q_GV, 1, generator=torch.Generator().manual_seed(seed))[:, 0]
        tree, (path,) = prefix_trie(draft_G[None])
        p_MV = p_rows(chain(draft_G), verifier, ())
        uniforms_G = keyed_uniform(3, seed=seed, prompt_key=0, position=0)
        final = float(keyed_uniform(1, seed=seed, prompt_key=0, position=1))
        assert multi_draft(
            tree,
            [path],
            q_GV,
            p_MV.__getitem__,
            rule=RULES[name],
            uniforms_GK=uniforms_G[:, None],
            final_uniform=final,
        ) == leviathan(draft_G, q_GV, p_MV, uniforms_G=uniforms_G, final_uniform=final)


@pytest.mark.parametrize("name", RULES)
def test_rows_off_the_accepted_path_are_not_asked_for(name):
    verifier, q_GV = Verifier(4, seed=8), random_q(3, 4, seed=9)
    tree, paths = prefix_trie(torch.tensor([[0, 1, 2], [1, 1, 1], [2, 0, 3], [0, 1, 2]]))
    p_MV = p_rows(tree, verifier, ())
    for seed in range(20):
        asked = []
        uniforms_GK = keyed_uniform(12, seed=seed, prompt_key=0, position=0).view(3, 4)
        ending = walk_drafts(
            tree, paths, q_GV, lambda m, a=asked: a.append(m) or p_MV[m], rule=RULES[name], uniforms_GK=uniforms_GK
        )
        assert asked == [0, *(node + 1 for node in ending.path)]
        assert ending.path in [path[: len(ending.path)] for path in paths]
        assert float(ending.law_V.sum()) == pytest.approx(1)


@pytest.mark.parametrize("name", RULES)
def test_a_draft_from_another_q_and_nan_are_refused(name):
    p_V, q_V = torch.tensor([0.5, 0.5, 0]), torch.tensor([0.5, 0, 0.5])
    with pytest.raises(ValueError, match="q = 0"):
        RULES[name](p_V, q_V, [1], [0.5])
    with pytest.raises(ValueError, match="NaN"):
        RULES[name](torch.tensor([float("nan"), 1, 0]), q_V, [0], [0.5])
