"""Prompt lookup (Saxena 2023): no model and no training, the free baseline that everybody has; Match."""

from stages.common.drafters import Drafter
from stages.evaluate.lookup import LookupParams as Params
from stages.evaluate.lookup import PromptLookup

__all__ = ["RULE", "Params", "build"]

RULE = "match"


def build(params: Params, drafter: Drafter | None) -> PromptLookup:
    return PromptLookup(params)
