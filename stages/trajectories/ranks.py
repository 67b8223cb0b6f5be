"""The processes that share one run: one alone, or those that torchrun or srun started.

    with together() as ranks:
        ranks.wait()

They agree over gloo about when to go on, and about nothing else: work lies in files that all of them see.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

PATIENCE = timedelta(days=14)  # a process that died is noticed by torchrun; a slow one is waited for


class Ranks(NamedTuple):
    rank: int
    world: int
    local: int  # number among the processes of this machine

    def wait(self) -> None:
        """Until every process has come this far."""
        if self.world > 1:
            dist.barrier()

    def device(self, name: str) -> str:
        """The torch device of this process. ValueError if its machine has none for it."""
        if self.world == 1 or name != "cuda":
            return name
        if self.local >= torch.cuda.device_count():
            raise ValueError(
                f"process {self.local} of this machine has no GPU of its own: there are {torch.cuda.device_count()}; "
                "lower trajectories.processes (or torchrun's --nproc-per-node)"
            )
        torch.cuda.set_device(self.local)
        return f"cuda:{self.local}"


@contextmanager
def together() -> Iterator[Ranks]:
    """This process's place among those of the run."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks(0, 1, 0)
        return
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo", timeout=PATIENCE)
    yield Ranks(dist.get_rank(), world, int(os.environ.get("LOCAL_RANK", "0")))
    if mine:  # not after an error: the others would be waited for
        dist.destroy_process_group()
