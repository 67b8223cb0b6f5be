"""Medusa (arXiv 2401.10774): parallel heads on the verifier's last hidden state; a tree; Match.

The paper verifies a fixed sparse tree, whose shape was tuned on a calibration set by the heads' mean accuracies. Here
the tree is the best one of N nodes under the very marginals of this place: under product-form marginals no tree of N
nodes has a larger expected accepted length by q, the fixed one among them. Acceptance is lossless; the paper's typical
acceptance is not, and is not built.
"""

from stages.common.medusa import WindowHeads
from stages.evaluate.window_heads import HeadsMethod
from stages.evaluate.window_heads import HeadsParams as Params

__all__ = ["KIND", "RULE", "Params", "build"]

RULE = "match"
KIND = "medusa"  # of its drafter


def build(params: Params, drafter: WindowHeads) -> HeadsMethod:
    return HeadsMethod(params, drafter)
