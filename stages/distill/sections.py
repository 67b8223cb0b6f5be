"""Which objectives there are, and how a section of `<profile>.distill` says which of them it is.

    streak: {}                                               the objective it is named after
    trie_streak_k4: {objective: trie_streak, drafts: 4}      a variant, under a name of its own
    streak_s1: {objective: streak, seed: 1}                  `streak` once more, from the same start, over other draws

A section's seed draws the order of the texts, the windows in them and the windows that its curve is measured on. What
is held out stays that of the pipeline's seed: nothing is trained on that `adapt` did not see, too.
"""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from torch import Tensor

from kernels import objectives
from stages.common.params import PARAMS, Between, Count, Natural, ParamError, Share, load

REPEAT = re.compile(r"(?P<name>.+)_s(?P<seed>\d+)")  # name of a section with a seed of its own


@dataclass(frozen=True, kw_only=True)
class Plain:
    """An objective without settings of its own. None: as the section is named; the pipeline's seed."""

    objective: str | None = None
    seed: Natural | None = None

    def said(self) -> dict[str, Any]:
        """What the section says, key by key."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def settings(self) -> dict[str, Any]:
        """Of that, what the objective takes."""
        return {name: value for name, value in self.said().items() if name not in ("objective", "seed")}


@dataclass(frozen=True, kw_only=True)
class TrieStreak(Plain):
    drafts: Count  # K


@dataclass(frozen=True, kw_only=True)
class Dpace(Plain):
    smoothing: Share  # a; 0 has streak's gradient


@dataclass(frozen=True, kw_only=True)
class Soft(Plain):
    """temperature: of the verifier's law that is the target.

    At a deployed temperature of 0 that law is one word and soft targets are masked_ce, so the target has its own.
    """

    temperature: Annotated[float, Between(0.01)]


SOFT = "soft"
HARD: dict[str, tuple[type[Plain], Callable[..., Tensor]]] = {
    "masked_ce": (Plain, objectives.masked_ce),  # adapt's own, continued: the control at equal steps
    "first": (Plain, objectives.first),
    "distillspec": (Plain, objectives.distillspec),
    "streak": (Plain, objectives.streak),
    "trie_streak": (TrieStreak, objectives.trie_streak),
    "ce_streak": (Plain, objectives.ce_streak),
    "dpace": (Dpace, objectives.dpace),
}
SECTIONS: dict[str, type[Plain]] = {name: cls for name, (cls, _) in HARD.items()} | {SOFT: Soft}


def read_section(profile: str, name: str) -> tuple[str, Plain]:
    """(the objective, its section). ParamError names the key and what to write instead."""
    key = f"{PARAMS}: {profile}.distill.{name}"
    said = load(dict[str, int | float | str], profile, "distill", name)
    known = ", ".join(SECTIONS)
    if "objective" not in said and name not in SECTIONS:
        raise ParamError(f"{key}.objective: missing; say which objective this is, one of {known}")
    objective = str(said.get("objective", name))
    if objective not in SECTIONS:
        raise ParamError(f"{key}.objective: {objective!r} is none of {known}")
    if name in SECTIONS and objective != name:
        raise ParamError(f"{key}.objective: {objective!r} under the name of another objective; name it otherwise")
    section = load(SECTIONS[objective], profile, "distill", name)
    repeat = REPEAT.fullmatch(name)
    if (repeat and int(repeat["seed"])) != section.seed:
        raise ParamError(
            f"{key}.seed: {section.seed} in a section of this name; a section with a seed of its own is named "
            "<name>_s<seed>, and no other is"
        )
    return objective, section
