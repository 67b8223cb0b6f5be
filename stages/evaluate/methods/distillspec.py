"""DistillSpec (the paper's App. A.5): the drafter aligned by mean acceptance, verified as `specdiff2`."""

from stages.common.drafters import Drafter
from stages.evaluate.drafting import DraftsParams as Params
from stages.evaluate.drafting import KDrafts

__all__ = ["RULE", "Params", "build"]

RULE = "match"


def build(params: Params, drafter: Drafter) -> KDrafts:
    return KDrafts(params, drafter, rule="select")
