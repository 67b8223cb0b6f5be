"""Gradients against METHOD.md's weight table, values against enumerated decoding, and awkward windows."""

import itertools

import pytest
import torch

from kernels.objectives import ce_streak, distillspec, dpace, first, masked_ce, streak, trie_streak, weights
from kernels.tree import chain, prefix_trie
from tests.kernels.laws import Verifier, drafts_of, expected_accepted, p_rows, random_q, vanilla

NAN, INF = float("nan"), float("inf")
TRIE = [1, 2, 3, 8]
CASES = [
    ("masked_ce", masked_ce, {}),
    ("first", first, {}),
    ("distillspec", distillspec, {}),
    ("streak", streak, {}),
    *(("trie_streak", trie_streak, {"drafts": k}) for k in TRIE),
    ("ce_streak", ce_streak, {}),
    *(("dpace", dpace, {"smoothing": a}) for a in (0.0, 0.3)),
]
IDS = ["-".join([name, *map(str, kwargs.values())]) for name, _, kwargs in CASES]
every_objective = pytest.mark.parametrize(("name", "objective", "kwargs"), CASES, ids=IDS)


def random_log_q(windows=4, window=5, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(windows, window, generator=generator, dtype=dtype).mul(0.98).add(0.01).log().requires_grad_()


def all_valid(log_q_WG):
    return torch.ones_like(log_q_WG, dtype=torch.bool)


def table(name, q_WG, *, drafts=1, smoothing=0.0):
    """METHOD.md section 4's column, position by position in Python floats."""
    rows = []
    for q in q_WG.tolist():
        window = len(q)

        def prod(values):
            result = 1.0
            for value in values:
                result *= value
            return result

        smooth = [(1 - smoothing) * value + smoothing for value in q]
        c = [prod(q[: m + 1]) for m in range(window)]
        c_smooth = [prod(smooth[: m + 1]) for m in range(window)]
        rows.append(
            [
                {
                    "masked_ce": 1.0,
                    "first": float(j == 0),
                    "distillspec": q[j] / window,
                    "streak": sum(c[j:]),
                    "trie_streak": sum(drafts * (1 - c[m]) ** (drafts - 1) * c[m] for m in range(j, window)),
                    "ce_streak": 1.0 if j == 0 else c[j - 1],
                    "dpace": sum(c_smooth[j:]),
                }[name]
                for j in range(window)
            ]
        )
    return torch.tensor(rows, dtype=torch.float64)


@every_objective
def test_gradient_is_the_tables_weight(name, objective, kwargs):
    log_q_WG = random_log_q()
    objective(log_q_WG, all_valid(log_q_WG), **kwargs).backward()
    expected_WG = table(name, log_q_WG.detach().exp(), **kwargs)
    torch.testing.assert_close(-log_q_WG.grad * len(log_q_WG), expected_WG, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(weights(name, log_q_WG, all_valid(log_q_WG), **kwargs), expected_WG)
    assert not weights(name, log_q_WG, all_valid(log_q_WG), **kwargs).requires_grad


@pytest.mark.parametrize(("name", "objective", "kwargs"), [c for c in CASES if c[0] not in ("ce_streak", "dpace")])
def test_gradcheck(name, objective, kwargs):
    log_q_WG = random_log_q(3, 4, seed=1)
    valid_WG = all_valid(log_q_WG)
    valid_WG[1, 2:] = False
    assert torch.autograd.gradcheck(lambda x: objective(x, valid_WG, **kwargs), (log_q_WG,))


def test_one_draft_trie_is_streak_and_unsmoothed_dpace_has_its_gradient():
    log_q_WG, twin_WG, third_WG = (random_log_q(dtype=torch.float32) for _ in range(3))
    valid_WG = all_valid(log_q_WG)
    one, two = streak(log_q_WG, valid_WG), trie_streak(twin_WG, valid_WG, drafts=1)
    assert torch.equal(one, two)
    one.backward()
    two.backward()
    dpace(third_WG, valid_WG, smoothing=0.0).backward()
    assert torch.equal(log_q_WG.grad, twin_WG.grad)
    torch.testing.assert_close(log_q_WG.grad, third_WG.grad)


def log_q_of_texts(q_GV, verifier, window):
    """Every continuation the verifier can write: log q_j(x_j) [W, G] and its probability."""
    texts = vanilla(verifier, (), window)
    log_q_WG = torch.stack([q_GV.log()[range(window), list(text)] for text in texts])
    return log_q_WG, list(texts.values())


def expectation(objective, log_q_WG, probabilities):
    valid_1G = torch.ones(1, log_q_WG.shape[1], dtype=torch.bool)
    return -sum(w * float(objective(row_G[None], valid_1G)) for row_G, w in zip(log_q_WG, probabilities, strict=True))


@pytest.mark.parametrize(("vocab", "window"), [(3, 3), (4, 2), (5, 2)])
def test_streak_is_the_expected_accepted_length(vocab, window):
    verifier, q_GV = Verifier(vocab, seed=window), random_q(window, vocab, seed=vocab)
    decoded = sum(
        w * expected_accepted(chain(torch.tensor(d)), p_rows(chain(torch.tensor(d)), verifier, ()))
        for d, w in drafts_of(q_GV)
    )
    assert expectation(streak, *log_q_of_texts(q_GV, verifier, window)) == pytest.approx(decoded, abs=1e-9)


@pytest.mark.parametrize(("vocab", "window", "drafts"), [(3, 2, 2), (3, 3, 2), (4, 2, 2), (3, 2, 3)])
def test_trie_streak_is_the_expected_trie_walk(vocab, window, drafts):
    verifier, q_GV = Verifier(vocab, seed=window), random_q(window, vocab, seed=vocab)
    decoded = 0.0
    for chosen in itertools.product(list(drafts_of(q_GV)), repeat=drafts):
        tree = prefix_trie(torch.tensor([draft for draft, _ in chosen])).tree
        weight = 1.0
        for _, w in chosen:
            weight *= w
        decoded += weight * expected_accepted(tree, p_rows(tree, verifier, ()))
    value = expectation(lambda x, v: trie_streak(x, v, drafts=drafts), *log_q_of_texts(q_GV, verifier, window))
    assert value == pytest.approx(decoded, abs=1e-9)


@every_objective
def test_empty_batches_give_zero(name, objective, kwargs):
    for windows, valid in [(0, True), (3, False)]:
        log_q_WG = random_log_q(windows, 4, dtype=torch.float32)
        loss = objective(log_q_WG, torch.full((windows, 4), valid), **kwargs)
        loss.backward()
        assert loss.item() == 0
        assert torch.equal(log_q_WG.grad, torch.zeros_like(log_q_WG))


@every_objective
@pytest.mark.parametrize("hole", [NAN, INF, -INF, 0.0])
def test_nothing_behind_valid_matters(name, objective, kwargs, hole):
    clean_WG = random_log_q(2, 4)
    valid_WG = torch.tensor([[True] * 4, [True, True, False, False]])
    dirty_WG = torch.where(valid_WG, clean_WG.detach(), hole).requires_grad_()
    clean, dirty = objective(clean_WG, valid_WG, **kwargs), objective(dirty_WG, valid_WG, **kwargs)
    assert torch.equal(clean, dirty)
    clean.backward()
    dirty.backward()
    assert torch.equal(clean_WG.grad, dirty_WG.grad)
    assert not dirty_WG.grad[1, 2:].any()
    assert torch.equal(weights(name, dirty_WG, valid_WG, **kwargs)[1, 2:], torch.zeros(2, dtype=torch.float64))
    # All-invalid rows do not dilute the mean.
    padded_WG = torch.cat([clean_WG.detach(), torch.full((3, 4), hole)])
    padding = objective(padded_WG, torch.cat([valid_WG, torch.zeros(3, 4, dtype=torch.bool)]), **kwargs)
    torch.testing.assert_close(padding, clean.detach())


@every_objective
def test_a_target_outside_the_draft_vocabulary(name, objective, kwargs):
    """C is 0 from there on; cross-entropy only lacks the term. Gradients stay finite through log_softmax."""
    logits_WGV = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits_WGV[0, 2, 5] = -INF
    logits_WGV.requires_grad_()
    log_q_WG = logits_WGV.log_softmax(-1)[0, range(4), [1, 2, 5, 3]][None]
    loss = objective(log_q_WG, torch.ones(1, 4, dtype=torch.bool), **kwargs)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits_WGV.grad).all()
    assert not logits_WGV.grad[0, 2].any()
    reaches_past_it = name in ("masked_ce", "distillspec")
    assert bool(logits_WGV.grad[0, 3].any()) is reaches_past_it
    assert bool(logits_WGV.grad[0, 0].any())
    if not reaches_past_it:
        cut = objective(log_q_WG.detach()[:, :2], torch.ones(1, 2, dtype=torch.bool), **kwargs)
        torch.testing.assert_close(loss.detach(), cut)
    assert (weights(name, log_q_WG, torch.ones(1, 4, dtype=torch.bool), **kwargs)[0, 2:] > 0).tolist() == [
        False,
        reaches_past_it,
    ]


@every_objective
@pytest.mark.parametrize("log_value", [0.0, -1e-9, -30.0, -200.0])
def test_certain_and_hopeless_targets_stay_finite(name, objective, kwargs, log_value):
    log_q_WG = torch.full((2, 8), log_value, dtype=torch.float32, requires_grad=True)
    loss = objective(log_q_WG, all_valid(log_q_WG), **kwargs)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(log_q_WG.grad).all()
    torch.testing.assert_close(-log_q_WG.grad * 2, weights(name, log_q_WG, all_valid(log_q_WG), **kwargs))


def test_trie_streak_keeps_small_prefixes():
    """1 - (1 - C)^K in float32 would be 0 at C = 1e-10; it is K C."""
    log_q_WG = torch.tensor([[1e-10]]).log()
    assert float(trie_streak(log_q_WG, all_valid(log_q_WG), drafts=8)) == pytest.approx(-8e-10, rel=1e-5)


def test_nan_at_a_valid_position_is_not_hidden():
    for _, objective, kwargs in CASES:
        assert torch.isnan(objective(torch.tensor([[NAN, -1.0]]), torch.ones(1, 2, dtype=torch.bool), **kwargs))


def test_half_precision_is_raised_to_float32():
    log_q_WG = random_log_q(dtype=torch.float32).detach().bfloat16()
    assert streak(log_q_WG, all_valid(log_q_WG)).dtype == torch.float32
    assert torch.equal(streak(log_q_WG, all_valid(log_q_WG)), streak(log_q_WG.float(), all_valid(log_q_WG)))


def test_position_weights():
    log_q_WG = torch.tensor([[-1.0, -2.0, -INF], [-3.0, -4.0, -5.0]], requires_grad=True)
    valid_WG = torch.tensor([[True, True, True], [True, False, False]])
    loss = masked_ce(log_q_WG, valid_WG, torch.tensor([[2.0, 4.0, INF], [1.0, NAN, INF]]))
    loss.backward()
    assert loss.item() == (2 + 8 + 3) / 2
    assert log_q_WG.grad.tolist() == [[-1, -2, 0], [-0.5, 0, 0]]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="streek"):
        weights("streek", torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
