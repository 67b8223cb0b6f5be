"""The fused attention against the eager one: in Triton's interpreter here, compiled where there is a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton")

from kernels import attention as eager
from kernels.fused import attention as fused
from tests.kernels.test_attention import TREES, check_bits, tensors

TOLERANCE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2}}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="a GPU is there: the compiled kernel is tested")


def both(parents, prefix, dtype, *, rows, block, device="cpu", **sizes):
    q, k, v = (x.to(device) for x in tensors(rows, prefix, dtype, **sizes))
    paths = eager.lay_out(eager.path_words(parents, rows=rows), prefix=prefix, block=block).to(device)
    scaling = q.shape[2] ** -0.5
    return [module.tree_attention(q, k, v, paths, scaling=scaling) for module in (fused, eager)]


def in_order(a, b, dtype):
    return (a.astype(dtype)[:, :, None] * b.astype(dtype)).sum(1)


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("tree", "prefix", "rows", "sizes"),
    [
        ("pending alone", 0, 1, {"group": 1}),
        ("pending alone", 16, 2, {}),
        ("trie", 21, 13, {"width": 24}),
        ("random", 32, 13, {"group": 1, "width": 16}),
        ("best first", 5, 14, {"group": 6, "width": 8}),
    ],
)
def test_it_is_the_eager_attention(tree, prefix, rows, sizes, dtype):
    found, wanted = both(TREES[tree], prefix, dtype, rows=rows, block=16, **sizes)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, **TOLERANCE[dtype])


@interpreted
def test_nothing_to_do_and_blocks_that_do_not_fit():
    found, wanted = both([], 0, torch.float32, rows=1, block=16)
    assert found.shape == wanted.shape
    nobody = eager.pack(torch.zeros(0, 0, dtype=torch.bool))
    q, k, v = tensors(0, 20, torch.float32)
    paths = eager.lay_out(nobody, prefix=20, block=16)
    assert fused.tree_attention(q, k, v, paths, scaling=1.0).shape == q.shape
    for block in (8, 24):
        with pytest.raises(ValueError, match="power of two"):
            both([], 4, torch.float32, rows=1, block=block)


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_bits_it_has_in_a_chain_and_alone(dtype, monkeypatch):
    """Blocks, gathering and merging; not the product: numpy's BLAS, which the interpreter multiplies with, gives a row
    other bits at other places of a tile, so sums in order stand in for it."""
    monkeypatch.setattr("numpy.matmul", in_order)
    monkeypatch.setattr("tests.kernels.test_attention.tree_attention", fused.tree_attention)
    check_bits([-1, 0, -1], 15, dtype, rows=4, block=16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("prefix", [0, 64, 1000])
@pytest.mark.parametrize("tree", TREES)
def test_compiled(tree, prefix, dtype):
    found, wanted = both(TREES[tree], prefix, dtype, rows=13, block=64, device="cuda", width=64)
    torch.testing.assert_close(found, wanted, **TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("prefix", [0, 63, 1000])
@pytest.mark.parametrize("tree", TREES)
def test_compiled_bits(tree, prefix, dtype, monkeypatch):
    """Prefixes that are multiples of 16 and not: no specialisation may change a sum's order."""

    def on_gpu(q, k, v, paths, *, scaling):
        on = [x.cuda() for x in (q, k, v)]
        return fused.tree_attention(*on, paths.to("cuda"), scaling=scaling).cpu()

    monkeypatch.setattr("tests.kernels.test_attention.tree_attention", on_gpu)
    check_bits(TREES[tree], prefix, dtype, rows=13, block=64, width=64)
