"""The methods whose K drafts are judged with q, and the union of proposers, through the engine."""

import pytest
import torch

from kernels.accept import match
from kernels.tree import Tree, chain, depths, prefix_trie, validate
from kernels.union import union
from stages.evaluate.contract import EMPTY
from stages.evaluate.methods import prompt_lookup, recursive, specdiff, specdiff2_mix, specdiff2_tree, spectr
from tests.stages.scripted import (
    TableDrafter,
    TableVerifier,
    engine_of,
    prompt_of,
    tiny_drafter,
    tiny_verifier,
    vanilla_text,
)
from tests.stages.test_methods import CHI_SQUARE_26, NOTHING, SOME_WORDS, law_statistic, state_of, tables

WITH_Q = {"recursive": recursive, "spectr": spectr}


def with_q(name, drafter, *, gamma=2, drafts=3, temperature=1.0):
    module = WITH_Q[name]
    return module.build(module.Params(drafter="streak", gamma=gamma, drafts=drafts, temperature=temperature), drafter)


def mix(drafter, *, gamma=4, nodes=8, width=4, threshold=0.0, lookup=5, longest=3, shortest=1):
    return specdiff2_mix.build(
        specdiff2_mix.Params(
            drafter="trie_streak",
            gamma=gamma,
            nodes=nodes,
            width=width,
            threshold=threshold,
            lookup=lookup,
            longest=longest,
            shortest=shortest,
        ),
        drafter,
    )


# union


def paths_of(tree):
    paths = []
    for token, parent in zip(tree.tokens_N.tolist(), tree.parents, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return paths


def random_trie(seed):
    g = torch.Generator().manual_seed(seed)
    return prefix_trie(torch.randint(0, 3, (4, 3), generator=g)).tree


@pytest.mark.parametrize("seed", range(5))
def test_a_union_holds_every_path_of_every_tree_once(seed):
    trees = [random_trie(10 * seed + i) for i in range(3)]
    joined = union(trees)
    validate(joined)
    first = len(trees[0].parents)
    assert joined.tokens_N[:first].tolist() == trees[0].tokens_N.tolist()
    assert joined.parents[:first] == trees[0].parents
    assert len(set(paths_of(joined))) == len(joined.parents)
    assert set(paths_of(joined)) == {path for tree in trees for path in paths_of(tree)}


def test_a_union_with_itself_and_with_nothing_is_the_tree():
    tree = random_trie(1)
    for trees in ([tree], [tree, tree], [tree, EMPTY], [EMPTY, tree], [EMPTY, tree, EMPTY]):
        joined = union(trees)
        assert torch.equal(joined.tokens_N, tree.tokens_N)
        assert joined.parents == tree.parents
    assert union([EMPTY, EMPTY]).parents == []
    assert union([EMPTY]).tokens_N.dtype == torch.int64


def test_a_union_by_hand():
    """A chain that runs along the tree, leaves it, and comes by a token seen elsewhere."""
    tree = Tree(torch.tensor([5, 7, 6, 8]), [-1, -1, 0, 1])
    joined = union([tree, chain(torch.tensor([5, 6, 7, 8])), chain(torch.tensor([9, 5]))])
    assert joined.tokens_N.tolist() == [5, 7, 6, 8, 7, 8, 9, 5]
    assert joined.parents == [-1, -1, 0, 1, 2, 4, -1, 6]


# two proposers in one tree


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False), ("gemma", True)])
def test_the_mix_equals_vanilla(kind, tied, temperature):
    verifier, prompt = tiny_verifier(kind, tied), prompt_of(4, seed=1) * 2
    for turn, prefix in enumerate(("own", "verifier")):
        part = {"layers": [1], "words": SOME_WORDS} if turn else {}
        method = mix(tiny_drafter(kind, tied, prefix=prefix, **part), gamma=3 + turn, lookup=6 - 4 * turn)
        text = engine_of(verifier, temperature=temperature, limit=14).decode(prompt, method, prompt_id="p")
        assert text.output_ids == vanilla_text(verifier, prompt, temperature=temperature, limit=14)
        assert max(cycle.proposed for cycle in text.cycles) > 0


