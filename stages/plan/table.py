"""A plan as plain text of at most 100 columns."""

import textwrap
from collections.abc import Iterator, Sequence

from stages.plan.advice import advice, fits, room
from stages.plan.needs import ASSUMED, KINDS, Need
from stages.plan.settings import LISTS, Profile

WIDTH = 100
PARTS = ("weights", "drafter", "cache", "gradients", "optimizer", "activations", "logits")
HEADS = ("weights", "drafter", "cache", "grads", "optim.", "activ.", "logits")


def text(p: Profile, found: Sequence[Need]) -> str:
    """The whole plan, as it is printed."""
    return "\n".join([*_title(p), "", *_memory(p, found), "", *_work(found), "", *_notes(p, found), "", *_select(p)])


def _title(p: Profile) -> Iterator[str]:
    gpu = KINDS[p.plan.gpu]
    drafter = f", drafter {_count(p.drafter.parameters)}"
    yield f"{p.name}: verifier {_count(p.verifier.parameters)} parameters{drafter}"
    size = f"{gpu.memory / 1e9:.0f} GB"
    where = f"{p.name}.plan in params.yaml"
    yield f"planned for {p.plan.count} x {p.plan.gpu.upper()} of {size} ({where if p.plan.own else 'no ' + where})"


def _memory(p: Profile, found: Sequence[Need]) -> Iterator[str]:
    yield f"GB on the fullest GPU, at the longest texts; room for {room(p) / 1e9:.0f} GB on each"
    yield _line("stage", ["GPUs", *HEADS, "all", ""], sizes=(5, 8, 8, 7, 7, 7, 7, 7, 7, 5))
    for need in found:
        if need.memory:
            cells = [_gb(need.memory.get(part, 0.0)) for part in PARTS]
            mark = "fits" if fits(p, need) else "NO"
            row = [str(need.gpus), *cells, _gb(need.bytes), mark]
            yield _line(need.stage, row, sizes=(5, 8, 8, 7, 7, 7, 7, 7, 7, 5))


def _work(found: Sequence[Need]) -> Iterator[str]:
    sizes = (10, 9, 12, *[10] * len(KINDS))
    yield "GB on disk, tokens, floating-point operations, hours on the wall with those GPUs"
    yield _line("stage", ["GB", "tokens", "operations", *(name.upper() for name in KINDS)], sizes=sizes)
    for need in found:
        hours = [_hours(need.seconds.get(name, 0.0)) for name in KINDS]
        flops = f"{need.flops:.1e}" if need.flops else ""
        yield _line(need.stage, [_gb(need.disk), _count(need.tokens), flops, *hours], sizes=sizes)
    hours = [_hours(sum(need.seconds.get(name, 0.0) for need in found)) for name in KINDS]
    flops = f"{sum(need.flops for need in found):.1e}"
    disk = _gb(sum(need.disk for need in found))
    yield _line("all", [disk, _count(sum(need.tokens for need in found)), flops, *hours], sizes=sizes)


def _notes(p: Profile, found: Sequence[Need]) -> Iterator[str]:
    lost = [need for need in found if need.memory and not fits(p, need)]
    if lost:
        yield "Does not fit:"
        for need in lost:
            yield from _wrapped(f"- {advice(p, need)}")
        yield ""
    yield "Assumed (stages/plan/facts.yaml):"
    rates = ", ".join(
        f"{name.upper()} {gpu.flops / 1e12:.0f} TFLOP/s and {gpu.bandwidth / 1e12:.2f} TB/s"
        for name, gpu in KINDS.items()
    )
    yield from _wrapped(
        f"{rates} by the data sheets (dense bfloat16); of the arithmetic {ASSUMED.training_share:.0%} in training and "
        f"{ASSUMED.batch_share:.0%} in wide passes, of the bandwidth {ASSUMED.bandwidth_share:.0%} where a pass reads "
        f"all weights for few rows; {ASSUMED.layer_s * 1e3:.2f} ms to launch a layer. Prompts are "
        f"{ASSUMED.prompt_share:.0%} of the longest allowed in the mean, answers {ASSUMED.output_share:.0%}; "
        f"{ASSUMED.accepted:g} drafted tokens are accepted in a cycle. Stages run one after the other."
    )
    yield from _wrapped(
        "DVC keeps a second copy of what it tracks unless its cache.type is reflink or hardlink; the hub's weights are "
        "in HF_HOME and not tracked. Nothing here was measured on such GPUs."
    )


def _select(p: Profile) -> Iterator[str]:
    """The command that selects the profile; the same lists can be written at the top of params.yaml by hand."""
    yield "Select it in a Git checkout (or write these lists at the top of params.yaml, then dvc repro):"
    values = {"profiles": (p.name,), **({name: p.plan.lists[name] for name in LISTS} if p.plan.own else {})}
    settings = [f"-S '{name}=[{','.join(names)}]'" for name, names in values.items()]
    lines = [""]
    for setting in settings:
        joined = f"{lines[-1]} {setting}".strip()
        lines = [*lines[:-1], joined] if len(joined) <= WIDTH - 6 else [*lines, setting]
    lines = [line for line in lines if line]
    yield from ["dvc exp run \\", *(f"    {line} \\" for line in lines[:-1]), f"    {lines[-1]}"]


def _line(name: str, cells: Sequence[str], *, sizes: Sequence[int]) -> str:
    width = max(24, WIDTH - sum(sizes)) if sum(sizes) < WIDTH - 24 else 24
    padded = "".join(f"{cell:>{size}}" for cell, size in zip(cells, sizes, strict=True))
    return f"{name:<{width}.{width}}{padded}".rstrip()


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _gb(count: float) -> str:
    if not count:
        return ""
    return f"{count / 1e9:.1f}" if count >= 5e7 else "<0.1"


def _count(number: float) -> str:
    if not number:
        return ""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def _hours(seconds: float) -> str:
    if not seconds:
        return ""
    return f"{seconds / 3600:.1f}" if seconds >= 180 else "<0.1"
