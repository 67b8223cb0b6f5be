"""Soft targets: masked_ce where the target is one word, its mean where it is a law, least where q is the target."""

import math

import pytest
import torch

from kernels.objectives import masked_ce
from kernels.soft import soft

NAN, INF = float("nan"), float("inf")
W, G, V = 3, 4, 6


def laws(seed=0, *, windows=W, words=V, dtype=torch.float64):
    """Scores of the drafter, and log p of the verifier over the same words."""
    g = torch.Generator().manual_seed(seed)
    scores_WGV = torch.randn(windows, G, words, generator=g, dtype=dtype)
    log_p_WGV = (2 * torch.randn(windows, G, words, generator=g, dtype=dtype)).log_softmax(-1)
    return scores_WGV.requires_grad_(), log_p_WGV


def valid(*lengths):
    return torch.arange(G) < torch.tensor(lengths)[:, None]


WHOLE = valid(G, G, G)


def one_word(words_WG, words=V):
    """log p of a law that is sure of one word; of none where that is -1."""
    hit_WGV = words_WG[..., None] == torch.arange(words)
    return torch.where(hit_WGV, 0.0, -INF).double()


def test_gradcheck():
    scores_WGV, log_p_WGV = laws()
    mask_WG = valid(G, 2, 0)
    assert torch.autograd.gradcheck(lambda x: soft(x.log_softmax(-1), log_p_WGV, mask_WG), (scores_WGV,))
    part = log_p_WGV[..., :4]  # the drafter has four words of six
    assert torch.autograd.gradcheck(lambda x: soft(x[..., :4].log_softmax(-1), part, mask_WG), (scores_WGV,))


def test_the_value_by_hand():
    """Mass .1 + .3 on the words that can be drafted: .4 KL((1/4, 3/4) || q), over two windows with a valid place."""
    q, p = (0.5, 0.5), (0.1, 0.3)
    log_q_WGV, log_p_WGV = (torch.tensor([[x, x], [x, x], [x, x]]).log() for x in (q, p))
    mask_WG = torch.tensor([[True, True], [True, False], [False, False]])
    place = sum(a * math.log(a / 0.4 / b) for a, b in zip(p, q, strict=True))
    assert float(soft(log_q_WGV, log_p_WGV, mask_WG)) == pytest.approx(3 * place / 2)


def test_a_target_of_one_word_is_cross_entropy():
    """Also where that word cannot be drafted: neither has a term there."""
    scores_WGV, _ = laws()
    words_WG = torch.tensor([[0, 5, 2, -1], [3, -1, 3, 1], [4, 4, 0, 2]])
    mask_WG = valid(G, 3, 1)
    log_q_WGV = scores_WGV.log_softmax(-1)
    found_WG = log_q_WGV.gather(2, words_WG.clamp(min=0)[..., None])[..., 0]
    hard = masked_ce(torch.where(words_WG >= 0, found_WG, -INF), mask_WG)
    (wanted,) = torch.autograd.grad(hard, scores_WGV, retain_graph=True)
    loss = soft(log_q_WGV, one_word(words_WG), mask_WG)
    torch.testing.assert_close(loss, hard)
    torch.testing.assert_close(torch.autograd.grad(loss, scores_WGV)[0], wanted)


@pytest.mark.parametrize("words", [V, 4], ids=["every word", "four of six"])
def test_the_gradient_is_the_mean_of_masked_ces_over_the_verifiers_words(words):
    scores_WGV, log_p_WGV = laws(1)
    log_q_WGV = scores_WGV[..., :words].log_softmax(-1)
    expected = torch.zeros_like(scores_WGV)
    for word in range(words):  # a word beyond them has no term
        hard = masked_ce(log_q_WGV[..., word], WHOLE, log_p_WGV[..., word].exp())
        expected += torch.autograd.grad(hard, scores_WGV, retain_graph=True)[0]
    found = torch.autograd.grad(soft(log_q_WGV, log_p_WGV[..., :words], WHOLE), scores_WGV)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("words", [V, 4], ids=["every word", "four of six"])
