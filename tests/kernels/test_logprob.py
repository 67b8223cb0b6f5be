"""Log-probability of a target by chunks, against log_softmax over all the scores: value, gradients and memory."""

import pytest
import torch
import torch.nn.functional as F

from kernels.logprob import target_logprob
from kernels.objectives import masked_ce, streak
from tests.kernels.memory import extra

NAN, INF = float("nan"), float("inf")
CASES = [(41, 401, 1271, 300), (6, 5, 7, 3), (4, 8, 12, 12), (3, 5, 7, 100), (5, 3, 1, 1), (1, 1, 2, 1)]
IDS = [f"{rows} x {width} x {words} by {chunk}" for rows, width, words, chunk in CASES]
every_case = pytest.mark.parametrize(("rows", "width", "words", "chunk"), CASES, ids=IDS)


def plain(hidden_RD, head_VD, targets_R):
    """The same by a whole table of scores; float32 sums of the inputs' products."""
    wide = torch.promote_types(hidden_RD.dtype, torch.float32)
    log_q_RV = (hidden_RD.to(wide) @ head_VD.to(wide).T).log_softmax(-1)
    found_R = log_q_RV.gather(1, targets_R.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets_R >= 0, found_R, -INF)


def problem(rows, width, words, *, dtype=torch.float64, scale=1.0, outside=0.2, seed=0):
    """hidden, head, targets (some outside the draft vocabulary), and a gradient that arrives."""
    g = torch.Generator().manual_seed(seed)
    hidden_RD = (scale * torch.randn(rows, width, generator=g, dtype=torch.float64)).to(dtype)
    head_VD = (torch.randn(words, width, generator=g, dtype=torch.float64) / width**0.5).to(dtype)
    targets_R = torch.randint(words, (rows,), generator=g)
    targets_R[torch.rand(rows, generator=g) < outside] = -1
    return hidden_RD, head_VD, targets_R, torch.randn(rows, generator=g)


def solved(find, hidden_RD, head_VD, targets_R, grad_R, **kwargs):
    """Value and both gradients, in float64."""
    hidden_RD, head_VD = hidden_RD.detach().requires_grad_(), head_VD.detach().requires_grad_()
    found_R = find(hidden_RD, head_VD, targets_R, **kwargs)
    found_R.backward(grad_R.to(found_R))
    return tuple(x.double() for x in (found_R.detach(), hidden_RD.grad, head_VD.grad))


def assert_near(found, wanted, *, rel):
    """Each of them within `rel` of the largest finite number of what it should be (of 1 at least, for values)."""
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        finite = b[torch.isfinite(b)].abs()
        largest = max(float(finite.max()) if len(finite) else 0.0, 0.0 if number else 1.0)
        torch.testing.assert_close(a, b, rtol=0, atol=rel * largest)


@every_case
def test_value_and_gradients(rows, width, words, chunk):
    given = problem(rows, width, words)
    assert_near(solved(target_logprob, *given, chunk=chunk), solved(plain, *given), rel=1e-12)


@every_case
def test_float32(rows, width, words, chunk):
    """Against float64 of the same numbers: a few roundings of 2^-24."""
    hidden_RD, head_VD, targets_R, grad_R = problem(rows, width, words, dtype=torch.float32)
    exact = solved(plain, hidden_RD.double(), head_VD.double(), targets_R, grad_R)
    assert target_logprob(hidden_RD, head_VD, targets_R, chunk=chunk).dtype == torch.float32
    assert_near(solved(target_logprob, hidden_RD, head_VD, targets_R, grad_R, chunk=chunk), exact, rel=4e-6)


@every_case
def test_bf16(rows, width, words, chunk):
    """Values as exact as float32's; gradients of slopes rounded to 8 bits, then rounded: 2^-7 of the largest."""
    hidden_RD, head_VD, targets_R, grad_R = problem(rows, width, words, dtype=torch.bfloat16)
    exact = solved(plain, hidden_RD.double(), head_VD.double(), targets_R, grad_R)
    found = solved(target_logprob, hidden_RD, head_VD, targets_R, grad_R, chunk=chunk)
    assert_near(found[:1], exact[:1], rel=4e-6)
    assert_near(found, exact, rel=2**-7)


