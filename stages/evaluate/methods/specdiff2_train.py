"""SpecDiff-2 with train-time alignment alone (the paper's ablation).

One sampled draft of the distilled drafter; Match.
"""

from dataclasses import dataclass

from stages.common.drafters import Drafter
from stages.common.params import Count, NonNegative
from stages.evaluate.drafting import DraftsParams, KDrafts

RULE = "match"


@dataclass(frozen=True, kw_only=True)
class Params:
    drafter: str
    gamma: Count  # window G
    temperature: NonNegative  # T_d


def build(params: Params, drafter: Drafter) -> KDrafts:
    return KDrafts(DraftsParams(**vars(params), drafts=1), drafter, rule="match")
