"""Ours: the same K drafts as `specdiff2`, with Match walking the whole trie.

The same pass, lossless by the same proof, and never shorter: E[L] sums P(node) over the distinct nodes.
"""

from stages.common.drafters import Drafter
from stages.evaluate.drafting import DraftsParams as Params
from stages.evaluate.drafting import KDrafts

__all__ = ["RULE", "Params", "build"]

RULE = "match"


def build(params: Params, drafter: Drafter) -> KDrafts:
    return KDrafts(params, drafter, rule="match")