def test_it_is_least_at_the_target(words):
    scores_WGV, log_p_WGV = laws(2)
    part_WGV = log_p_WGV[..., :words]
    best_WGV = part_WGV.clone().requires_grad_()
    loss = soft(best_WGV.log_softmax(-1), part_WGV, WHOLE)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0, abs=1e-12)
    assert best_WGV.grad.abs().max() < 1e-12
    assert soft(scores_WGV[..., :words].log_softmax(-1), part_WGV, WHOLE) > 0.1
    assert soft((best_WGV + 0.01 * scores_WGV[..., :words]).log_softmax(-1), part_WGV, WHOLE) > 0


def test_a_word_of_no_chance_in_q_is_one_that_cannot_be_drafted():
    scores_WGV, log_p_WGV = laws(3)
    shut_WGV = scores_WGV.masked_fill(torch.arange(V) >= 4, -INF)
    loss, cut = (
        soft(shut_WGV.log_softmax(-1), log_p_WGV, WHOLE),
        soft(scores_WGV[..., :4].log_softmax(-1), log_p_WGV[..., :4], WHOLE),
    )
    torch.testing.assert_close(loss, cut)
    loss.backward()
    assert torch.isfinite(scores_WGV.grad).all()
    assert not scores_WGV.grad[..., 4:].any()


@pytest.mark.parametrize("hole", [NAN, INF, -INF])
def test_nothing_behind_valid_matters(hole):
    scores_WGV, log_p_WGV = laws(4)
    mask_WG = valid(G, 2, 0)
    behind_WG1 = ~mask_WG[..., None]
    clean = soft(scores_WGV.log_softmax(-1), log_p_WGV, mask_WG)
    clean.backward()
    twin_WGV = scores_WGV.detach().log_softmax(-1).masked_fill(behind_WG1, hole).requires_grad_()
    dirty = soft(twin_WGV, log_p_WGV.masked_fill(behind_WG1, hole), mask_WG)
    dirty.backward()
    assert torch.equal(clean, dirty)
    assert torch.isfinite(twin_WGV.grad).all()
    assert not twin_WGV.grad[1, 2:].any()
    padded = torch.cat([scores_WGV, torch.full((2, G, V), hole, dtype=torch.float64)])
    more = soft(padded.log_softmax(-1), torch.cat([log_p_WGV, log_p_WGV[:2]]), torch.cat([mask_WG, valid(0, 0)]))
    torch.testing.assert_close(more, clean)


@pytest.mark.parametrize("side", ["q", "p"])
def test_nan_at_a_valid_place_is_not_hidden(side):
    scores_WGV, log_p_WGV = laws()
    log_q_WGV = scores_WGV.detach().log_softmax(-1)
    (log_q_WGV if side == "q" else log_p_WGV)[0, 1, 2] = NAN
    assert torch.isnan(soft(log_q_WGV, log_p_WGV, WHOLE))


def test_nothing_to_learn_gives_zero():
    for windows, mask_WG in ((0, valid()), (W, valid(0, 0, 0))):
        scores_WGV, log_p_WGV = laws(windows=windows)
        loss = soft(scores_WGV.log_softmax(-1), log_p_WGV, mask_WG.reshape(windows, G))
        loss.backward()
        assert float(loss.detach()) == 0
        assert not scores_WGV.grad.any()
    scores_WGV, log_p_WGV = laws()
    loss = soft(scores_WGV.log_softmax(-1), torch.full_like(log_p_WGV, -INF), WHOLE)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not scores_WGV.grad.any()


def test_hopeless_words_stay_finite_and_half_precision_is_raised():
    log_q_WGV = torch.full((1, G, 2), -200.0, requires_grad=True)
    log_p_WGV = torch.tensor([-300.0, -1e-6]).expand(1, G, 2)
    loss = soft(log_q_WGV, log_p_WGV, valid(G))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(200 * G, rel=1e-4)
    assert torch.isfinite(log_q_WGV.grad).all()
    scores_WGV, log_p_WGV = laws(dtype=torch.float32)
    halves = scores_WGV.detach().log_softmax(-1).bfloat16(), log_p_WGV.bfloat16()
    assert soft(*halves, WHOLE).dtype == torch.float32
    assert torch.equal(soft(*halves, WHOLE), soft(*(half.float() for half in halves), WHOLE))


def test_no_gradient_goes_to_the_verifier():
    scores_WGV, log_p_WGV = laws()
    log_p_WGV.requires_grad_()
    soft(scores_WGV.log_softmax(-1), log_p_WGV, WHOLE).backward()
    assert log_p_WGV.grad is None
