"""Hydra (arXiv 2402.05109): heads that read the draft tokens before them; a tree grown depth by depth; Match.

The paper verifies a fixed tree; here each depth expands the `width` nodes that are likeliest by q and the N best of all
that were scored are verified (stages/common/medusa.py), one pass of small layers for each depth.
"""

from stages.common.medusa import WindowHeads
from stages.evaluate.window_heads import HeadsMethod
from stages.evaluate.window_heads import HeadsParams as Params

__all__ = ["KIND", "RULE", "Params", "build"]

RULE = "match"
KIND = "hydra"  # of its drafter


def build(params: Params, drafter: WindowHeads) -> HeadsMethod:
    return HeadsMethod(params, drafter)
