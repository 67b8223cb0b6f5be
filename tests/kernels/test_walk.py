"""The device's walks against keyed_choice, match and leviathan: the same coins, verdicts and complaints."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.accept import leviathan, match
from kernels.coins import gumbel_keys, keyed_gumbel_chunk, noisy_argmax
from kernels.sampling import KeyedNoise, keyed_choice, keyed_gumbel, prompt_key
from kernels.tree import Tree, best_first, chain, depths, prefix_trie
from kernels.walk import ancestor_rows, leviathan_walk, match_walk, read, row_depths
from tests.kernels.laws import random_q

NAN, INF = float("nan"), float("inf")
KEY = prompt_key("gsm_symbolic/17")
TEMPERATURES = [0.0, 1e-6, 1e-4, 0.7, 1.5, 5.0]
VOCAB = 61


def noise_for(vocab=VOCAB, seed=0):
    return KeyedNoise(seed=seed, prompt_key=KEY, vocab=vocab)


def random_tree(num_nodes, generator, *, vocab=VOCAB):
    """Any shape from a chain to a star; siblings carry distinct tokens."""
    reach = int(torch.randint(1, num_nodes + 2, (), generator=generator))
    words = torch.randperm(vocab, generator=generator).tolist()
    parents = [n - 1 - int(torch.randint(0, min(reach, n + 1), (), generator=generator)) for n in range(num_nodes)]
    tokens = [words[(parents[:n].count(parent) + 7 * (parent + 1)) % vocab] for n, parent in enumerate(parents)]
    assert num_nodes < vocab
    return Tree(torch.tensor(tokens, dtype=torch.int64), parents)


def logits_for(tree, generator, *, pull, vocab=VOCAB):
    """Random rows that lean to a child of theirs, so that walks go deep."""
    logits_MV = torch.randn(len(tree.parents) + 1, vocab, generator=generator)
    for token, parent in zip(tree.tokens_N.tolist(), tree.parents, strict=True):
        logits_MV[parent + 1, token] += pull
    return logits_MV


def expected(logits_MV, tree, noise, *, position, **setting):
    positions = [position + depth for depth in (0, *depths(tree.parents))]
    return match(tree, keyed_choice(logits_MV, positions, noise, **setting))


def walked(logits_MV, tree, noise, *, position, max_depth=None, **setting):
    deepest = max(depths(tree.parents), default=0)
    return match_walk(
        logits_MV,
        tree.tokens_N,
        torch.tensor(tree.parents, dtype=torch.int64),
        noise,
        position=position,
        max_depth=deepest if max_depth is None else max_depth,
        **setting,
    )


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_walks_over_random_trees(temperature, dtype):
    generator = torch.Generator().manual_seed(0)
    accepted = []
    for trial in range(40):
        tree = random_tree(trial % 20, generator)
        logits_MV = logits_for(tree, generator, pull=6 * max(temperature, 0.5)).to(dtype)
        place = {"position": 3 * trial, "temperature": temperature}
        want = expected(logits_MV, tree, noise_for(), **place)
        for chunk in (7, VOCAB, 8192):
            assert read(walked(logits_MV, tree, noise_for(), **place, chunk=chunk)) == want
        accepted.append(len(want.path))
    assert max(accepted) > 3, "walks of several steps, or the test shows little"
    assert 0 in accepted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_trees_of_methods(temperature):
    generator = torch.Generator().manual_seed(1)
    drafts_KG = torch.randint(0, 3, (6, 5), generator=generator)
    log_q = torch.randn(5, VOCAB, generator=generator).log_softmax(-1)
    for tree in (
        prefix_trie(drafts_KG).tree,
        best_first(log_q, nodes=32, width=8),
        best_first(log_q, nodes=1, width=8),
        chain(torch.randint(0, VOCAB, (33,), generator=generator)),
        chain(torch.tensor([4])),
        chain(torch.tensor([], dtype=torch.int64)),
    ):
        for seed in range(4):
            logits_MV = logits_for(tree, generator, pull=5.0)
            noise = noise_for(seed=seed)
            place = {"position": 90, "temperature": temperature}
            want = expected(logits_MV, tree, noise, **place)
            assert read(walked(logits_MV, tree, noise, **place)) == want
            assert read(walked(logits_MV, tree, noise, **place, max_depth=40)) == want


def test_the_result_is_small_and_padded():
    tree = Tree(torch.tensor([5, 6, 7, 8]), [-1, -1, 0, 2])
    logits_MV = torch.nn.functional.one_hot(torch.tensor([5, 7, 0, 1, 9]), 10).float()
    result = walked(logits_MV, tree, noise_for(10), position=0, temperature=0.0, max_depth=5)
    assert result.tolist() == [0, 2, 1, 0, 2, -1, -1, -1]
    assert read(result) == ([0, 2], 1)


@pytest.mark.parametrize("setting", [{"top_k": 5}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.6}, {"top_k": VOCAB}])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_filters(setting, temperature):
    generator = torch.Generator().manual_seed(2)
    for trial in range(10):
        tree = random_tree(12, generator)
        logits_MV = logits_for(tree, generator, pull=3.0)
        place = {"position": trial, "temperature": temperature, **setting}
        want = expected(logits_MV, tree, noise_for(), **place)
        assert read(walked(logits_MV, tree, noise_for(), **place)) == want


def test_noise_of_any_range_of_words():
    vocab = 5003
    noise = noise_for(vocab, seed=3)
    keys_P = gumbel_keys(noise, position=11, count=3, device=torch.device("cpu"))
    rows_PV = torch.stack([keyed_gumbel(vocab, seed=3, prompt_key=KEY, position=11 + p) for p in range(3)])
    for start, stop in [(0, 1), (0, vocab), (1, 18), (16, 2064), (4999, vocab), (777, 3333)]:
        chunk_PC = keyed_gumbel_chunk(keys_P, start=start, stop=stop, vocab=vocab)
        assert torch.equal(chunk_PC, rows_PV[:, start:stop])


@pytest.mark.parametrize("chunk", [1, 3, 8192])
def test_ties_go_to_the_lowest_id(chunk):
    huge = 3e38  # divided by a small temperature: infinite, though the row is sound
    logits_MV = torch.tensor([[0.0, huge, huge, 1.0], [-huge, -huge, -huge, -huge], [1.0, 3.0, 3.0, 3.0]])
    depth_M = torch.tensor([0, 1, 1])
    for temperature in (0.0, 1e-4):
        want = keyed_choice(logits_MV, [2, 3, 3], noise_for(4), temperature=temperature)
        coins = noisy_argmax(
            logits_MV, depth_M, noise_for(4), position=2, max_depth=1, temperature=temperature, chunk=chunk
        )
        assert torch.equal(coins.ids_M, want)
        assert torch.isfinite(coins.maxima_M).all()
    assert want.tolist()[:2] == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[NAN, 0.0, 1.0], [0.0, INF, 1.0], [-INF, -INF, -INF]])
@pytest.mark.parametrize("row", [0, 2])  # on the path, and off it
def test_bad_rows_raise(bad, temperature, row):
    tree = Tree(torch.tensor([1, 2]), [-1, 0])
    for dtype in (torch.float32, torch.bfloat16):
        logits_MV = torch.tensor([[0.0, 9.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 9.0]], dtype=dtype)
        logits_MV[row] = torch.tensor(bad)
        for chunk in (2, 8192):
            result = walked(logits_MV, tree, noise_for(3), position=0, temperature=temperature, chunk=chunk)
            with pytest.raises(ValueError, match="NaN"):
                read(result)
    masked_MV = torch.tensor([[0.0, -INF, 1.0]] * 3)  # a forbidden id is no complaint
    assert read(walked(masked_MV, tree, noise_for(3), position=0, temperature=temperature)).path == []


@pytest.mark.parametrize(
    ("tokens", "parents", "max_depth"),
    [
        ([3, 3], [-1, -1], 2),
        ([3, 4, 3], [-1, 0, -1], 2),
        ([3, 4], [1, -1], 2),
        ([3, 4, 5], [-1, 0, 1], 2),
        ([3], [-1], 0),
    ],
)
def test_bad_trees_are_refused(tokens, parents, max_depth):
    tree = Tree(torch.tensor(tokens), [-1] * len(tokens))
    logits_MV = torch.zeros(len(tokens) + 1, 8)
    result = match_walk(
        logits_MV,
        tree.tokens_N,
        torch.tensor(parents),
        noise_for(8),
        position=0,
        max_depth=max_depth,
        temperature=0.0,
    )
    with pytest.raises(AssertionError, match="siblings"):
        read(result)


@pytest.mark.parametrize("seed", range(5))
def test_depths(seed):
    tree = random_tree(40, torch.Generator().manual_seed(seed))
    wanted = [0, *depths(tree.parents)]
    for max_depth in (max(wanted), max(wanted) + 1, 64):
        ups = ancestor_rows(torch.tensor(tree.parents), max_depth=max_depth)
        assert row_depths(ups, 41, device=torch.device("cpu")).tolist() == wanted


class Watch(TorchDispatchMode):
    """The largest tensor made, and whether the host waits: asks for a value or a size, or sends values of its own."""

    QUESTIONS = ("lift_fresh", "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique2", "masked_select")

    def __init__(self):
        super().__init__()
        self.largest, self.questions = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0]
        if name in self.QUESTIONS:
            self.questions.append(name)
        for value in out if isinstance(out, tuple) else (out,):
            if isinstance(value, torch.Tensor) and not func.is_view:
                self.largest = max(self.largest, value.numel() * value.element_size())
        return out


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_copy_of_the_logits_and_no_question(temperature):
    generator = torch.Generator().manual_seed(4)
    tree = random_tree(30, generator)
    logits_MV = torch.randn(31, 4096, generator=generator).bfloat16()
    parents_N, max_depth = torch.tensor(tree.parents), max(depths(tree.parents))
    with Watch() as watch:
        result = match_walk(
            logits_MV,
            tree.tokens_N,
            parents_N,
            noise_for(4096),
            position=5,
            max_depth=max_depth,
            temperature=temperature,
            chunk=128,
        )
    assert watch.questions == []
    limit = max(31 * 128 * 8, 4096 * 8)  # a chunk of every row; the counters of the hash, kept for all cycles
    assert watch.largest <= limit < logits_MV.numel() * 2
    assert read(result) == expected(logits_MV, tree, noise_for(4096), position=5, temperature=temperature)
    with Watch() as watch:
        keyed_choice(logits_MV, [5] * 31, noise_for(4096), temperature=temperature)
        torch.tensor([1, 2])
    assert {"_local_scalar_dense", "lift_fresh"} <= set(watch.questions), "the watch sees what it looks for"


# Leviathan


def both(tokens_G, q_GV, p_MV, uniforms_G, final):
    wanted = leviathan(tokens_G, q_GV, p_MV, uniforms_G=uniforms_G, final_uniform=final)
    with Watch() as watch:
        result = leviathan_walk(tokens_G, q_GV, p_MV, uniforms_G=uniforms_G, final_uniform=final)
    assert watch.questions == []
    assert len(result) == 3 + len(tokens_G)
    assert read(result) == wanted
    return wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [0, 1, 2, 5])
def test_leviathan_over_random_laws(window, dtype):
    generator = torch.Generator().manual_seed(window)
    lengths = set()
    for seed in range(30):
        q_GV = random_q(window, 9, seed, support=6).to(dtype)
        p_MV = (0.6 * random_q(window + 1, 9, 100 + seed)).to(dtype)
        p_MV[:-1] += 0.4 * q_GV  # close enough to q for long runs
        tokens_G = torch.multinomial(q_GV, 1, generator=generator)[:, 0] if window else torch.zeros(0).long()
        uniforms_G = torch.rand(window, dtype=torch.float64, generator=generator)
        final = float(torch.rand((), dtype=torch.float64, generator=generator))
        lengths.add(len(both(tokens_G, q_GV, p_MV, uniforms_G, final).path))
        both(tokens_G, q_GV, p_MV, uniforms_G, torch.tensor(final))
    assert {0, window} <= lengths


def test_leviathan_at_the_edges():
    same, hot = [0.2, 0.8], [0.0, 1.0]

    def lev(tokens, q, p, uniforms, final=0.5):
        p_MV, uniforms_G = (torch.tensor(law, dtype=torch.float64) for law in (p, uniforms))
        q_GV = torch.tensor(q, dtype=torch.float64).reshape(len(tokens), -1 if tokens else len(p[0]))
        return both(torch.tensor(tokens, dtype=torch.int64), q_GV, p_MV, uniforms_G, final)

    assert lev([1], [same], [same, [1, 0]], [1 - 1e-12]) == ([0], 0)
    assert lev([1], [same], [same, [1, 0]], [1.0]) == ([], 1)  # nothing is left of p - q: p itself
    assert lev([0], [[1.0, 0.0]], [hot, hot], [1e-12]) == ([], 1)
    for final in (0.0, 1e-12, 0.5, 1 - 1e-12, 1.0):
        assert lev([2], [[0, 0, 1.0]], [[0, 0.3, 0.7], [*hot, 0]], [0.9], final) == ([], 1)
    third = [[1 / 3, 1 / 3, 1 / 3, 0]]
    assert lev([], [], third, [], 1 - 2.0**-53) == ([], 2)


@pytest.mark.parametrize(
    ("token", "q", "p", "match_text"),
    [
        (1, [[0.2, 0.8]], [[NAN, 1], [0.2, 0.8]], "NaN"),
        (1, [[0.2, 0.8]], [[0.2, 0.8], [0.2, NAN]], "NaN"),
        (1, [[0.5, NAN]], [[0.2, 0.8], [0.2, 0.8]], "NaN"),
        (0, [[0.0, 1.0]], [[0.2, 0.8], [0.2, 0.8]], "q = 0"),
        (1, [[0.2, 0.8]], [[0.2, 0.8], [0.0, 0.0]], "zero"),
        (1, [[0.2, 0.8]], [[0.2, 0.8], [-0.5, 1.5]], "negative"),
        (1, [[0.2, 0.8]], [[0.2, 0.8], [INF, 1.0]], "infinite"),
    ],
)
def test_leviathan_refuses_what_the_reference_refuses(token, q, p, match_text):
    tokens_G, q_GV, p_MV = torch.tensor([token]), torch.tensor(q), torch.tensor(p)
    coins = {"uniforms_G": torch.tensor([0.5]), "final_uniform": 0.5}
    with pytest.raises(ValueError, match=match_text):
        leviathan(tokens_G, q_GV, p_MV, **coins)
    with pytest.raises(ValueError, match=match_text):
        read(leviathan_walk(tokens_G, q_GV, p_MV, **coins))
