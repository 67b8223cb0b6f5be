"""EAGLE-3 (arXiv 2503.01840): a head trained on its own chains, drafting with EAGLE-2's tree. Match."""

from stages.common.eagle import OneLayer
from stages.evaluate.growing import DynamicParams as Params
from stages.evaluate.growing import DynamicTree

__all__ = ["KIND", "RULE", "Params", "build"]

RULE = "match"
KIND = "eagle3"  # of its drafter


def build(params: Params, drafter: OneLayer) -> DynamicTree:
    return DynamicTree(params, drafter)
