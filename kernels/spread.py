"""Key/value buffers of models on several devices: one whose layers are spread, and a copy for a reader elsewhere.

Letters: L layers, 2 = key and value, B batch, H key/value heads, T committed rows, D head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cache import KVCache


class SplitKVCache(KVCache):
    """A `KVCache` with a buffer for each device: a layer's rows lie where the layer computes.

    devices: of each layer. A buffer is made where the first rows of its layers come from.
    """

    def __init__(self, devices: Sequence[torch.device], *, capacity: int) -> None:
        super().__init__(layers=len(devices), capacity=capacity)
        places = list(dict.fromkeys(devices))
        self._place = [(places.index(device), devices[:layer].count(device)) for layer, device in enumerate(devices)]
        self.parts = [KVCache(layers=devices.count(device), capacity=capacity) for device in places]

    def update(
        self, key_BHND: Tensor, value_BHND: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        part, layer = self._place[layer_idx]
        self.in_flight = key_BHND.shape[2]
        return self.parts[part].update(key_BHND, value_BHND, layer)

    def keep(self, rows: list[int]) -> None:
        assert all(0 <= row < self.in_flight for row in rows), (rows, self.in_flight)
        for part in self.parts:
            part.in_flight = self.in_flight
            part.keep(rows)
        self.length += len(rows)
        self.in_flight = 0

    def roll_back(self, length: int) -> None:
        super().roll_back(length)
        for part in self.parts:
            part.roll_back(length)

    def rows(self, layers: Sequence[int], start: int) -> Tensor:
        """As `KVCache.rows`, on the device of the first of these layers."""
        found = [self.parts[part].rows([layer], start) for part, layer in (self._place[index] for index in layers)]
        return torch.cat([rows.to(found[0].device) for rows in found])


class Mirror(KVCache):
    """The committed rows of some layers of a cache, on another device, for a drafter that lives there and reads them.

    Layer i is layer `sources[i]` of the owner. `catch_up` moves what was committed since it was last called.
    """

    def __init__(self, owner: KVCache, sources: Sequence[int], device: torch.device) -> None:
        super().__init__(layers=len(sources), capacity=owner.capacity)
        self.owner, self.sources, self.device = owner, tuple(sources), device

    def catch_up(self) -> int:
        """Have all the owner's committed rows here; the bytes moved for it."""
        self.roll_back(min(self.length, self.owner.unread))
        start, end, moved = self.length, self.owner.length, 0
        if start < end:
            rows_L2BHTD = move(self.owner.rows(self.sources, start), self.device)
            moved = rows_L2BHTD.nbytes
            for layer, (key_BHTD, value_BHTD) in enumerate(rows_L2BHTD):
                self.update(key_BHTD, value_BHTD, layer)
            self.keep(list(range(end - start)))
        self.owner.unread = end
        return moved


def move(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device. The host does not wait for it, unless it is the one that reads it."""
    return x.to(device, non_blocking=device.type != "cpu")
