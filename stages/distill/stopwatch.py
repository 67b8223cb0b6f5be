"""What a training took, for comparisons at equal seconds: validation apart, over all the runs it took.

It listens to the drafter's passes: one in training mode is a micro-batch, one in evaluation mode is validation, for
which the clock stands still. Seconds by step lie beside the state that a resumed run continues from, so those of steps
that were lost with a killed run do not count. Exact up to the laying out of a batch before each validation.
"""

from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from stages.common import parallel, saved, store
from stages.common.validation import Row


class Stopwatch:
    """Seconds up to each finished step of a training whose state is kept in `folder` (stages/common/training.py).

    accumulation: passes of one step. Close it when the training is over.
    """

    def __init__(self, drafter: nn.Module, folder: Path, *, accumulation: int) -> None:
        self.file, self.accumulation = folder / "seconds.json", accumulation
        self.done = saved.steps_done(folder)
        known = store.read_json(self.file) if self.file.exists() else {}
        self.seconds: dict[int, float] = {int(step): s for step, s in known.items() if int(step) <= self.done}
        self._spent = max(self.seconds.values(), default=0.0)
        self._passes, self._started = 0, None
        self._hook = drafter.register_forward_pre_hook(self._listen)

    def _listen(self, drafter: nn.Module, _inputs: Any) -> None:
        now = perf_counter()
        if self._started is not None:
            self._spent += now - self._started
            if self._passes % self.accumulation == 0:
                self.seconds[self.done + self._passes // self.accumulation] = self._spent
                if parallel.first():
                    store.write_json(self.file, self.seconds)
        self._started = now if drafter.training else None
        self._passes += drafter.training

    def timed(self, rows: list[Row]) -> list[Row]:
        """The curve with a column `seconds` in the rows of training steps."""
        return [
            row | {"seconds": self.seconds[step]}
            if row["split"] == "train" and isinstance(step := row["step"], int) and step in self.seconds
            else row
            for row in rows
        ]

    def close(self) -> None:
        """Stop listening."""
        self._hook.remove()
