"""What a pass wrote is read back; what was dropped is never seen again."""

import pytest
import torch

from kernels.cache import FixedCache, KVCache, RaggedKVCache

LAYERS, HEADS, WIDTH = 3, 2, 4


def passing(cache, count, *, batch=1, seed=0):
    """Write `count` rows to every layer; the rows written and what each layer gave back."""
    generator = torch.Generator().manual_seed(seed)
    written = torch.randn(LAYERS, 2, batch, HEADS, count, WIDTH, generator=generator)
    seen = [torch.stack(cache.update(written[i, 0], written[i, 1], i, "more", sliding=None)) for i in range(LAYERS)]
    return written, torch.stack(seen)


@pytest.mark.parametrize("keep", [[], [0], [0, 1, 2, 3], [0, 2], [3, 1], [2]])
@pytest.mark.parametrize("capacity", [1, 3, 64])
def test_kept_rows_follow_the_committed_ones_in_the_order_given(keep, capacity):
    cache = KVCache(layers=LAYERS, capacity=capacity)
    first, _ = passing(cache, 3, seed=1)
    cache.keep([0, 1, 2])
    second, seen = passing(cache, 4, seed=2)
    assert torch.equal(seen, torch.cat([first, second], 4))
    assert cache.length == cache.get_seq_length() == 3, "a pass in flight is not committed"
    cache.keep(keep)
    assert cache.length == 3 + len(keep)
    third, seen = passing(cache, 2, seed=3)
    assert torch.equal(seen, torch.cat([first, second[:, :, :, :, keep], third], 4))


@pytest.mark.parametrize("length", range(6))
def test_roll_back_leaves_exactly_that_many_rows(length):
    cache = KVCache(layers=LAYERS, capacity=8)
    first, _ = passing(cache, 5, seed=1)
    cache.keep(list(range(5)))
    cache.roll_back(length)
    second, seen = passing(cache, 1, seed=2)
    assert torch.equal(seen, torch.cat([first[:, :, :, :, :length], second], 4))
    assert cache.length == length


def test_roll_back_drops_the_pass_in_flight():
    cache = KVCache(layers=LAYERS, capacity=8)
    passing(cache, 2)
    cache.roll_back(0)
    with pytest.raises(AssertionError):
        cache.keep([0])


@pytest.mark.parametrize("length", [-1, 3])
def test_roll_back_beyond_the_cache_is_refused(length):
    cache = KVCache(layers=LAYERS, capacity=8)
    passing(cache, 2)
    cache.keep([0, 1])
    with pytest.raises(ValueError, match="holds 2 rows"):
        cache.roll_back(length)


@pytest.mark.parametrize("row", [-1, 2])
def test_only_rows_of_the_last_pass_can_be_kept(row):
    cache = KVCache(layers=LAYERS, capacity=8)
    passing(cache, 2)
    with pytest.raises(AssertionError):
        cache.keep([row])


def test_growth_keeps_what_is_committed():
    cache = KVCache(layers=LAYERS, capacity=1)
    rows = []
    for step in range(20):
        written, seen = passing(cache, 1, seed=step)
        rows.append(written)
        assert torch.equal(seen, torch.cat(rows, 4))
        cache.keep([0])
    assert cache.length == 20


def test_every_slot_has_a_length_of_its_own():
    cache = RaggedKVCache(layers=LAYERS, slots=3, capacity=10)
    texts = [[], [], []]
    for step, counts in enumerate([[3, 1, 2], [0, 2, 1], [1, 1, 1]]):
        new = max(counts)
        positions, sees = cache.open(0, 3, new=new, device="cpu")
        written, seen = passing(cache, new, batch=3, seed=step)
        for slot, (count, text) in enumerate(zip(counts, texts, strict=True)):
            assert positions[slot].tolist() == list(range(len(text), len(text) + new))
            for row in range(new):
                visible = [*text, *written[:, :, slot, :, : row + 1].unbind(3)]
                assert torch.equal(seen[:, :, slot, :, sees[slot, row]], torch.stack(visible, 3))
            text += written[:, :, slot, :, :count].unbind(3)
        cache.commit(counts)
        assert cache.lengths == [len(text) for text in texts]


