"""The cost model beside the measurement: speed-up = (1 + E[L]) / (t_verify/t_1 + c + o).

t_1 is the median time of a vanilla step, c the drafting of a cycle and o the engine's own time, both in vanilla
steps. The costs are fitted once for each method, as medians over the prompts of *all* benchmarks; the
speed-up of a benchmark is then predicted from its own E[L] alone. So it can fail: if clock, counters or
yardstick are wrong, or if cost depends on the benchmark, prediction and measurement part.
"""

from typing import NamedTuple

from stages.report import measures
from stages.report.frames import Frame


class Cost(NamedTuple):
    """Costs of one cycle in vanilla steps."""

    verify: float
    draft: float
    other: float

    @property
    def total(self) -> float:
        return self.verify + self.draft + self.other


class Prediction(NamedTuple):
    """Predicted and measured speed-up, and whether they differ by more than the tolerance."""

    predicted: float
    measured: float
    error: float
    flagged: bool


def fit(rows: Frame) -> Cost | None:
    """Median cost over prompts of one method's cycles; None where no prompt was timed."""
    rows = rows[(rows["cycles"] > 0) & (rows["step_s"] > 0)]
    if rows.empty:
        return None
    steps = rows["cycles"] * rows["step_s"]
    verify, draft, other = (float((rows[name] / steps).median()) for name in ("verify_s", "draft_s", "other_s"))
    return Cost(verify, draft, other)


def predict(cost: Cost, rows: Frame, *, measured: float, tolerance: float) -> Prediction:
    """Speed-up of `rows` from its own acceptance and the method's fitted cost."""
    predicted = measures.acceptance_length(rows) / cost.total if cost.total > 0 else float("nan")
    error = measured / predicted - 1
    return Prediction(predicted, measured, error, not abs(error) <= tolerance)
