"""The training loop of adapt and distill: accumulation, clipping, validation, checkpoints, exact resume.

    loss(step) -> gradients over `accumulation` micro-batches -> clip -> the optimizers' step (optimizers.py)

Everything random is keyed by (seed, step), so the saved state is weights, optimizer and curve (saved.py). A section
with `parallel` is trained by many processes as by one (parallel.py), one with `lora` through adapters (lora.py).
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import kernels.cache
import kernels.objectives
import kernels.tree
import kernels.window
from stages.common import (
    contexts,
    drafters,
    entry,
    foreign,
    lora,
    models,
    optimizers,
    parallel,
    saved,
    store,
    translate,
    validation,
    windows,
)
from stages.common.contexts import Contexts
from stages.common.drafters import Drafter, DrafterCard, Prefix, save_drafter
from stages.common.lora import Lora
from stages.common.optimizers import Rates
from stages.common.parallel import Parallel, Team
from stages.common.params import Count, Natural, NonNegative, ParamError, Share
from stages.common.validation import Row, Validation
from stages.common.windows import Batch, Example

CODE = [
    Path(module.__file__ or "")
    for module in (
        *(kernels.cache, kernels.objectives, kernels.tree, kernels.window),
        *(contexts, drafters, foreign, lora, models, optimizers),
        *(parallel, saved, translate, validation, windows),
    )
] + [Path(__file__)]  # what a resumed run must find unchanged

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]  # log_q_WG, valid_WG, weights_WG -> loss
Loss = Callable[[Sequence[Example], Batch], Tensor]  # of the texts of a batch; divided by its number of windows


class Texts(NamedTuple):
    """What is trained on, what is validated on, and what the verifier cached of both if the drafter reads it."""

    training: Sequence[Example]
    held_out: Sequence[Example]
    contexts: Contexts | None = None
    digests: Mapping[str, str] = MappingProxyType({})  # of the files they were read from


@dataclass(frozen=True, kw_only=True)
class Training(Rates):
    """A training section of params.yaml."""

    steps: Natural  # 0 of adapt alone, for a drafter that is taken as it is
    sequences: Count  # texts of one micro-batch
    accumulation: Count  # micro-batches of one optimizer step
    windows: Count  # windows of each text
    window: Count  # G
    max_tokens: Count  # prompt and output together; longer texts are cut
    clip: NonNegative  # largest gradient norm
    full_mask_share: Share
    evaluate_every: Count
    checkpoint_every: Count
    lora: Lora | None = None  # None: every weight is trained
    parallel: Parallel | None = None  # None: one process


def read_texts(
    profile: str,
    t: Training,
    v: Validation,
    *,
    prefix: Prefix,
    layers: Sequence[int],
    seed: int,
    read: Callable[[Sequence[int]], Sequence[int]] | None = None,
) -> Texts:
    """The trajectories as adapt and distill see them, for a drafter cut from these layers, or that reads other rows.

    ParamError where the section asks for several windows of a text and the prefix is bidirectional.
    """
    if prefix == "bidirectional" and t.windows != 1:
        raise ParamError(
            f"params.yaml: training.windows: {t.windows} with adapt.prefix bidirectional: a prefix sees the masks of "
            "its window, so that every window reads its text anew; write windows: 1 and more sequences"
        )
    path, folder = store.trajectories_file(profile), store.contexts_folder(profile)
    found = Contexts(folder, layers) if prefix == "verifier" else None
    digests = {"trajectories": store.sha256_file(path)}
    if found is not None:
        digests["contexts"] = store.sha256_folder(folder)
    usable = windows.examples(store.read_parquet(path, store.TRAJECTORIES), max_tokens=t.max_tokens, read=read)
    return Texts(*windows.split_by_prompt(usable, share=v.share, seed=seed), found, digests)


def train(
    drafter: Drafter,
    texts: Texts,
    objective: Objective,
    t: Training,
    v: Validation,
    *,
    seed: int,
    scratch: Path,
    keep: Callable[[int], None] | None = None,
    title: str = "train",
    dtype: torch.dtype = torch.float32,
) -> list[Row]:
    """Train in place; the curve's rows. Continues from the state in `scratch` where there is one (saved.py).

    keep(step): called after every evaluation, by every process, with the drafter as it stands, for checkpoints that
    stay. dtype: of the passes of a `parallel` training on a GPU.
    """

    def loss(_texts: Sequence[Example], batch: Batch) -> Tensor:
        log_q_WG = windows.log_q(drafter, batch)
        return objective(log_q_WG, batch.layout.valid_BWG.flatten(0, 1), batch.weights_BWG.flatten(0, 1))

    return train_on(drafter, texts, loss, t, v, seed=seed, scratch=scratch, keep=keep, title=title, dtype=dtype)


def train_on(
    drafter: Drafter,
    texts: Texts,
    loss: Loss,
    t: Training,
    v: Validation,
    *,
    seed: int,
    scratch: Path,
    keep: Callable[[int], None] | None,
    title: str,
    dtype: torch.dtype,
) -> list[Row]:
    """`train` with any loss of a batch."""
    if t.sequences < parallel.size():
        raise ParamError(
            f"params.yaml: sequences: {parallel.size()} processes share the {t.sequences} texts of a micro-batch; "
            f"write {parallel.size()} at least, or start fewer processes"
        )
    team = Team(drafter, t.parallel, dtype=dtype)
    optims = optimizers.optimizers(drafter, t)
    rows: list[Row] = []
    spread = t.parallel is not None
    done = saved.resume(scratch, drafter, optims, rows, spread=spread)
    batches = windows.order(texts.training, sequences=t.sequences * t.accumulation, seed=seed)
    for _ in range(done):
        next(batches)
    if done == 0:
        rows.append({"step": 0, "split": "valid", **validate(drafter, texts, t, v, seed=seed, team=team)})
    steps = range(done, t.steps)
    bar = tqdm(steps, initial=done, total=t.steps, desc=title, unit="step", mininterval=5, disable=not parallel.first())
    for step in bar:
        factor = optimizers.rate(step, t)
        optimizers.set_rates(optims, factor)
        chosen = [texts.training[i] for i in next(batches)]
        value, norm = _step(team, chosen, texts.contexts, loss, t, optims, seed, step)
        row: Row = {"step": step + 1, "split": "train", "lr": factor * t.lr, "loss": value, "grad_norm": norm}
        row |= {"tokens": sum(len(example.ids) for example in chosen), "windows": len(chosen) * t.windows}
        rows.append(row)
        bar.set_postfix(loss=f"{value:.3f}")
        last = step + 1 == t.steps
        if last or (step + 1) % t.evaluate_every == 0:
            rows.append({"step": step + 1, "split": "valid", **validate(drafter, texts, t, v, seed=seed, team=team)})
            if keep is not None:
                keep(step + 1)
        if not last and (step + 1) % t.checkpoint_every == 0:
            saved.save(scratch, step + 1, drafter, optims, rows, spread=spread)
    return rows


def _step(
    team: Team,
    chosen: Sequence[Example],
    contexts: Contexts | None,
    loss: Loss,
    t: Training,
    optims: Sequence[torch.optim.Optimizer],
    seed: int,
    step: int,
) -> tuple[float, float]:
    """(loss, gradient norm before clipping) of one optimizer step.

    A loss is a sum over windows by their number, and every window counts (windows.collate). So a process's own loss
    weighs as its texts do among those of the micro-batch; torch then takes the mean over processes.
    """
    drafter: Drafter = team.drafter
    drafter.train()
    for optim in optims:
        optim.zero_grad(set_to_none=True)
    total = 0.0
    for micro in range(t.accumulation):
        texts = chosen[micro * t.sequences : (micro + 1) * t.sequences]
        own = parallel.part_of(len(texts))
        share = len(texts[own]) / len(texts)

        def compute(texts: Sequence[Example] = texts, own: slice = own, micro: int = micro) -> Tensor:
            batch = windows.collate(
                texts,
                drafter,
                contexts,
                windows=t.windows,
                window=t.window,
                full_mask_share=t.full_mask_share,
                seed=seed,
                step=1 + step * t.accumulation + micro,
                part=own,
            )
            return loss(texts[own], batch)

        value = team.compute(compute, more=micro + 1 < t.accumulation)
        (value * (share * parallel.size()) / t.accumulation).backward()
        total += share * float(value.detach()) / t.accumulation
    norm = optimizers.clip(drafter.trained(), t.clip)
    for optim in optims:
        optim.step()
    return sum(parallel.gathered(total)), norm


def validate(drafter: Drafter, texts: Texts, t: Training, v: Validation, *, seed: int, team: Team | None = None) -> Row:
    """The validation columns of the curve."""
    return validation.validate(
        drafter,
        texts.held_out,
        texts.contexts,
        v,
        window=t.window,
        sequences=t.sequences,
        seed=seed,
        compute=None if team is None else team.compute,
    )


def write(folder: Path, drafter: Drafter, card: DrafterCard, t: Training) -> None:
    """The drafter's folder, with its adapter merged or beside it as the section asks. All processes call it."""
    with parallel.whole(drafter):
        if parallel.first():
            with lora.exported(drafter, t.lora), store.replace_folder(folder) as out:
                save_drafter(out, drafter, card)


def alone(t: Training) -> Training:
    """What of a section decides the result: not how many processes share the work."""
    return replace(t, parallel=None)


def state_form(t: Training, device: entry.Device) -> str:
    """Which saved state a run can go on from, as a part of its fingerprint: any of the same file format and numbers."""
    return "" if t.parallel is None else f"spread {passes_in(device)}"


def passes_in(device: entry.Device) -> torch.dtype:
    """The number format of a `parallel` training's passes: the profile's on a GPU, float32 elsewhere."""
    return models.resolve_dtype(device.dtype, device.name) if device.name == "cuda" else torch.float32


def curve_csv(rows: Sequence[Row]) -> str:
    """The curve as CSV, one column for every name that occurs; empty where a row has none."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return out.getvalue()
