"""EAGLE-2 (arXiv 2406.16858): EAGLE's head, its tree grown where the head is sure. Match."""

from stages.common.eagle import OneLayer
from stages.evaluate.growing import DynamicParams as Params
from stages.evaluate.growing import DynamicTree

__all__ = ["KIND", "RULE", "Params", "build"]

RULE = "match"
KIND = "eagle"  # of its drafter


def build(params: Params, drafter: OneLayer) -> DynamicTree:
    return DynamicTree(params, drafter)