def test_a_pass_over_some_slots_leaves_the_others_alone():
    cache = RaggedKVCache(layers=LAYERS, slots=3, capacity=4)
    cache.open(0, 3, new=2, device="cpu")
    before, _ = passing(cache, 2, batch=3, seed=1)
    cache.commit([2, 1, 2])
    cache.open(1, 2, new=3, device="cpu")
    middle, seen = passing(cache, 3, seed=2)
    assert torch.equal(seen, torch.cat([before[:, :, 1:2, :, :1], middle], 4))
    cache.commit([3])
    assert cache.lengths == [2, 4, 2]
    _, sees = cache.open(0, 3, new=0, device="cpu")
    assert sees.shape == (3, 0, 4)
    assert cache.kv_L2BHCD is not None
    assert torch.equal(cache.kv_L2BHCD[:, :, 2, :, :2], before[:, :, 2])


def test_copies_and_leftovers():
    cache = RaggedKVCache(layers=LAYERS, slots=2, capacity=5)
    cache.open(0, 2, new=4, device="cpu")
    written, _ = passing(cache, 4, batch=2, seed=1)
    cache.commit([2, 4])
    cache.copy(0, 1)  # slot 1 held more: its leftovers must be out of sight
    assert cache.lengths == [2, 2]
    _, sees = cache.open(1, 2, new=1, device="cpu")
    new, seen = passing(cache, 1, seed=2)
    assert torch.equal(seen[:, :, 0][:, :, :, sees[0, 0]], torch.cat([written[:, :, 0, :, :2], new[:, :, 0]], 3))


def test_unwritten_rows_are_finite():
    """A hidden row has weight 0, and 0 times NaN is NaN."""
    cache = RaggedKVCache(layers=LAYERS, slots=2, capacity=6)
    cache.open(0, 1, new=5, device="cpu")
    passing(cache, 5)
    cache.commit([5])
    cache.open(0, 2, new=1, device="cpu")
    _, seen = passing(cache, 1, batch=2)
    assert torch.isfinite(seen).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="a layer, a slot and a row"):
        RaggedKVCache(layers=1, slots=0, capacity=4)
    cache = RaggedKVCache(layers=LAYERS, slots=2, capacity=4)
    with pytest.raises(ValueError, match="room for 4"):
        cache.open(0, 2, new=5, device="cpu")
    cache.open(0, 2, new=2, device="cpu")
    with pytest.raises(AssertionError, match="not the one"):
        passing(cache, 3, batch=2)
    with pytest.raises(AssertionError):
        cache.commit([3, 1])
    cache.commit([2, 1])
    with pytest.raises(ValueError, match="slot 1 holds 1"):
        cache.roll_back(1, 2)


@pytest.mark.parametrize("capacity", [4, 64])
def test_a_reader_sees_the_committed_rows_of_its_layers_and_leaves_no_trace(capacity):
    """Capacity 4: the reader's rows make the owner's buffer grow."""
    cache = KVCache(layers=LAYERS, capacity=capacity)
    first, _ = passing(cache, 3, seed=1)
    cache.keep([0, 1, 2])
    lent = cache.lend([2, 0])
    own = torch.randn(2, 2, 1, HEADS, 5, WIDTH)
    seen = torch.stack([torch.stack(lent.update(own[i, 0], own[i, 1], i)) for i in range(2)])
    assert torch.equal(seen, torch.cat([first[[2, 0]], own], 4))
    assert lent.length == lent.get_seq_length() == cache.length == 3
    with pytest.raises(AssertionError):
        cache.keep([0])
    second, seen = passing(cache, 2, seed=2)
    assert torch.equal(seen, torch.cat([first, second], 4))
    cache.keep([1])
    assert lent.length == 4, "the view follows its owner"


def test_a_fixed_cache_gives_every_pass_the_same_rows_and_their_gradient():
    kv = torch.randn(LAYERS, 2, 2, HEADS, 4, WIDTH, requires_grad=True)
    cache = FixedCache(kv)
    assert cache.get_seq_length() == 4
    for seed in (1, 2):
        written, seen = passing(cache, 3, batch=2, seed=seed)
        assert torch.equal(seen, torch.cat([kv, written], 4))
    seen.sum().backward()
    assert kv.grad is not None
    assert torch.equal(kv.grad, torch.ones_like(kv))


def test_rows_of_a_slot_are_copied_out():
    cache = RaggedKVCache(layers=LAYERS, slots=3, capacity=6)
    cache.open(0, 3, new=4, device="cpu")
    written, _ = passing(cache, 4, batch=3)
    cache.commit([2, 4, 3])
    found = cache.rows_of(2, [2, 1])
    assert torch.equal(found, written[[2, 1], :, 2, :, :3])
    cache.open(2, 3, new=1, device="cpu")
    passing(cache, 1)
    cache.roll_back(2, 0)
    assert torch.equal(found, written[[2, 1], :, 2, :, :3]), "later passes leave the copy alone"