class Compared:
    """Proposes the mix; notes how far it and each part alone would go along vanilla's text from the same state."""

    reads = ()

    def __init__(self, answer, drafter, **settings):
        self.answer, self.mix = answer, mix(drafter, **settings)
        self.parts = [
            specdiff2_tree.build(self.mix.tree.params, drafter),
            prompt_lookup.build(self.mix.lookup.params, None),
        ]
        self.reached, self.nodes = [], []

    def start(self, prompt_ids, features_TC):
        self.length = len(prompt_ids)
        for method in (self.mix, *self.parts):
            method.start(prompt_ids, features_TC)

    def propose(self, state):
        proposals = [method.propose(state) for method in (self.mix, *self.parts)]
        coming = self.answer[len(state.ids) - self.length :]
        self.reached.append([walked(proposal.tree, coming) for proposal in proposals])
        self.nodes.append([len(proposal.tree.parents) for proposal in proposals])
        return proposals[0]


def walked(tree, coming):
    """Tokens that Match accepts where the coins are `coming`, of as many tokens as are known."""
    depth_M = [0, *depths(tree.parents)]
    return len(match(tree, [coming[d] if d < len(coming) else -1 for d in depth_M]).path)


def compare(verifier, drafter, prompt, **settings):
    """How far tree and lookup go in each cycle, once the mix is found to go as far as the better one."""
    answer = vanilla_text(verifier, prompt, limit=30)
    method = Compared(answer, drafter, **settings)
    text = engine_of(verifier, limit=30).decode(prompt, method, prompt_id="p")
    assert text.output_ids == answer
    assert [cycle.accepted for cycle in text.cycles] == [both for both, _, _ in method.reached]
    for (both, *parts), (nodes, *of_parts) in zip(method.reached, method.nodes, strict=True):
        assert both == max(parts)
        assert max(of_parts) <= nodes <= sum(of_parts)
    return [parts for _, *parts in method.reached]


@pytest.mark.parametrize("prefix", ["own", "verifier"])
def test_the_mix_goes_as_far_as_its_better_part(prefix):
    drafter = tiny_drafter(prefix=prefix, layers=[0], words=SOME_WORDS)
    for seed in range(2):
        assert compare(tiny_verifier(), drafter, prompt_of(5, seed=seed) * 2)


def test_each_part_of_the_mix_is_the_better_one_somewhere():
    """A verifier that counts 0, 1, .. 6, 0, and a drafter that is right behind 0, 1 and 2 alone."""
    right_VV = torch.eye(7).roll(1, 1)
    scores_VGV = torch.stack([50 * torch.eye(7).roll(depth + 1, 1) for depth in range(4)], 1)
    scores_VGV[3:] = scores_VGV[3:].roll(2, -1)
    reached = compare(TableVerifier(50 * right_VV), TableDrafter(scores_VGV, torch.arange(7)), [0, 1], threshold=0.5)
    assert reached[0] == [4, 0], "nothing to look up in the first round"
    assert any(lookup > tree for tree, lookup in reached)


@torch.inference_mode()
def test_the_branch_is_added_where_a_run_is_found_whatever_the_tree_says():
    ids = [*prompt_of(9), 50, 51, 52, 53, 54, 40, 50, 51]
    for shortest, found in ((1, True), (2, True), (3, False)):
        for max_depth, sizes in ((9, (2, 6)), (1, (1, 2))):
            method = mix(tiny_drafter(), nodes=2, width=1, longest=3, shortest=shortest, lookup=4)
            method.start(ids[:-1], NOTHING)
            joined = method.propose(state_of(ids, max_depth=max_depth)).tree
            assert ((52, 53, 54, 40)[:max_depth] in paths_of(joined)) == found
            assert len(joined.parents) == sizes[found]


def test_the_mix_drafts_on_where_the_drafters_context_ends():
    counting = TableVerifier(torch.eye(7).roll(1, 1) * 50)  # 0, 1, .. 6, 0, 1, ..
    drafter = tables()[1]
    drafter.context_limit = 5
    text = engine_of(counting, limit=30).decode(list(range(7)), mix(drafter), prompt_id="p")
    assert text.output_ids == [i % 7 for i in range(30)]
    assert [cycle.accepted for cycle in text.cycles] == [5, 5, 5, 5, 4]


