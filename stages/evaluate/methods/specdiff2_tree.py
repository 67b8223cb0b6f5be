"""Ours: the best-first tree of up to N nodes under the marginals; Match."""

from stages.common.drafters import Drafter
from stages.evaluate.drafting import BestTree
from stages.evaluate.drafting import TreeParams as Params

__all__ = ["RULE", "Params", "build"]

RULE = "match"


def build(params: Params, drafter: Drafter) -> BestTree:
    return BestTree(params, drafter)
