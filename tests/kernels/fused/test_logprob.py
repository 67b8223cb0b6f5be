"""The Triton twin against kernels/logprob.py: by CUDA where there is one, else by Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from kernels.fused.logprob import target_logprob as fused
from kernels.logprob import target_logprob
from tests.kernels.test_logprob import assert_near, problem, solved

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
# Gradients relative to their largest number. bf16: slopes of 8 bits, rounded here and cut off by the interpreter.
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
CASES = [(41, 401, 1271, 300), (41, 401, 1271, 2000), (1, 17, 300, 300), (5, 3, 1, 7), (130, 33, 20, 16)]
IDS = [f"{rows} x {width} x {words} by {chunk}" for rows, width, words, chunk in CASES]
every_case = pytest.mark.parametrize(("rows", "width", "words", "chunk"), CASES, ids=IDS)
both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def compare(given, *, chunk):
    wanted = solved(target_logprob, *given, chunk=chunk)
    found = solved(fused, *given, chunk=chunk)
    assert_near(found[:1], wanted[:1], rel=1e-5)
    assert_near(found, wanted, rel=NEAR[given[0].dtype])
    return found


def on_device(given):
    return tuple(x.to(DEVICE) for x in given)


@both_types
@every_case
def test_value_and_gradients(rows, width, words, chunk, dtype):
    compare(on_device(problem(rows, width, words, dtype=dtype)), chunk=chunk)


@both_types
def test_no_targets_at_all(dtype):
    hidden_RD, head_VD, targets_R, grad_R = on_device(problem(3, 5, 20, dtype=dtype))
    value_R, *grads = compare((hidden_RD, head_VD, torch.full_like(targets_R, -1), grad_R), chunk=6)
    assert (value_R == -INF).all()
    assert not any(grad.any() for grad in grads)
    assert compare((hidden_RD[:0], head_VD, targets_R[:0], grad_R[:0]), chunk=6)[0].shape == (0,)


def test_inputs_need_not_be_contiguous():
    hidden_RD, head_VD, targets_R, grad_R = on_device(problem(8, 10, 30, dtype=torch.float32))
    compare((hidden_RD[::2, 1::2], head_VD[3:, ::2], targets_R[::2].clamp(max=26), grad_R[::2]), chunk=7)
    compare((hidden_RD, head_VD.T.contiguous().T, targets_R, grad_R.expand(8)), chunk=7)


def test_extreme_scores_and_a_row_without_target():
    """A NaN where no target stands reaches nothing; one where a target stands is not hidden."""
    given = on_device(problem(6, 16, 50, dtype=torch.float32, scale=1e4, outside=0))
    given[2][2] = -1
    clean = compare(given, chunk=8)
    given[0][2] = float("nan")
    for a, b in zip(compare(given, chunk=8), clean, strict=True):
        assert torch.equal(a, b)
    given[0][4, 1] = float("nan")
    assert torch.isnan(fused(*given[:3], chunk=8)).tolist() == [row == 4 for row in range(6)]


def test_the_head_may_stand_still():
    hidden_RD, head_VD, targets_R, grad_R = on_device(problem(6, 5, 20, dtype=torch.float32))
    wanted = solved(target_logprob, hidden_RD, head_VD, targets_R, grad_R, chunk=6)[1]
    hidden_RD.requires_grad_()
    fused(hidden_RD, head_VD, targets_R, chunk=6).backward(grad_R)
    torch.testing.assert_close(hidden_RD.grad.double(), wanted, rtol=0, atol=1e-5)
    assert head_VD.grad is None


def test_double_precision_is_refused():
    with pytest.raises(ValueError, match=r"kernels\.logprob"):
        fused(*problem(2, 3, 4)[:3], chunk=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both_types
def test_a_real_head_on_cuda(dtype):
    compare(on_device(problem(513, 896, 32_003, dtype=dtype)), chunk=4096)
