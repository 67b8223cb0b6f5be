"""The form of a sweep in params.yaml, and the points it spells.

    window:
      {title: Window, benchmark: gsm_symbolic, split: seen_template, prompts: 4, method: specdiff2_tree,
       x: gamma, vary: {gamma: [2, 4, 8]}, set: {threshold: 0.05}, beside: [Figure 10]}

`vary` is a product of lists: each combination is a point. `set` holds for all of them. Their keys:

    method                 in `vary` only; where there is one for all points, it is a line of the sweep
    drafter                a trained one by name, `streak@6` as it was after 6 steps (`streak@0`: where it started),
                           `size.small` of stage `sizes`
    gamma, nodes, ..       what the method's section of `evaluate` knows
    shared.temperature ..  what `evaluate.shared` knows of sampling (SHARED)
    specdiff2_tree.nodes   in `set` only: of one method among several

What is neither varied nor set is as in the profile's `evaluate`. `x` is the key on the figure's axis, and the other
varied ones make the series; or `drafter.steps` and `drafter.layers`, a number that the varied drafter has; or
`position`, where every point is a curve of acceptance over the draft's positions.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from stages.common.params import Count, ParamError, keys_at, load

Value = str | int | float
SHARED = ("temperature", "top_k", "top_p", "max_new_tokens", "repeats")  # what a text hangs on, beside the seed
OF_DRAFTER = {"drafter.steps": "distillation steps", "drafter.layers": "layers"}
POSITION = "position"
NAME = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """`<profile>.sweeps.<name>`."""

    benchmark: str
    split: str
    prompts: Count  # of the split, from its first
    x: str
    vary: dict[str, tuple[Value, ...]]
    method: str = ""  # unless it is varied
    set: dict[str, Value] = field(default_factory=dict)
    title: str = ""  # of the figure
    beside: tuple[str, ...] = ()  # the paper's figures it belongs to, as published.csv calls them

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(problem)

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(map(str, self.vary.get("method", (self.method,))))

    def where(self, key: str, method: str) -> str:
        """Which line of the sweep sets a key for a method: `vary.gamma`, `set.specdiff2_tree.nodes`; empty for none."""
        if key == "method" and self.method:
            return "method"
        for place, names in (("vary", self.vary), ("set", self.set)):
            for name in (f"{method}.{key}", key):
                if name in names:
                    return f"{place}.{name}"
        return ""

    def settings(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """What a point changes: `set` for its method, then what is varied; the method apart. Keys as in `vary`."""
        method = f"{values.get('method', self.method)}."
        plain = {key: value for key, value in self.set.items() if "." not in key or key.startswith("shared.")}
        own = {key.removeprefix(method): value for key, value in self.set.items() if key.startswith(method)}
        return plain | own | {key: value for key, value in values.items() if key != "method"}


class Spelled(NamedTuple):
    """A point before the drafter is looked at: `x` is None where only the drafter knows it."""

    name: str  # of its file
    index: int
    method: str
    settings: dict[str, Value]
    x: Value | None
    series: str


def read(profile: str, name: str) -> Sweep:
    """The section, checked. ParamError names the key."""
    refuse_name(name)
    return load(Sweep, profile, "sweeps", name)


def refuse_name(name: str) -> None:
    """ParamError: no name for files."""
    if not NAME.fullmatch(name):
        raise ParamError(f"params.yaml: sweeps: {name!r} names files; write lower-case letters, digits and _")


def names() -> list[str]:
    """The sweeps that are measured, in order."""
    return keys_at("sweeps")


def points(sweep: Sweep) -> list[Spelled]:
    """The product of `vary`, its last key running fastest."""
    found = []
    for index, chosen in enumerate(product(*sweep.vary.values())):
        values: dict[str, Value] = dict(zip(sweep.vary, chosen, strict=True))
        method = str(values.get("method", sweep.method))
        labels = [_label(key, value, sweep.x) for key, value in values.items() if key != sweep.x]
        series = ", ".join(filter(None, labels)) or method
        x = None if sweep.x in OF_DRAFTER else series if sweep.x == POSITION else values[sweep.x]
        found.append(Spelled(_file(values), index, method, sweep.settings(values), x, series))
    return found


def steps_of(drafter: str) -> tuple[str, int | None]:
    """(training, step) of a drafter's name: ("streak", 6) of `streak@6`, ("streak", None) of `streak`.

    ParamError: what follows @ is no number of steps.
    """
    training, at, step = drafter.partition("@")
    if not at:
        return training, None
    if not step.isdigit():
        raise ParamError(f"{drafter!r}: what follows @ is a number of steps, as in streak@6")
    return training, int(step)


def _label(key: str, value: Value, x: str) -> str:
    """A part of a series' name; empty where the drafter is on the axis."""
    if key == "drafter" and x == "drafter.layers":
        return ""
    if key == "drafter" and x == "drafter.steps":
        return str(value).partition("@")[0]
    return str(value) if isinstance(value, str) else f"{key.removeprefix('shared.')} {value:g}"


def _file(values: Mapping[str, Value]) -> str:
    """A file's name from what is varied: `drafter-streak_6+drafts-4`."""
    return "+".join(re.sub(r"[^A-Za-z0-9.-]+", "_", f"{key}-{value}") for key, value in values.items())


def _problems(sweep: Sweep) -> Iterator[str]:
    """What is wrong with the form, as `key: what`."""
    if not sweep.vary:
        yield "vary: empty; name at least one key and its values, as in {gamma: [2, 4]}"
    for key, values in sweep.vary.items():
        if not values:
            yield f"vary.{key}: an empty list; write the values it takes"
        if len({_file({key: value}) for value in values}) < len(values):
            yield f"vary.{key}: {list(values)} holds a value twice"
        if key in sweep.set:
            yield f"set.{key}: varied as well; leave it out of one of them"
        if "." in key and not key.startswith("shared."):
            yield f"vary.{key}: of one method only; write it under set, or vary {key.partition('.')[2]}"
    if "method" in sweep.set:
        yield "set.method: write it as `method`, beside `vary`"
    if bool(sweep.method) == ("method" in sweep.vary):
        yield "method: write it here or vary it, one of the two"
    for key in (*sweep.vary, *sweep.set):
        owner, dot, name = key.partition(".")
        place = "vary" if key in sweep.vary else "set"
        if owner == "shared" and name not in SHARED:
            yield f"{place}.{key}: not among what a sweep may change of evaluate.shared: {', '.join(SHARED)}"
        elif dot and owner not in ("shared", *sweep.methods):
            yield f"{place}.{key}: no method {owner!r} in this sweep; it has {', '.join(sweep.methods)}"
    if sweep.x in OF_DRAFTER and "drafter" not in sweep.vary:
        yield f"x: {sweep.x} needs drafters to vary; add vary.drafter"
    if sweep.x not in (*sweep.vary, *OF_DRAFTER, POSITION):
        yield f"x: {sweep.x!r} is not varied; write one of {', '.join([*sweep.vary, *OF_DRAFTER, POSITION])}"