def test_many_chunks_round_no_more_than_one():
    """What is summed over chunks is float32: gradients in bf16 are the same numbers, but for ties in that rounding."""
    given = problem(6, 16, 900, dtype=torch.bfloat16)
    one, many = (solved(target_logprob, *given, chunk=chunk) for chunk in (900, 4))
    assert_near(many[:1], one[:1], rel=1e-6)
    for a, b in zip(many[1:], one[1:], strict=True):
        assert (a == b).float().mean() > 0.97


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_gradcheck(chunk):
    hidden_RD, head_VD, targets_R, _ = problem(5, 4, 7)
    targets_R[2] = -1

    def within(hidden_RD, head_VD):
        return torch.where(targets_R >= 0, target_logprob(hidden_RD, head_VD, targets_R, chunk=chunk), 0.0)

    assert torch.autograd.gradcheck(within, (hidden_RD.requires_grad_(), head_VD.requires_grad_()))


@pytest.mark.parametrize("scale", [1e3, 1e5])
def test_extreme_scores_stay_finite(scale):
    """One word has all the mass, and most targets none: log q is minus the gap, of any size."""
    hidden_RD, head_VD, targets_R, grad_R = problem(9, 16, 50, dtype=torch.float32, scale=scale, outside=0)
    exact = solved(plain, hidden_RD.double(), head_VD.double(), targets_R, grad_R)
    found = solved(target_logprob, hidden_RD, head_VD, targets_R, grad_R, chunk=8)
    assert exact[0].min() < -scale / 10
    assert all(torch.isfinite(x).all() for x in found)
    assert_near(found[:1], exact[:1], rel=1e-5)


def test_a_sure_word_has_log_probability_zero():
    hidden_RD, head_VD = torch.tensor([[1e4], [-1e4]]), torch.tensor([[-1.0], [0.0], [1.0]])
    assert target_logprob(hidden_RD, head_VD, torch.tensor([2, 0]), chunk=2).tolist() == [0, 0]


def test_inputs_need_not_be_contiguous():
    hidden_RD, head_VD, targets_R, grad_R = problem(8, 10, 30)
    apart = hidden_RD[::2, 1::2], head_VD[3:, ::2], targets_R[::2].clamp(max=26), grad_R[::2]
    assert_near(solved(target_logprob, *apart, chunk=4), solved(plain, *apart), rel=1e-12)
    turned = hidden_RD.T.contiguous().T, head_VD.T.contiguous().T
    wanted = solved(plain, *turned, targets_R, grad_R)
    assert_near(solved(target_logprob, *turned, targets_R, grad_R, chunk=4), wanted, rel=1e-12)


@pytest.mark.parametrize("side", ["hidden", "head"])
def test_one_side_without_gradient(side):
    hidden_RD, head_VD, targets_R, grad_R = problem(6, 5, 20)
    wanted = solved(plain, hidden_RD, head_VD, targets_R, grad_R)[1 if side == "hidden" else 2]
    learns, other = (hidden_RD, head_VD) if side == "hidden" else (head_VD, hidden_RD)
    learns.requires_grad_()
    target_logprob(hidden_RD, head_VD, targets_R, chunk=6).backward(grad_R.double())
    torch.testing.assert_close(learns.grad, wanted)
    assert other.grad is None


def test_no_targets_at_all():
    hidden_RD, head_VD, targets_R, grad_R = problem(6, 5, 20)
    value_R, *grads = solved(target_logprob, hidden_RD, head_VD, torch.full_like(targets_R, -1), grad_R, chunk=6)
    assert (value_R == -INF).all()
    assert not any(grad.any() for grad in grads)
    value_R, *grads = solved(target_logprob, hidden_RD[:0], head_VD, targets_R[:0], grad_R[:0], chunk=6)
    assert value_R.shape == (0,)
    assert not grads[1].any()


