"""Schemes that are known not to be lossless, written out, and the enumeration that catches each with its
wrong number.

Losslessness bugs raise acceptance, so nothing but the law of what is emitted shows them. Each test also puts
the right rule through the same enumeration: total variation 0.
"""

import itertools

import pytest
import torch

from kernels.accept import Branch, match, select_chain, self_select
from kernels.sampling import residual
from kernels.tree import chain, prefix_trie
from tests.kernels.laws import (
    Constant,
    add,
    after,
    drafts_of,
    first_token,
    leviathan_law,
    match_law,
    mix,
    p_rows,
    total_variation,
    vanilla,
    walk,
)

COIN = Constant(0.6, 0.4)
FAIR_GV = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
FOUR = Constant(0.50, 0.30, 0.15, 0.05)
FOUR_Q = torch.tensor([[0.30, 0.45, 0.05, 0.20]], dtype=torch.float64)


def exact(value):
    return pytest.approx(value, abs=1e-9)


def rounded(value):
    return pytest.approx(value, abs=5e-4)


def distance(law, verifier, *, count=1):
    """Total variation of the first tokens to the verifier's, once the verifier has completed the cycle."""
    return total_variation(after(lambda _: law, verifier, count=count, cycles=1), vanilla(verifier, (), count))


def chain_rows(draft, verifier):
    return p_rows(chain(torch.tensor(draft)), verifier, ())


def sets_of(q_GV, num_drafts):
    for chosen in itertools.product(list(drafts_of(q_GV)), repeat=num_drafts):
        weight = 1.0
        for _, w in chosen:
            weight *= w
        yield [draft for draft, _ in chosen], weight


def law_of_choice(choose, rule, q_GV, num_drafts):
    return mix((rule(choose(drafts)), w) for drafts, w in sets_of(q_GV, num_drafts))


def match_rule(verifier):
    return lambda draft: match_law(chain(torch.tensor(draft)), verifier, ())


def leviathan_rule(verifier, q_GV):
    return lambda draft: leviathan_law(draft, q_GV, chain_rows(draft, verifier))


# q is not the law the draft was drawn from


def test_leviathan_after_self_selection():
    def choose(drafts):
        tree, paths = prefix_trie(torch.tensor(drafts))
        return drafts[self_select(paths, tree, p_rows(tree, COIN, ()))]

    wrong = law_of_choice(choose, leviathan_rule(COIN, FAIR_GV), FAIR_GV, 2)
    assert first_token(wrong, 2)[0] == exact(0.80)
    assert distance(law_of_choice(choose, match_rule(COIN), FAIR_GV, 2), COIN) < 1e-9


@pytest.mark.parametrize(("num_drafts", "tv"), [(2, 0.115), (4, 0.300), (8, 0.449)])
def test_leviathan_on_the_best_of_k(num_drafts, tv):
    p, q = FOUR(()).tolist(), FOUR_Q[0].tolist()
    ratio = [min(1.0, a / b) for a, b in zip(p, q, strict=True)]
    ranked = sorted(range(4), key=lambda x: (-ratio[x], x))
    below, kept = 1.0, {}  # P(best = x) from P(no draft is better than x): the K-fold product in closed form
    for x in ranked:
        kept[x] = below**num_drafts - max(below - q[x], 0.0) ** num_drafts
        below -= q[x]
    wrong = mix((leviathan_rule(FOUR, FOUR_Q)((x,)), w) for x, w in kept.items())
    assert distance(wrong, FOUR) == rounded(tv)
    assert distance(mix((match_rule(FOUR)((x,)), w) for x, w in kept.items()), FOUR) < 1e-9


def test_leviathan_on_the_arg_max_of_q():
    best = (int(FOUR_Q[0].argmax()),)
    assert distance(leviathan_rule(FOUR, FOUR_Q)(best), FOUR) == rounded(0.367)
    assert distance(match_rule(FOUR)(best), FOUR) < 1e-9


def test_raw_q_for_a_filtered_draft():
    top2_GV = torch.where(FOUR_Q >= 0.3, FOUR_Q, 0.0)
    top2_GV /= top2_GV.sum()
    drafts = list(drafts_of(top2_GV))
    assert distance(mix((leviathan_rule(FOUR, FOUR_Q)(d), w) for d, w in drafts), FOUR) == rounded(0.133)
    assert distance(mix((leviathan_rule(FOUR, top2_GV)(d), w) for d, w in drafts), FOUR) < 1e-9


@pytest.mark.parametrize(("copies", "equal", "tv"), [(1.0, 0.75, 0.25), (0.7, 0.60, 0.100)])
def test_per_step_q_of_a_several_step_denoiser(copies, equal, tv):
    """The second position is revealed first, the first one then repeats it with probability `copies`.

    Each recorded q is its own step's. The first token's law is exact: only the joint law of two tokens shows
    the error.
    """
    fair = Constant(0.5, 0.5)

    def drafts():
        for second in (0, 1):
            for one in (0, 1):
                step_GV = torch.full((2, 2), 0.5, dtype=torch.float64)
                step_GV[0, second], step_GV[0, 1 - second] = copies, 1 - copies
                if step_GV[0, one] > 0:
                    yield (one, second), step_GV, 0.5 * float(step_GV[0, one])

    wrong = mix((leviathan_law(d, q_GV, chain_rows(d, fair)), w) for d, q_GV, w in drafts())
    assert distance(wrong, fair, count=1) < 1e-9
    joint = after(lambda _: wrong, fair, count=2, cycles=1)
    assert joint[0, 0] + joint[1, 1] == exact(equal)
    assert distance(wrong, fair, count=2) == exact(tv)
    right = mix((match_rule(fair)(d), w) for d, _, w in drafts())
    assert distance(right, fair, count=2) < 1e-9


