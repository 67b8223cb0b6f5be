"""Key/value buffer of one model: append a pass, keep the accepted path, roll back.

One tensor holds every layer, so keeping an accepted path is one gather, whatever the depth of the model:

    kv_L2BHCD    L layers, 2 = key and value, B batch, H key/value heads, C capacity in tokens, D head width

A pass of N rows writes behind the committed rows and commits nothing. `keep` then says which of those N rows
stay, in order; the rest are overwritten by the next pass. Cached length = committed tokens, always.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Grow-on-demand buffer that transformers' attention layers write through `update`.

    `length` rows are committed. Rows behind it belong to the pass in flight (`in_flight` of them).
    """

    def __init__(self, *, layers: int, capacity: int) -> None:
        if layers < 1 or capacity < 1:
            raise ValueError(f"a cache needs at least one layer and one row, got {layers} and {capacity}")
        self.layers = layers
        self.capacity = capacity
        self.length = 0
        self.in_flight = 0
        self.unread = 0  # committed rows from here on are not in a mirror yet (kernels/spread.py)
        self.kv_L2BHCD: Tensor | None = None

    def update(
        self, key_BHND: Tensor, value_BHND: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write the pass's rows of one layer; return all rows it may look at, committed and its own.

        Called by the attention layers of transformers, which pass more than is needed here.
        """
        B, H, N, D = key_BHND.shape
        end = self.length + N
        if self.kv_L2BHCD is None or end > self.capacity:
            self._grow(end, B, H, D, key_BHND)
        assert self.kv_L2BHCD is not None
        layer_2BHCD = self.kv_L2BHCD[layer_idx]
        layer_2BHCD[0, :, :, self.length : end] = key_BHND
        layer_2BHCD[1, :, :, self.length : end] = value_BHND
        self.in_flight = N
        return layer_2BHCD[0, :, :, :end], layer_2BHCD[1, :, :, :end]

    def keep(self, rows: list[int]) -> None:
        """Commit these rows of the last pass, in this order (indices within the pass); drop the others."""
        assert all(0 <= row < self.in_flight for row in rows), (rows, self.in_flight)
        if rows != list(range(len(rows))):
            assert self.kv_L2BHCD is not None
            source = torch.tensor(rows, device=self.kv_L2BHCD.device) + self.length
            kept = self.kv_L2BHCD.index_select(4, source)
            self.kv_L2BHCD[:, :, :, :, self.length : self.length + len(rows)] = kept
        self.length += len(rows)
        self.in_flight = 0

    def roll_back(self, length: int) -> None:
        """Forget every committed row from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length}: the cache holds {self.length} rows")
        self.length = length
        self.in_flight = 0
        self.unread = min(self.unread, length)

    def rows(self, layers: Sequence[int], start: int) -> Tensor:
        """[L, 2, B, H, T - start, D]: a copy of the committed rows of these layers from `start` on."""
        assert self.kv_L2BHCD is not None, "nothing was cached yet"
        return self.kv_L2BHCD[list(layers), :, :, :, start : self.length]

    def lend(self, layers: Sequence[int]) -> "LentCache":
        """These layers, for a reader that drafts behind the committed rows."""
        return LentCache(self, layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed rows, under the name transformers asks for."""
        return self.length

    def _grow(self, end: int, B: int, H: int, D: int, like: Tensor) -> None:
        old = self.kv_L2BHCD
        self.capacity = max(self.capacity, end if old is None else max(end, 2 * self.capacity))
        grown = torch.zeros((self.layers, 2, B, H, self.capacity, D), dtype=like.dtype, device=like.device)
        if old is not None:
            grown[:, :, :, :, : old.shape[4]] = old
        self.kv_L2BHCD = grown


class LentCache:
    """A reader's view of some layers of a `KVCache`: the committed rows, and room for its own rows behind them.

    The reader commits nothing: its rows lie where the owner's next passes will write, and no row is looked at before
    it is written. Layer i of the reader is layer `layers[i]` of the owner, whose keys it reads as they are, rotated by
    their places in the text.
    """

    def __init__(self, owner: KVCache, layers: Sequence[int]) -> None:
        self.owner = owner
        self.layers = layers

    @property
    def length(self) -> int:
        return self.owner.length

    def update(
        self, key_BHND: Tensor, value_BHND: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write the pass's rows of one layer behind the owner's; return all rows it may look at."""
        seen = self.owner.update(key_BHND, value_BHND, self.layers[layer_idx])
        self.owner.in_flight = 0  # these rows are the reader's: the owner must not keep them
        return seen

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The owner's committed rows, under the name transformers asks for."""
        return self.owner.length


class FixedCache:
    """Rows cached once and for all: a pass sees them and its own rows, and leaves nothing behind. Differentiable.

    kv_L2BHTD: L layers, key and value, T cached rows.
    """

    def __init__(self, kv_L2BHTD: Tensor) -> None:
        self.kv_L2BHTD = kv_L2BHTD

    def update(
        self, key_BHND: Tensor, value_BHND: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """The cached rows of one layer and, behind them, the rows of this pass."""
        keys_BHTD, values_BHTD = self.kv_L2BHTD[layer_idx]
        return torch.cat([keys_BHTD, key_BHND], 2), torch.cat([values_BHTD, value_BHND], 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Cached rows, under the name transformers asks for."""
        return self.kv_L2BHTD.shape[4]


class RaggedKVCache:
    """The same buffer for many texts at once, each with a length of its own; a text lives in a slot.

    `open` names the slots of the next pass and says what its rows see; `commit` says how many rows of each
    slot stay. The columns a pass looks at end at its longest slot, not at the capacity.
    """

    def __init__(self, *, layers: int, slots: int, capacity: int) -> None:
        if layers < 1 or slots < 1 or capacity < 1:
            raise ValueError(f"a cache needs a layer, a slot and a row at least, got {layers}, {slots}, {capacity}")
        self.layers, self.slots, self.capacity = layers, slots, capacity
        self.lengths = [0] * slots
        self.kv_L2BHCD: Tensor | None = None
        self._first, self._last, self._seen, self._new = 0, 0, 0, 0
        self._layers: Sequence[int] | None = None

    def open(self, first: int, last: int, *, new: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """A pass of `new` rows in each of the slots first .. last - 1.

        Returns positions, long [B, new], and what each row sees, bool [B, new, T]: the committed rows of its
        slot, itself, and the rows of this pass before it.
        """
        lengths = self.lengths[first:last]
        self._first, self._last, self._new, self._seen = first, last, new, max(lengths) + new
        if self._seen > self.capacity:
            raise ValueError(f"a pass would reach row {self._seen}: the cache has room for {self.capacity}")
        self._place_BN = torch.tensor(lengths, device=device)[:, None] + torch.arange(new, device=device)
        self._slot_B1 = torch.arange(first, last, device=device)[:, None]
        self._layers = None
        return self._place_BN, torch.arange(self._seen, device=device) <= self._place_BN[:, :, None]

    def update(
        self, key_BHND: Tensor, value_BHND: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write one layer of the opened pass; return the rows of its slots up to the longest of them.

        Rows behind a slot's own length are leftovers, finite numbers that `open` hides.
        """
        B, H, N, D = key_BHND.shape
        assert (self._last - self._first, self._new) == (B, N), "the pass is not the one that was opened"
        if self.kv_L2BHCD is None:
            shape = (self.layers, 2, self.slots, H, self.capacity, D)
            self.kv_L2BHCD = torch.zeros(shape, dtype=key_BHND.dtype, device=key_BHND.device)
        layer_2BHCD = self.kv_L2BHCD[layer_idx if self._layers is None else self._layers[layer_idx]]
        layer_2BHCD[0][self._slot_B1, :, self._place_BN] = key_BHND.transpose(1, 2)
        layer_2BHCD[1][self._slot_B1, :, self._place_BN] = value_BHND.transpose(1, 2)
        seen_2BHTD = layer_2BHCD[:, self._first : self._last, :, : self._seen]
        return seen_2BHTD[0], seen_2BHTD[1]

    def open_trees(
        self, first: int, last: int, depth_BN: Tensor, sees_BNN: Tensor, layers: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """A pass of N rows in each of these slots, at places of their own: row n stands `depth_BN[:, n]` behind the
        slot's committed rows and sees them, and of the pass what sees_BNN says. Positions, and what each row sees.

        layers: of this cache, that the passing model's layers write to and read (None: its own). A reader's rows are
        not committed; the next pass writes over them.
        """
        B, N = depth_BN.shape
        assert last - first == B, (B, first, last)
        device = depth_BN.device
        length_B1 = torch.tensor(self.lengths[first:last], device=device)[:, None]
        self._first, self._last, self._new = first, last, N
        self._seen = max(self.lengths[first:last]) + N
        if self._seen > self.capacity:
            raise ValueError(f"a pass would reach row {self._seen}: the cache has room for {self.capacity}")
        self._place_BN = length_B1 + torch.arange(N, device=device)
        self._slot_B1 = torch.arange(first, last, device=device)[:, None]
        self._layers = layers
        column_T = torch.arange(self._seen, device=device)
        own_BT = (column_T - length_B1).clamp(0, N - 1)  # column of the pass, where it is one
        behind_BT = (column_T >= length_B1) & (column_T < length_B1 + N)
        tree_BNT = sees_BNN.gather(2, own_BT[:, None].expand(B, N, -1)) & behind_BT[:, None]
        return length_B1 + depth_BN, tree_BNT | (column_T < length_B1)[:, None]

    def keep(self, rows: list[list[int]]) -> None:
        """Commit these rows of the pass in its slots, in this order (indices within the pass); drop the others."""
        assert len(rows) == self._last - self._first, (len(rows), self._first, self._last)
        assert self.kv_L2BHCD is not None
        assert self._layers is None, "a reader commits nothing"
        for slot, kept in enumerate(rows, start=self._first):
            length = self.lengths[slot]
            assert all(0 <= row < self._new for row in kept), (kept, self._new)
            if kept != list(range(len(kept))):
                source = torch.tensor(kept, device=self.kv_L2BHCD.device) + length
                taken = self.kv_L2BHCD[:, :, slot].index_select(3, source)
                self.kv_L2BHCD[:, :, slot, :, length : length + len(kept)] = taken
            self.lengths[slot] += len(kept)
        self._new = 0

    def commit(self, counts: list[int]) -> None:
        """Keep the first counts[i] rows of the pass in its i-th slot."""
        assert len(counts) == self._last - self._first, (counts, self._first, self._last)
        assert all(0 <= count <= self._new for count in counts), (counts, self._new)
        for slot, count in enumerate(counts, start=self._first):
            self.lengths[slot] += count
        self._new = 0

    def rows_of(self, slot: int, layers: Sequence[int]) -> Tensor:
        """[L, 2, H, T, D]: a copy of the committed rows of one slot in these layers."""
        assert self.kv_L2BHCD is not None, "nothing was cached yet"
        return self.kv_L2BHCD[list(layers), :, slot, :, : self.lengths[slot]]

    def copy(self, source: int, target: int) -> None:
        """Give slot `target` the text of slot `source`; what it held is lost."""
        self.lengths[target] = length = self.lengths[source]
        if self.kv_L2BHCD is not None and source != target:
            self.kv_L2BHCD[:, :, target, :, :length] = self.kv_L2BHCD[:, :, source, :, :length]

    def roll_back(self, slot: int, length: int) -> None:
        """Forget the rows of a slot from `length` on."""
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"cannot roll back to {length}: slot {slot} holds {self.lengths[slot]} rows")
        self.lengths[slot] = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed rows of the longest slot of the pass, under the name transformers asks for."""
        return self._seen - self._new