@pytest.mark.parametrize("hole", [NAN, INF])
def test_a_row_without_target_reaches_nothing(hole):
    """Neither what stands in its row nor the gradient that arrives for it."""
    hidden_RD, head_VD, targets_R, grad_R = problem(8, 5, 20, outside=0.5)
    out_R = targets_R < 0
    assert 0 < int(out_R.sum()) < 8
    wanted = solved(target_logprob, hidden_RD, head_VD, targets_R, grad_R, chunk=6)
    dirty = hidden_RD.masked_fill(out_R[:, None], hole), head_VD, targets_R, grad_R.masked_fill(out_R, hole)
    for a, b in zip(solved(target_logprob, *dirty, chunk=6), wanted, strict=True):
        assert torch.equal(a, b)


def test_nan_in_a_row_with_a_target_is_not_hidden():
    hidden_RD, head_VD, targets_R, _ = problem(4, 5, 20, outside=0)
    clean_R = target_logprob(hidden_RD, head_VD, targets_R, chunk=6)
    hidden_RD[1, 2] = NAN
    found_R = target_logprob(hidden_RD, head_VD, targets_R, chunk=6)
    assert torch.isnan(found_R).tolist() == [False, True, False, False]
    assert torch.equal(found_R[[0, 2, 3]], clean_R[[0, 2, 3]])


@pytest.mark.parametrize("objective", [masked_ce, streak])
def test_objectives_take_it_as_they_take_cross_entropy(objective):
    """As stages/common/windows.py forms log q today: rows with a target alone, -inf elsewhere."""
    hidden_RD, head_VD, targets_R, _ = problem(12, 5, 20)
    valid_WG, wanted_R = torch.ones(3, 4, dtype=torch.bool), targets_R >= 0
    assert not wanted_R.all()

    def today(hidden_RD, head_VD):
        found_X = -F.cross_entropy((hidden_RD @ head_VD.T)[wanted_R], targets_R[wanted_R], reduction="none")
        return torch.full_like(hidden_RD[:, 0], -INF).masked_scatter(wanted_R, found_X)

    def by_chunks(hidden_RD, head_VD):
        return target_logprob(hidden_RD, head_VD, targets_R, chunk=6)

    grads = []
    for find in (today, by_chunks):
        inputs = hidden_RD.clone().requires_grad_(), head_VD.clone().requires_grad_()
        grads.append(torch.autograd.grad(objective(find(*inputs).view(3, 4), valid_WG), inputs))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
        assert b.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, w, t: (h, w, t + 20, 6), "rows"),
        (lambda h, w, t: (h, w, t - 100, 6), "-1 where"),
        (lambda h, w, t: (h, w, t, 0), "at least one word"),
        (lambda h, w, t: (h, w.float(), t, 6), "cast one"),
    ],
    ids=["too high", "too low", "chunk", "dtype"],
)
def test_mistakes_are_named(change, message):
    hidden_RD, head_VD, targets_R, _ = problem(4, 5, 20, outside=0)
    hidden_RD, head_VD, targets_R, chunk = change(hidden_RD, head_VD, targets_R)
    with pytest.raises(ValueError, match=message):
        target_logprob(hidden_RD, head_VD, targets_R, chunk=chunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_that_of_a_chunk(dtype):
    """Two float32 tables of rows x chunk and little else; twice the words add only their chunks' logsumexps."""
    rows, width, words, chunk = 128, 32, 8192, 256

    def needs(find, words):
        hidden_RD, head_VD, targets_R, _ = problem(rows, width, words, dtype=dtype)
        hidden_RD, head_VD = hidden_RD.requires_grad_(), head_VD.requires_grad_()
        return extra(lambda: find(hidden_RD, head_VD, targets_R), (hidden_RD, head_VD))

    def by_chunks(*given):
        return target_logprob(*given, chunk=chunk)

    small, table = needs(by_chunks, words), 4 * rows * chunk
    assert table < small < 2.5 * table
    assert needs(by_chunks, 2 * words) - small < 4 * (4 * rows * words / chunk)
    assert needs(plain, words) >= 4 * rows * words, "the allocations were not seen"
