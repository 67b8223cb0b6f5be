"""The top-level `report` section of params.yaml: colours, the bootstrap and the cost model's tolerance."""

import re
from dataclasses import dataclass
from typing import Annotated

from stages.common.params import Between, Count


@dataclass(frozen=True, kw_only=True)
class Colours:
    """Hex colours by name; a method or training keeps its colour in every figure."""

    methods: dict[str, str]
    trainings: dict[str, str]  # adapt and every objective
    phases: dict[str, str]  # draft, verify, other

    def __post_init__(self) -> None:
        for section in ("methods", "trainings", "phases"):
            for name, colour in getattr(self, section).items():
                if not re.fullmatch(r"#[0-9A-Fa-f]{6}", colour):
                    raise ValueError(f"{section}.{name}: {colour!r} is not a colour such as '#0072B2'")

    def require(self, section: str, names: list[str]) -> None:
        """ValueError if a name that will be drawn has no colour."""
        if missing := [name for name in names if name not in getattr(self, section)]:
            raise ValueError(f"params.yaml: report.colours.{section}.{missing[0]}: missing; add a hex colour")


@dataclass(frozen=True, kw_only=True)
class ReportParams:
    """Bootstrap resamples and confidence; the relative error of the cost model that is flagged."""

    resamples: Count
    confidence: Annotated[float, Between(0.5, 0.9999)]
    cost_tolerance: Annotated[float, Between(0.001, 1)]
    colours: Colours
