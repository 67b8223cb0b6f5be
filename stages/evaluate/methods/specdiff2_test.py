"""SpecDiff-2 with test-time alignment alone (the paper's ablation).

K drafts of the unaligned drafter from one pass, self-selection by S, Match on the chosen one.
"""

from stages.common.drafters import Drafter
from stages.evaluate.drafting import DraftsParams as Params
from stages.evaluate.drafting import KDrafts

__all__ = ["RULE", "Params", "build"]

RULE = "match"


def build(params: Params, drafter: Drafter) -> KDrafts:
    return KDrafts(params, drafter, rule="select")
