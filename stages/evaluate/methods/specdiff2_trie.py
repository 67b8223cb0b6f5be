"""Ours: the same K drafts as `specdiff2`, with Match walking the whole trie. Never shorter, by the same proof lossless."""

from stages.common.drafters import Drafter
from stages.evaluate.methods.specdiff2 import Params, SpecDiff2

__all__ = ["Params", "build"]


def build(params: Params, drafter: Drafter) -> SpecDiff2:
    return SpecDiff2(params, drafter, rule="match")
