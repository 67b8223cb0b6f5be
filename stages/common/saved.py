"""The state that a killed training goes on from: weights, optimizers and curve after a number of steps.

    one process      state.pt, as torch saves it
    `parallel`       state_<steps>/, in torch's distributed format: every process writes what it holds, and any number
                     of processes reads it, whatever the strategy; curve.json beside it

Whatever is drawn is a function of (seed, step), so nothing else is to be kept.
"""

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_spread
from torch.distributed.checkpoint.state_dict_saver import save as save_spread

from stages.common import parallel, store
from stages.common.drafters import Drafter
from stages.common.validation import Row

Optims = Sequence[torch.optim.Optimizer]


def save(scratch: Path, step: int, drafter: Drafter, optims: Optims, rows: Sequence[Row], *, spread: bool) -> None:
    """Whole or not at all. spread: in the format of many processes."""
    if spread:
        _save_spread(scratch, step, drafter, optims, rows)
        return
    state = {
        "step": step,
        "weights": [p.detach() for p in drafter.trained()],
        "optims": [optim.state_dict() for optim in optims],
        "rows": list(rows),
    }
    partial = scratch / ".state.pt.partial"
    torch.save(state, partial)
    partial.replace(scratch / "state.pt")


def resume(scratch: Path, drafter: Drafter, optims: Optims, rows: list[Row], *, spread: bool) -> int:
    """Steps already done; weights, optimizers and curve as they were then."""
    if spread:
        return _resume_spread(scratch, drafter, optims, rows)
    path = scratch / "state.pt"
    if not path.exists():
        return 0
    state: dict[str, Any] = torch.load(path, weights_only=True)
    with torch.no_grad():
        for p, saved in zip(drafter.trained(), state["weights"], strict=True):
            p.copy_(saved)
    for optim, saved in zip(optims, state["optims"], strict=True):
        optim.load_state_dict(saved)
    rows[:] = state["rows"]
    return state["step"]


def steps_done(scratch: Path) -> int:
    """Steps of the saved state; its tensors are not read."""
    if (folder := _latest(scratch)) is not None:
        return _steps(folder)
    path = scratch / "state.pt"
    return torch.load(path, weights_only=True, mmap=True)["step"] if path.exists() else 0


def _steps(folder: Path) -> int:
    return int(folder.name.removeprefix("state_"))


def _latest(scratch: Path) -> Path | None:
    return max(scratch.glob("state_*"), key=_steps, default=None)


def _save_spread(scratch: Path, step: int, drafter: Drafter, optims: Optims, rows: Sequence[Row]) -> None:
    partial = scratch / ".state.partial"
    if parallel.first():
        shutil.rmtree(partial, ignore_errors=True)
    parallel.wait()
    tensors = _weights(drafter) | {
        f"{_prefix(number, name)}{key}": value
        for number, optim in enumerate(optims)
        for name, p in _owned(drafter, optim).items()
        for key, value in optim.state[p].items()
    }
    with _one_is_enough():
        save_spread(tensors, checkpoint_id=partial, no_dist=parallel.size() == 1)
    if parallel.first():
        store.write_json(partial / "curve.json", {"rows": list(rows)})
        before = list(scratch.glob("state_*"))
        partial.replace(scratch / f"state_{step}")
        for folder in before:
            shutil.rmtree(folder)
    parallel.wait()


def _resume_spread(scratch: Path, drafter: Drafter, optims: Optims, rows: list[Row]) -> int:
    folder = _latest(scratch)
    if folder is None:
        return 0
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = _weights(drafter)
    for number, optim in enumerate(optims):
        for name, p in _owned(drafter, optim).items():
            prefix = _prefix(number, name)
            for entry in (entry for entry in known if entry.startswith(prefix)):
                value = _like(p, known[entry])
                optim.state[p][entry.removeprefix(prefix)] = tensors[entry] = value
    with _one_is_enough():
        load_spread(tensors, checkpoint_id=folder, no_dist=parallel.size() == 1)
    rows[:] = store.read_json(folder / "curve.json")["rows"]
    parallel.wait()
    return _steps(folder)


@contextmanager
def _one_is_enough() -> Iterator[None]:
    """torch warns where a single process uses the format of many."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _weights(drafter: Drafter) -> dict[str, Any]:
    """Every trained weight by name; what is loaded into it is loaded into the drafter."""
    chosen = {id(p) for p in drafter.trained()}
    return {f"weights/{name}": p.detach() for name, p in drafter.named_parameters() if id(p) in chosen}


def _owned(drafter: Drafter, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's parameters by name."""
    chosen = {id(p) for group in optim.param_groups for p in group["params"]}
    return {name: p for name, p in drafter.named_parameters() if id(p) in chosen}


def _prefix(number: int, name: str) -> str:
    return f"optims/{number}/{name}/"


def _like(p: Tensor, known: Any) -> Tensor:
    """Where a saved tensor of an optimizer goes: spread as its parameter is, or a number of its own (steps)."""
    if known.size == p.shape:
        return torch.zeros_like(p.detach(), dtype=known.properties.dtype)
    return torch.zeros(known.size, dtype=known.properties.dtype)
