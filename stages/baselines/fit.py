"""The training loop of the baselines: the schedule, optimizers and resume of adapt, over whole texts.

    loss(texts, number) -> gradients over `accumulation` micro-batches -> clip -> the optimizers' step

Everything random is keyed by (seed, step), so the saved state is weights, optimizer, curve and the seconds spent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from stages.common import optimizers, store, windows
from stages.common.drafters import Drafter
from stages.common.optimizers import Rates
from stages.common.params import Count, NonNegative
from stages.common.validation import Row, Validation
from stages.common.windows import Example

Loss = Callable[[Sequence[Example], int], Tensor]  # texts of a micro-batch, its number from 1 on
Measure = Callable[[], Row]  # validation columns of the curve


class Trainee(Protocol):
    """What the loop asks of a model: the weights that move, and which of them is the head (its rate is `lr_other`)."""

    lm_head: nn.Module

    def trained(self) -> list[nn.Parameter]: ...

    def train(self, mode: bool = True) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Fitting(Rates):
    """`<profile>.baselines.<name>.training`."""

    sequences: Count  # texts of one micro-batch
    accumulation: Count  # micro-batches of one optimizer step
    max_tokens: Count  # prompt and output together; longer texts are cut
    clip: NonNegative  # largest gradient norm
    evaluate_every: Count
    checkpoint_every: Count


def read_texts(profile: str, f: Fitting, v: Validation, *, seed: int) -> tuple[list[Example], list[Example]]:
    """(training, held out): the very split of adapt and distill."""
    rows = store.read_parquet(store.trajectories_file(profile), store.TRAJECTORIES)
    return windows.split_by_prompt(windows.examples(rows, max_tokens=f.max_tokens), share=v.share, seed=seed)


def fit(
    model: Trainee,
    texts: Sequence[Example],
    loss: Loss,
    measure: Measure,
    f: Fitting,
    *,
    seed: int,
    scratch: Path,
    title: str,
) -> list[Row]:
    """Train in place; the curve's rows. Continues from `scratch/state.pt` where that is there.

    The column `seconds` counts training alone, validation apart, over all the runs it took.
    """
    optims = optimizers.optimizers(cast(Drafter, model), f)  # asks for no more than a Trainee has
    rows: list[Row] = []
    done, seconds = _resume(scratch, model, optims, rows)
    batches = windows.order(texts, sequences=f.sequences * f.accumulation, seed=seed)
    for _ in range(done):
        next(batches)
    if done == 0:
        rows.append({"step": 0, "split": "valid", **_measured(model, measure)})
    bar = tqdm(range(done, f.steps), initial=done, total=f.steps, desc=title, unit="step", mininterval=5)
    for step in bar:
        start = perf_counter()
        factor = optimizers.rate(step, f)
        optimizers.set_rates(optims, factor)
        chosen = [texts[i] for i in next(batches)]
        value, norm = _step(model, chosen, loss, f, optims, step)
        seconds += perf_counter() - start
        row: Row = {"step": step + 1, "split": "train", "lr": factor * f.lr, "loss": value, "grad_norm": norm}
        rows.append(row | {"tokens": sum(len(text.ids) for text in chosen), "seconds": seconds})
        bar.set_postfix(loss=f"{value:.3f}")
        last = step + 1 == f.steps
        if last or (step + 1) % f.evaluate_every == 0:
            rows.append({"step": step + 1, "split": "valid", **_measured(model, measure)})
        if not last and (step + 1) % f.checkpoint_every == 0:
            _save(scratch, step + 1, seconds, model, optims, rows)
    return rows


def _measured(model: Trainee, measure: Measure) -> Row:
    model.train(False)
    with torch.no_grad():
        return measure()


def _step(
    model: Trainee,
    chosen: Sequence[Example],
    loss: Loss,
    f: Fitting,
    optims: Sequence[torch.optim.Optimizer],
    step: int,
) -> tuple[float, float]:
    """(loss, gradient norm before clipping) of one optimizer step."""
    model.train()
    for optim in optims:
        optim.zero_grad(set_to_none=True)
    total = 0.0
    for micro in range(f.accumulation):
        part = chosen[micro * f.sequences : (micro + 1) * f.sequences]
        value = loss(part, 1 + step * f.accumulation + micro) / f.accumulation
        value.backward()
        total += float(value.detach())
    norm = float(nn.utils.clip_grad_norm_(model.trained(), f.clip, error_if_nonfinite=True))
    for optim in optims:
        optim.step()
    return total, norm


def _save(
    scratch: Path,
    step: int,
    seconds: float,
    model: Trainee,
    optims: Sequence[torch.optim.Optimizer],
    rows: Sequence[Row],
) -> None:
    state = {
        "step": step,
        "seconds": seconds,
        "weights": [p.detach() for p in model.trained()],
        "optims": [optim.state_dict() for optim in optims],
        "rows": list(rows),
    }
    partial = scratch / ".state.pt.partial"
    torch.save(state, partial)
    partial.replace(scratch / "state.pt")


def _resume(
    scratch: Path, model: Trainee, optims: Sequence[torch.optim.Optimizer], rows: list[Row]
) -> tuple[int, float]:
    """(steps already done, seconds they took); weights, optimizers and curve as they were then."""
    path = scratch / "state.pt"
    if not path.exists():
        return 0, 0.0
    state: dict[str, Any] = torch.load(path, weights_only=True)
    with torch.no_grad():
        for p, saved in zip(model.trained(), state["weights"], strict=True):
            p.copy_(saved)
    for optim, saved in zip(optims, state["optims"], strict=True):
        optim.load_state_dict(saved)
    rows[:] = state["rows"]
    return state["step"], state["seconds"]
