"""AR-distillation (the paper's Fig. 2): the drafter aligned at the first position alone, verified as `specdiff2`."""

from stages.common.drafters import Drafter
from stages.evaluate.drafting import DraftsParams as Params
from stages.evaluate.drafting import KDrafts

__all__ = ["RULE", "Params", "build"]

RULE = "match"


def build(params: Params, drafter: Drafter) -> KDrafts:
    return KDrafts(params, drafter, rule="select")
