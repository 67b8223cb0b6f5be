"""The Triton twin against kernels/walk.py: by CUDA where there is one, else by Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import triton
import triton.language as tl

from kernels.coins import gumbel_keys
from kernels.fused import walk as fused
from kernels.sampling import _hash, _key, keyed_gumbel, noisy_top2
from kernels.tree import Tree, best_first, chain, depths
from kernels.walk import match_walk, read
from tests.kernels.test_walk import KEY, logits_for, noise_for, random_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
ROUNDING = 1e-4  # the two best noisy scores are further apart than any error of a logarithm


@triton.jit
def _noise_kernel(keys, bits, values, count, WORDS: tl.constexpr):
    word = tl.arange(0, WORDS)
    z = fused.keyed_bits(tl.load(keys).to(tl.uint64, bitcast=True), word)
    tl.store(bits + word, z.to(tl.int64, bitcast=True), mask=word < count)
    tl.store(values + word, fused.gumbel(z), mask=word < count)


@triton.jit
def _gumbel_kernel(bits, values, WORDS: tl.constexpr):
    word = tl.arange(0, WORDS)
    tl.store(values + word, fused.gumbel(tl.load(bits + word).to(tl.uint64, bitcast=True)))


def both(logits_MV, tree, noise, *, chunk, max_depth=None, **setting):
    """The results of twin and reference, or None where a coin hangs on a rounding."""
    depth_N = depths(tree.parents)
    positions = [setting["position"] + depth for depth in (0, *depth_N)]
    shared = {key: value for key, value in setting.items() if key != "position"}
    gaps = [
        noisy_top2(row_V, place, noise, **shared) / max(shared["temperature"], 1e-5)
        for row_V, place in zip(logits_MV, positions, strict=True)
    ]
    if shared["temperature"] and min(gaps) < ROUNDING:
        return None
    given = (logits_MV.to(DEVICE), tree.tokens_N.to(DEVICE), torch.tensor(tree.parents, dtype=torch.int64).to(DEVICE))
    setting["max_depth"] = max(depth_N, default=0) if max_depth is None else max_depth
    return fused.match_walk(*given, noise, **setting, chunk=chunk), match_walk(*given, noise, **setting)


def test_the_bits_are_the_same_and_the_noise_but_for_rounding():
    keys_P = gumbel_keys(noise_for(500), position=9, count=1, device=torch.device(DEVICE))
    bits, values = torch.empty(500, dtype=torch.int64, device=DEVICE), torch.empty(500, device=DEVICE)
    _noise_kernel[(1,)](keys_P, bits, values, 500, WORDS=512)
    assert torch.equal(bits.cpu(), _hash(500, _key(0, KEY, 9, -1), torch.device("cpu")))
    wanted = keyed_gumbel(500, seed=0, prompt_key=KEY, position=9)
    torch.testing.assert_close(values.cpu(), wanted, rtol=2e-6, atol=2e-6)


def test_noise_at_its_ends(monkeypatch):
    """The smallest v decide the arg max, and 1 - v says little of them."""
    upper = torch.tensor([0, 1, 2, 77, 128, 1000, 2**20 + 1, 2**29, 2**30 + 3, 2**31, 2**32 - 2**9, 2**32 - 1])
    bits = torch.cat([upper, torch.zeros(4, dtype=torch.int64)]) << 32
    values = torch.empty(16, device=DEVICE)
    _gumbel_kernel[(1,)](bits.to(DEVICE), values, WORDS=16)
    monkeypatch.setattr("kernels.sampling._hash", lambda count, key, device: bits)
    wanted = keyed_gumbel(16, seed=0, prompt_key=0, position=0)
    torch.testing.assert_close(values.cpu(), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_walks_over_random_trees(temperature, dtype):
    generator = torch.Generator().manual_seed(5)
    compared, longest = 0, 0
    for num_nodes, chunk in [(0, 64), (1, 16), (5, 32), (9, 16), (12, 64)]:
        tree = random_tree(num_nodes, generator)
        logits_MV = logits_for(tree, generator, pull=5.0).to(dtype)
        place = {"position": num_nodes, "temperature": temperature}
        if results := both(logits_MV, tree, noise_for(), **place, chunk=chunk):
            assert torch.equal(*results), (num_nodes, [result.tolist() for result in results])
            compared, longest = compared + 1, max(longest, int(results[1][1]))
    assert compared >= 4
    assert longest >= 2


def test_room_below_the_tree_and_filters():
    generator = torch.Generator().manual_seed(6)
    tree = chain(torch.randint(0, 61, (4,), generator=generator))
    logits_MV = logits_for(tree, generator, pull=6.0)
    for filters in ({}, {"top_k": 5}, {"top_p": 0.7}):
        results = both(logits_MV, tree, noise_for(), position=3, temperature=0.8, max_depth=6, chunk=32, **filters)
        assert results
        assert torch.equal(*results)
    strided_MV = logits_MV.T.contiguous().T  # rows of another layout are copied
    results = both(strided_MV, tree, noise_for(), position=3, temperature=0.8, chunk=32)
    assert results
    assert torch.equal(*results)
    with pytest.raises(ValueError, match="power of two"):
        both(logits_MV, tree, noise_for(), position=3, temperature=0.8, chunk=24)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, which plays the device
@pytest.mark.parametrize("chunk", [2, 8])
def test_ties_and_overflow(chunk):
    huge = 3e38
    logits_MV = torch.tensor([[0.0, huge, huge, 1.0, huge], [-huge, -huge, -huge, -huge, -huge], [1.0, 3, 3, 0, 3]])
    tree, parents_N = Tree(torch.tensor([1, 0]), [-1, 0]), torch.tensor([-1, 0], device=DEVICE)
    for temperature in (0.0, 1e-4):
        result = fused.match_walk(
            *(logits_MV.to(DEVICE), tree.tokens_N.to(DEVICE), parents_N, noise_for(5)),
            position=0, max_depth=2, temperature=temperature, chunk=chunk,
        )  # fmt: skip
        assert read(result).path == [0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[NAN, 0.0, 1.0], [0.0, INF, 1.0], [-INF, -INF, -INF]])
def test_bad_rows_raise(bad, temperature):
    logits_MV = torch.tensor([[0.0, 9.0, 0.0], [9.0, 0.0, 0.0], bad], device=DEVICE)
    tree = torch.tensor([1, 2], device=DEVICE), torch.tensor([-1, 0], device=DEVICE)
    setting = {"position": 0, "max_depth": 2, "temperature": temperature, "chunk": 2}
    with pytest.raises(ValueError, match="NaN"):
        read(fused.match_walk(logits_MV, *tree, noise_for(3), **setting))


@pytest.mark.parametrize(
    ("tokens", "parents", "max_depth"),
    [([3, 4, 3], [-1, 0, -1], 2), ([3, 4], [1, -1], 2), ([3, 4, 5], [-1, 0, 1], 2), ([3], [-1], 0)],
)
def test_bad_trees_are_refused(tokens, parents, max_depth):
    tree = torch.tensor(tokens, device=DEVICE), torch.tensor(parents, device=DEVICE)
    logits_MV = torch.zeros(len(tokens) + 1, 8, device=DEVICE)
    for temperature in (0.0, 1.0):
        result = fused.match_walk(
            logits_MV, *tree, noise_for(8), position=0, max_depth=max_depth, temperature=temperature, chunk=8
        )
        with pytest.raises(AssertionError, match="siblings"):
            read(result)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled(temperature, dtype):
    generator, vocab = torch.Generator().manual_seed(7), 152_064
    log_q = torch.randn(8, 512, generator=generator).mul(3).log_softmax(-1)
    compared = 0
    for seed, tree in enumerate(
        [best_first(log_q, nodes=n, width=8) for n in (1, 31, 64, 128)] + [random_tree(0, generator)]
    ):
        logits_MV = logits_for(tree, generator, pull=8.0, vocab=vocab).to(dtype)
        setting = {"position": 100, "temperature": temperature, "chunk": fused.CHUNK}
        if results := both(logits_MV, tree, noise_for(vocab, seed=seed), **setting):
            assert torch.equal(*results)
            compared += 1
    assert compared >= 3
