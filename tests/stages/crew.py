"""Trainings of a tiny drafter in several processes of this machine, joined over gloo as torchrun would join them.

Processes come from a server that has imported what they need, so that a test does not pay for it once a process.
"""

import multiprocessing
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernels import objectives
from stages.common import lora, parallel
from stages.common.parallel import Parallel
from stages.common.training import Texts, Training, train
from stages.common.validation import Validation
from stages.common.windows import Example
from tests.stages.scripted import prompt_of, tiny_drafter

G, STOP = 4, 4
BASE = {
    "steps": 6,
    "sequences": 3,  # so that two processes have different numbers of texts
    "accumulation": 2,
    "windows": 3,
    "window": G,
    "max_tokens": 64,
    "optimizer": "adamw",
    "lr": 0.01,
    "lr_other": 0.005,
    "weight_decay": 0.01,
    "warmup": 0.1,
    "final_lr": 0.1,
    "clip": 0.5,
    "full_mask_share": 0.5,
    "evaluate_every": STOP,
    "checkpoint_every": 3,
}
V = Validation(share=0.1, windows=3, tree_nodes=6)


def unequal_texts(count=11) -> list[Example]:
    """Of 1 to 40 output tokens with a window: most of a short text's windows reach beyond its end."""
    lengths = [3, 40, 5, 21, 2, 33, 9, 4, 27, 2, 15]
    return [
        Example(id=f"t/{i}", ids=tuple(prompt_of(2 + i % 3 + lengths[i], seed=i)), prompt_length=2 + i % 3)
        for i in range(count)
    ]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training. strategy: "" for one process as ever. stop: end as a killed run does, after STOP steps."""

    folder: Path
    strategy: str = ""
    checkpoint_activations: bool = False
    stop: bool = False
    changed: dict[str, Any] = field(default_factory=dict)


class Stopped(Exception):
    pass


def settings(job: Job) -> Training:
    many: Any = job.strategy and Parallel(
        processes=1, strategy=job.strategy, checkpoint_activations=job.checkpoint_activations
    )
    return Training(**{**BASE, **job.changed}, parallel=many or None)


def work(job: Job) -> dict[str, Any]:
    """{rows, weights, files of the folder that the drafter was written into}, or {} of a stopped one."""
    job.folder.mkdir(parents=True, exist_ok=True)
    t, found, drafter = settings(job), unequal_texts(), tiny_drafter()
    lora.ready(drafter, t.lora, seed=5)
    for p in drafter.trained():
        p.requires_grad_(True)

    def keep(step: int) -> None:
        if job.stop and step == STOP:
            raise Stopped

    try:
        rows = train(
            drafter, Texts(found[:8], found[8:]), objectives.masked_ce, t, V, seed=7, scratch=job.folder, keep=keep
        )
    except Stopped:
        return {}
    with parallel.whole(drafter):
        weights = {name: p.detach().clone() for name, p in drafter.named_parameters()} if parallel.first() else {}
    return {"rows": rows, "weights": weights}


def _member(rank: int, size: int, port: int, jobs: list[Job], out: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with parallel.joined("cpu"):
        found = [work(job) for job in jobs]
    if rank == 0:
        torch.save(found, out)


def together(size: int, jobs: list[Job], out: Path) -> list[dict[str, Any]]:
    """The jobs, one after the other, each by `size` processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    members = [context.Process(target=_member, args=(rank, size, port, jobs, out)) for rank in range(size)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    assert [member.exitcode for member in members] == [0] * size
    return torch.load(out, weights_only=True)
