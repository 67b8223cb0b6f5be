"""Prompt lookup proposes what a search through the whole text would, and never more than it may."""

import pytest
import torch

from kernels.cache import KVCache
from stages.common.params import load
from stages.evaluate.contract import Sampling, State
from stages.evaluate.methods.prompt_lookup import Params, PromptLookup, build


def params_of(*, gamma=4, longest=3, shortest=1):
    return Params(drafter=None, gamma=gamma, longest=longest, shortest=shortest)


def draft(method: PromptLookup, ids, *, max_depth=99) -> list[int]:
    settings = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    nothing = torch.empty(0, 0)
    tree = method.propose(State(ids, max_depth, 0, settings, KVCache(layers=1, capacity=1).lend, lambda: nothing)).tree
    assert tree.parents == list(range(-1, len(tree.parents) - 1)), "a chain"
    return tree.tokens_N.tolist()


def by_search(ids, p: Params, *, max_depth=99) -> list[int]:
    """Longest run first, and of its occurrences before the end the latest."""
    for count in range(min(p.longest, len(ids)), p.shortest - 1, -1):
        for begin in range(len(ids) - count - 1, -1, -1):
            if ids[begin : begin + count] == ids[-count:]:
                place = begin + count
                return ids[place : place + min(p.gamma, max_depth)]
    return []


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2]),
        ([1, 2, 3, 2, 4, 1, 2], [3, 2, 4, 1]),  # two tokens beat the later match of one
        ([5, 6, 5, 7, 5], [7, 5]),  # the latest occurrence
        ([4, 4, 4], [4]),  # the text's end is no occurrence of itself
        ([1, 2, 3], []),
        ([7], []),
    ],
)
def test_by_hand(ids, wanted):
    method = build(params_of(), None)
    method.start(ids[:1], torch.empty(0, 0))
    assert draft(method, ids) == wanted


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("longest", "shortest"), [(1, 1), (3, 1), (3, 2), (5, 3)])
def test_as_a_search_finds_it_while_the_text_grows(seed, longest, shortest):
    g = torch.Generator().manual_seed(seed)
    p = params_of(gamma=1 + seed, longest=longest, shortest=shortest)
    method, found = build(p, None), 0
    for _ in range(2):  # the second text must find nothing of the first
        ids = torch.randint(0, 4, (60,), generator=g).tolist()
        length = 1 + seed
        method.start(ids[:length], torch.empty(0, 0))
        while length <= len(ids):
            limit = int(torch.randint(0, 6, (), generator=g))
            assert draft(method, ids[:length], max_depth=limit) == by_search(ids[:length], p, max_depth=limit)
            found += bool(by_search(ids[:length], p))
            length += 1 + int(torch.randint(0, 4, (), generator=g))
    assert found > 5


def test_lengths_the_wrong_way_round_are_refused(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("lookup: {drafter: null, gamma: 4, longest: 2, shortest: 3}\n")
    with pytest.raises(ValueError, match=r"lookup: shortest 3 is above longest 2"):
        load(Params, "lookup", path=path)
