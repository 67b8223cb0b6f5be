"""The training loop of adapt and distill: accumulation, clipping, validation, checkpoints, exact resume.

    loss(step) -> gradients over `accumulation` micro-batches -> clip -> the optimizers' step (optimizers.py)

Everything random is keyed by (seed, step), so the saved state is weights, optimizer and curve.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

import kernels.cache
import kernels.objectives
import kernels.tree
import kernels.window
from stages.common import contexts, drafters, foreign, models, optimizers, store, translate, validation, windows
from stages.common.contexts import Contexts
from stages.common.drafters import Drafter, Prefix
from stages.common.optimizers import Rates
from stages.common.params import Count, Natural, NonNegative, ParamError, Share
from stages.common.validation import Row, Validation
from stages.common.windows import Example

CODE = [
    Path(module.__file__ or "")
    for module in (
        *(kernels.cache, kernels.objectives, kernels.tree, kernels.window),
        *(contexts, drafters, foreign, models, optimizers, translate, validation, windows),
    )
] + [Path(__file__)]  # what a resumed run must find unchanged

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]  # log_q_WG, valid_WG, weights_WG -> loss


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
) -> list[Row]:
    """Train in place; the curve's rows. Continues from `scratch/state.pt` where that is there.

    keep(step): called after every evaluation with the drafter as it stands, for checkpoints that stay.
    """
    optims = optimizers.optimizers(drafter, t)
    rows: list[Row] = []
    done = _resume(scratch, drafter, optims, rows)
    batches = windows.order(texts.training, sequences=t.sequences * t.accumulation, seed=seed)
    for _ in range(done):
        next(batches)
    if done == 0:
        rows.append({"step": 0, "split": "valid", **validate(drafter, texts, t, v, seed=seed)})
    bar = tqdm(range(done, t.steps), initial=done, total=t.steps, desc=title, unit="step", mininterval=5)
    for step in bar:
        factor = optimizers.rate(step, t)
        optimizers.set_rates(optims, factor)
        chosen = [texts.training[i] for i in next(batches)]
        loss, norm, tokens = _step(drafter, chosen, texts.contexts, objective, t, optims, seed, step)
        row: Row = {"step": step + 1, "split": "train", "lr": factor * t.lr, "loss": loss, "grad_norm": norm}
        rows.append(row | {"tokens": tokens, "windows": t.sequences * t.accumulation * t.windows})
        bar.set_postfix(loss=f"{loss:.3f}")
        last = step + 1 == t.steps
        if last or (step + 1) % t.evaluate_every == 0:
            rows.append({"step": step + 1, "split": "valid", **validate(drafter, texts, t, v, seed=seed)})
            if keep is not None:
                keep(step + 1)
        if not last and (step + 1) % t.checkpoint_every == 0:
            _save(scratch, step + 1, drafter, optims, rows)
    return rows


def _step(
    drafter: Drafter,
    chosen: Sequence[Example],
    contexts: Contexts | None,
    objective: Objective,
    t: Training,
    optims: Sequence[torch.optim.Optimizer],
    seed: int,
    step: int,
) -> tuple[float, float, int]:
    """(loss, gradient norm before clipping, tokens of the texts) of one optimizer step."""
    drafter.train()
    for optim in optims:
        optim.zero_grad(set_to_none=True)
    total, tokens = 0.0, 0
    for micro in range(t.accumulation):
        part = chosen[micro * t.sequences : (micro + 1) * t.sequences]
        batch = windows.collate(
            part,
            drafter,
            contexts,
            windows=t.windows,
            window=t.window,
            full_mask_share=t.full_mask_share,
            seed=seed,
            step=1 + step * t.accumulation + micro,
        )
        log_q_WG = windows.log_q(drafter, batch)
        loss = objective(log_q_WG, batch.layout.valid_BWG.flatten(0, 1), batch.weights_BWG.flatten(0, 1))
        (loss / t.accumulation).backward()
        total += float(loss.detach()) / t.accumulation
        tokens += sum(len(example.ids) for example in part)
    norm = float(nn.utils.clip_grad_norm_(drafter.trained(), t.clip, error_if_nonfinite=True))
    for optim in optims:
        optim.step()
    return total, norm, tokens


def validate(drafter: Drafter, texts: Texts, t: Training, v: Validation, *, seed: int) -> Row:
    """The validation columns of the curve."""
    return validation.validate(
        drafter, texts.held_out, texts.contexts, v, window=t.window, sequences=t.sequences, seed=seed
    )


def _save(
    scratch: Path, step: int, drafter: Drafter, optims: Sequence[torch.optim.Optimizer], rows: Sequence[Row]
) -> None:
    state = {
        "step": step,
        "weights": [p.detach() for p in drafter.trained()],
        "optims": [optim.state_dict() for optim in optims],
        "rows": list(rows),
    }
    partial = scratch / ".state.pt.partial"
    torch.save(state, partial)
    partial.replace(scratch / "state.pt")


def _resume(scratch: Path, drafter: Drafter, optims: Sequence[torch.optim.Optimizer], rows: list[Row]) -> int:
    """Steps already done; weights, optimizers and curve as they were then."""
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


def curve_csv(rows: Sequence[Row]) -> str:
    """The curve as CSV, one column for every name that occurs; empty where a row has none."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return out.getvalue()
