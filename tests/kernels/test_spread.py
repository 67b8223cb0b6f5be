"""Buffers on several devices hold what one buffer would."""

import pytest
import torch

from kernels.cache import KVCache
from kernels.spread import Mirror, SplitKVCache

CPU, OTHER = torch.device("cpu"), torch.device("cpu", 1)  # two names of one place: nothing here is elsewhere
PLACES = [CPU, OTHER, OTHER, CPU, OTHER]


def write(cache, rows_LBHND):
    """A pass of every layer; what each layer may look at."""
    return [cache.update(layer, layer + 100, index) for index, layer in enumerate(rows_LBHND)]


def walk(caches):
    """Passes, accepted paths and roll-backs; yields after each step."""
    g = torch.Generator().manual_seed(0)
    for rows, kept, back in [
        (5, [0, 1, 2, 3, 4], None),
        (4, [0, 2, 3], None),
        (3, [], 6),
        (6, [0, 5], None),
        (2, [1], 3),
    ]:
        made = torch.randn(len(PLACES), 1, 2, rows, 4, generator=g)
        seen = [write(cache, made) for cache in caches]
        for one, other in zip(*seen, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
        for cache in caches:
            cache.keep(kept)
            if back is not None:
                cache.roll_back(back)
        yield


def test_a_split_cache_is_a_cache():
    whole, split = KVCache(layers=5, capacity=2), SplitKVCache(PLACES, capacity=2)
    assert [part.layers for part in split.parts] == [2, 3]
    for _ in walk([whole, split]):
        assert split.length == whole.length == split.get_seq_length()
        assert [part.length for part in split.parts] == [whole.length] * 2
        for layers in ([0, 1, 2, 3, 4], [3, 1], [4]):
            assert torch.equal(split.rows(layers, 1), whole.rows(layers, 1))
    with pytest.raises(ValueError, match="cannot roll back to 99"):
        split.roll_back(99)


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("split", [False, True])
def test_a_mirror_holds_what_is_committed(every, split):
    """However seldom it catches up, and although rows behind a roll-back are other rows."""
    whole = KVCache(layers=5, capacity=2)
    owner = SplitKVCache(PLACES, capacity=2) if split else KVCache(layers=5, capacity=2)
    mirror = Mirror(owner, [4, 1], CPU)
    lent = mirror.lend(range(2))
    for step, _ in enumerate(walk([whole, owner]), 1):
        if step % every == 0:
            mirror.catch_up()
            assert mirror.length == lent.length == owner.length
            assert torch.equal(mirror.rows([0, 1], 0), whole.rows([4, 1], 0))
            lent.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 1)  # a reader's own rows, lost again
    assert mirror.catch_up() == 0, "nothing is moved twice"


def test_a_mirror_moves_new_rows_alone():
    owner = KVCache(layers=3, capacity=8)
    mirror = Mirror(owner, [2], CPU)
    write(owner, torch.zeros(3, 1, 2, 7, 4))
    owner.keep(list(range(7)))
    row = 2 * 1 * 2 * 4 * 4  # key and value of two heads, four float32 each
    assert mirror.catch_up() == 7 * row
    write(owner, torch.zeros(3, 1, 2, 3, 4))
    owner.keep([0, 2])
    assert mirror.catch_up() == 2 * row
    owner.roll_back(4)
    write(owner, torch.ones(3, 1, 2, 1, 4))
    owner.keep([0])
    assert mirror.catch_up() == row
    assert mirror.rows([0], 0)[0, 0, ..., -1, :].eq(1).all()
