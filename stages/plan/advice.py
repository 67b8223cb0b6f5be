"""What does not fit on the profile's GPUs, and the settings that make it fit, tried one after the other."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from stages.plan import decoding, needs, overview
from stages.plan.needs import ASSUMED, KINDS, Need
from stages.plan.settings import Lora, Parallel, Placement, Profile, Training
from stages.plan.shapes import PROJECTIONS

Change = tuple[str, Callable[[], Need]]


def room(p: Profile) -> float:
    """Bytes of a GPU that tensors may fill."""
    return KINDS[p.plan.gpu].memory * ASSUMED.memory_share


def fits(p: Profile, need: Need) -> bool:
    return need.bytes <= room(p) and need.gpus <= p.plan.count


def advice(p: Profile, need: Need) -> str:
    """One line on a stage that does not fit: the first change, or the smallest set of them, that makes it."""
    if need.gpus > p.plan.count:
        there = p.plan.count
        return f"{need.stage}: {need.gpus} GPUs asked for, {there} planned for; lower `processes` or raise plan.count"
    said, here = [], need
    for words, changed in _changes(p, need):
        said.append(words)
        here = changed()
        if here.bytes <= room(p):
            return f"{need.stage}: {_gb(need)} GB on one GPU; {' and '.join(said)}: {_gb(here)} GB"
    whole = f"{_gb(here)} GB even with {' and '.join(said)}" if said else f"{_gb(need)} GB on one GPU"
    return f"{need.stage}: {whole}; it wants larger or more GPUs (plan.gpu, plan.count)"


def _changes(p: Profile, need: Need) -> Iterator[Change]:
    kind, _, name = need.stage.partition(" ")
    if kind in ("adapt", "distill"):
        t = p.adapting if kind == "adapt" else p.distilling
        made = (lambda t: overview.adapting(p, t)) if kind == "adapt" else (lambda t: overview.distilling(p, name, t))
        yield from _training(p, t, f"{kind}.training", made)
    elif kind == "trajectories":
        yield from _trajectories(p)
    elif kind in (decoding.VANILLA, "evaluate", "sweep") and p.placement.verifier == "one" and p.plan.count > 1:
        wide = replace(p, placement=Placement(verifier="auto", drafter=p.placement.drafter))
        names = {decoding.VANILLA: decoding.VANILLA, "evaluate": name}
        if kind == "sweep":
            yield "device.placement.verifier: auto", lambda: decoding.sweep(wide, name)
        else:
            yield "device.placement.verifier: auto", lambda: decoding.cells(wide, names[kind])


def _training(p: Profile, t: Training, key: str, made: Callable[[Training], Need]) -> Iterator[Change]:
    """Each change is made on top of those before it."""
    now = t
    plain = Parallel(processes=p.plan.count, strategy="ddp", checkpoint_activations=False)
    parallel = now.parallel or plain
    if not parallel.checkpoint_activations:
        parallel = replace(parallel, checkpoint_activations=True)
        now = replace(now, parallel=parallel)
        yield f"{key}.parallel.checkpoint_activations: true", lambda now=now: made(now)
    if parallel.strategy == "ddp" and parallel.processes > 1:
        parallel = replace(parallel, strategy="fsdp2")
        now = replace(now, parallel=parallel)
        yield f"{key}.parallel.strategy: fsdp2", lambda now=now: made(now)
    least = max(1, parallel.processes)
    if now.sequences > least:
        now = replace(now, sequences=least, accumulation=now.accumulation * now.sequences // least)
        yield (
            f"{key}.sequences: {now.sequences} with accumulation: {now.accumulation}",
            lambda now=now: made(now),
        )
    if now.lora is None:
        now = replace(now, lora=Lora(rank=32, targets=PROJECTIONS))
        yield f"{key}.lora: {{rank: 32, ...}}", lambda now=now: made(now)
    if now.windows > 1:
        now = replace(now, windows=1)
        yield f"{key}.windows: 1", lambda now=now: made(now)


def _trajectories(p: Profile) -> Iterator[Change]:
    t = p.trajectories
    while t.batch_size > 8 and not t.tensor_parallel:
        t = replace(t, batch_size=t.batch_size // 2)
        small = replace(p, trajectories=t)
        if needs.trajectories(small).bytes <= room(p):
            yield f"trajectories.batch_size: {t.batch_size}", lambda small=small: needs.trajectories(small)
            return
    vllm = replace(t, processes=1, tensor_parallel=p.plan.count, memory_share=ASSUMED.memory_share)
    wide = replace(p, trajectories=vllm)
    words = f"trajectories.engine: {{name: vllm, tensor_parallel: {p.plan.count}, memory_share: 0.9}}"
    yield words, lambda: needs.trajectories(wide)


def _gb(need: Need) -> str:
    return f"{need.bytes / 1e9:.0f}"
