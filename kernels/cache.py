"""Key/value buffer of one model: append a pass, keep the accepted path, roll back.

One tensor holds every layer, so keeping an accepted path is one gather, whatever the depth of the model:

    kv_L2BHCD    L layers, 2 = key and value, B batch, H key/value heads, C capacity in tokens, D head width

A pass of N rows writes behind the committed rows and commits nothing. `keep` then says which of those N rows
stay, in order; the rest are overwritten by the next pass. Cached length = committed tokens, always.
"""

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
        self.kv_L2BHCD: Tensor | None = None

    def update(self, key_BHND: Tensor, value_BHND: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
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

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed rows, under the name transformers asks for."""
        return self.length

    def _grow(self, end: int, B: int, H: int, D: int, like: Tensor) -> None:
        old = self.kv_L2BHCD
        self.capacity = max(self.capacity, end if old is None else max(end, 2 * self.capacity))
        grown = torch.zeros(
            (self.layers, 2, B, H, self.capacity, D), dtype=like.dtype, device=like.device
        )
        if old is not None:
            grown[:, :, :, :, : old.shape[4]] = old
        self.kv_L2BHCD = grown