# several drafts


def recursive_rejection(siblings, q_rows, p_V, *, update):
    """Leviathan over siblings: a rejection turns p into `update`(p, q of the tried sibling)."""
    law, weight, left_V = {}, 1.0, p_V
    for x, q_V in zip(siblings, q_rows, strict=True):
        accept = min(1.0, float(left_V[x] / q_V[x]))
        add(law, (x,), weight * accept)
        weight *= 1 - accept
        if weight <= 0:
            return law
        left_V = update(left_V, q_V)
    for token, value in enumerate(left_V.tolist()):
        add(law, (token,), weight * value)
    return law


@pytest.mark.parametrize(("best_first", "emitted"), [(True, 0.80), (False, 0.40)])
def test_recursive_rejection_over_sorted_siblings(best_first, emitted):
    p_V = COIN(())

    def law(order):
        return mix(
            (recursive_rejection(order([d[0] for d in ds]), FAIR_GV.expand(2, 2), p_V, update=residual), w)
            for ds, w in sets_of(FAIR_GV, 2)
        )

    wrong = law(lambda siblings: sorted(siblings, key=lambda x: float(p_V[x]), reverse=best_first))
    assert first_token(wrong, 2)[0] == exact(emitted)
    assert distance(law(lambda siblings: siblings), COIN) < 1e-9  # in the order they were drawn


def test_longest_of_chains_with_coins_of_their_own():
    drafts_KG = torch.tensor([[0], [0]])
    tree = chain(drafts_KG[0])
    verdicts = list(walk(lambda coins: match(tree, coins), p_rows(tree, COIN, ())))
    wrong = {}
    for (one, w_one), (two, w_two) in itertools.product(verdicts, repeat=2):
        kept = max(one, two, key=lambda verdict: len(verdict.path))
        add(wrong, [*(0 for _ in kept.path), kept.token], w_one * w_two)
    assert first_token(wrong, 2)[0] == exact(0.84)
    assert distance(match_law(prefix_trie(drafts_KG).tree, COIN, ()), COIN) < 1e-9


def test_siblings_without_replacement_need_a_renormalised_q():
    p_V, q_V = FOUR(()), FOUR_Q[0]

    def law(renormalise):
        def pairs():
            for x, y in itertools.permutations(range(4), 2):
                without_V = q_V.clone()
                without_V[x] = 0
                without_V /= without_V.sum()
                yield (x, y), [q_V, without_V if renormalise else q_V], float(q_V[x] * without_V[y])

        return mix((recursive_rejection(xy, qs, p_V, update=residual), w) for xy, qs, w in pairs())

    assert distance(law(renormalise=False), FOUR) > 0.01
    assert distance(law(renormalise=True), FOUR) < 1e-9


# Match, bent


def test_match_that_emits_the_residual():
    p_V, q_V = FOUR(()), FOUR_Q[0]
    wrong = {}
    for (x,), weight in drafts_of(FOUR_Q):
        for verdict, w in walk(lambda coins, x=x: match(chain(torch.tensor([x])), coins), chain_rows((x,), FOUR)):
            if verdict.path:
                add(wrong, (x,), weight * w)
            else:
                for token, value in enumerate(residual(p_V, q_V).tolist()):
                    add(wrong, (token,), weight * w * value)
    assert distance(wrong, FOUR) == rounded(0.205)
    right = mix((match_rule(FOUR)(d), w) for d, w in drafts_of(FOUR_Q))
    assert distance(right, FOUR) < 1e-9


def accept_by(test):
    """Accept the draft whenever a test of p says so, else sample from p."""

    def rule(draft):
        p_V = COIN(())
        if test(p_V, draft[0]):
            return {draft: 1.0}
        return {(token,): value for token, value in enumerate(p_V.tolist())}

    return rule


@pytest.mark.parametrize(
    ("test", "emitted"),
    [
        pytest.param(lambda p_V, x: x == int(p_V.argmax()), 0.80, id="arg max, else sample"),
        pytest.param(lambda p_V, x: float(p_V[x]) >= 0.3, 0.50, id="threshold"),
        pytest.param(
            lambda p_V, x: float(p_V[x]) > min(0.3, 0.3 * float(p_V.pow(p_V).prod())),
            0.50,
            id="typical acceptance",
        ),
    ],
)
def test_acceptance_by_a_look_at_p(test, emitted):
    wrong = mix((accept_by(test)(d), w) for d, w in drafts_of(FAIR_GV))
    assert first_token(wrong, 2)[0] == exact(emitted)
    assert distance(wrong, COIN) > 0.09


def test_rows_shifted_by_one():
    """Judging draft i by the row of its own node instead of the row before it."""
    verifier = Constant(0.6, 0.4)
    tree = chain(torch.tensor([0]))
    p_MV = torch.tensor([[0.6, 0.4], [0.1, 0.9]], dtype=torch.float64)
    wrong = {}
    for verdict, w in walk(lambda coins: match(tree, [coins[1], coins[1]]), p_MV):
        add(wrong, [*(0 for _ in verdict.path), verdict.token], w)
    assert distance(wrong, verifier) == exact(0.5)


def test_a_branch_judged_by_rows_of_the_trie():
    """Without select_chain's row mapping the verdict reads another draft's rows."""
    tree, paths = prefix_trie(torch.tensor([[1, 2], [3, 4]]))
    choices_M = torch.tensor([3, 9, 9, 4, 5])
    branch: Branch = select_chain(tree, paths[1])
    assert match(branch.tree, choices_M[branch.rows]) == ([0, 1], 5)
    assert match(branch.tree, choices_M[: len(branch.rows)]) != ([0, 1], 5)