def test_a_shortest_run_above_the_longest_is_refused():
    with pytest.raises(ValueError, match="shortest 4 is above longest 3"):
        mix(tiny_drafter(), longest=3, shortest=4)


# drafts judged with q


@pytest.mark.parametrize("name", WITH_Q)
@pytest.mark.parametrize(("kind", "tied", "prefix"), [("llama", True, "verifier"), ("qwen2", False, "own")])
def test_at_temperature_zero_the_text_is_vanillas(name, kind, tied, prefix):
    verifier, prompt = tiny_verifier(kind, tied), prompt_of(9)
    method = with_q(name, tiny_drafter(kind, tied, prefix=prefix), gamma=3, temperature=0.1)
    text = engine_of(verifier, limit=14).decode(prompt, method, prompt_id="p")
    assert text.output_ids == vanilla_text(verifier, prompt, limit=14)
    assert sum(cycle.accepted for cycle in text.cycles) > 0


@pytest.mark.parametrize("name", WITH_Q)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_joint_law_is_kept(name, temperature):
    statistic, accepted = law_statistic(with_q(name, tables()[1]), temperature)
    assert statistic < CHI_SQUARE_26
    assert accepted > 0.3, "drafts are really accepted"


def test_the_count_sees_drafts_from_another_law_than_their_q():
    class WrongQ:
        reads = ()

        def __init__(self):
            self.inner = with_q("spectr", tables()[1], temperature=0.4)

        def start(self, prompt_ids, features_TC):
            self.inner.start(prompt_ids, features_TC)

        def propose(self, state):
            proposal = self.inner.propose(state)
            return proposal if proposal.q_GV is None else proposal._replace(q_GV=(proposal.q_GV > 0) / 2.0)

    assert law_statistic(WrongQ(), 1.3)[0] > 1.5 * CHI_SQUARE_26


@torch.inference_mode()
@pytest.mark.parametrize("name", WITH_Q)
def test_paths_are_the_draws_and_q_their_law(name):
    drafter, prompt = tiny_drafter(words=SOME_WORDS), prompt_of(6)
    method = with_q(name, drafter, gamma=3, drafts=6, temperature=0.3)
    method.start(prompt, NOTHING)
    tree, rule, paths, q_GV = method.propose(state_of([*prompt, 9]))
    assert rule == {"recursive": "recursive", "spectr": "k_seq"}[name]
    assert paths is not None
    assert q_GV is not None
    assert [len(path) for path in paths] == [3] * 6
    assert len({path[0] for path in paths}) < 6, "equal draws stay apart in the paths"
    for path in paths:
        assert bool((q_GV[torch.arange(3), tree.tokens_N[path]] > 0).all())
    outside = torch.ones(q_GV.shape[1], dtype=torch.bool)
    outside[SOME_WORDS] = False
    assert float(q_GV[:, outside].sum()) == 0


def test_one_draft_is_specdiff():
    """The same coins at the same places: K = 1 answers as Leviathan does."""
    verifier, drafter = tables()
    engine = engine_of(verifier, temperature=0.9, limit=60)
    leviathan = specdiff.build(specdiff.Params(drafter="adapt", gamma=3, temperature=1.0), drafter)
    texts = [
        engine.decode([1], method, prompt_id="p")
        for method in (leviathan, *(with_q(name, drafter, gamma=3, drafts=1) for name in WITH_Q))
    ]
    assert texts[0].output_ids == texts[1].output_ids == texts[2].output_ids
    assert sum(cycle.accepted for cycle in texts[0].cycles) > 5


@pytest.mark.parametrize("name", WITH_Q)
def test_more_drafts_are_accepted_more_often(name):
    """A verifier of eight words that is sure of itself, and a flat q."""
    verifier = TableVerifier(2 * torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    drafter = TableDrafter(torch.zeros(8, 2, 8), torch.arange(8))
    lengths = []
    for drafts in (1, 4):
        method = with_q(name, drafter, drafts=drafts)
        cycles = engine_of(verifier, temperature=1.0, limit=200).decode([1], method, prompt_id="p").cycles
        lengths.append(sum(cycle.accepted for cycle in cycles) / len(cycles))
    assert lengths[1] > lengths[0] + 0.1
