"""Bytes that a training pass keeps for its gradients, and that optimizers and adapters add.

What autograd keeps of transformers' own layers with fused attention, tensor by tensor; `mixed`: passes in bfloat16 over
float32 masters, where each matrix gets an input, and keeps a copy of itself, in bfloat16:

    a norm           its input in float32; the normalised row where its weight is trained
    a linear layer   its input where its weight is trained, or an adapter reads it
    attention        queries, keys, values and result; the additive mask, once for all layers
    the gated MLP    gate, its activation, up

Letters: D width, H heads, J key heads, d head size, I inner width.
"""

from collections.abc import Collection
from dataclasses import dataclass

from stages.plan.shapes import PROJECTIONS, Shape
from stages.plan.work import lora_numbers

MASTER = 4  # bytes of a number in weights, gradients and optimizers
SCORES = 3  # float32 copies of the scores at the height of a step: scores, log-softmax, gradient
READS: dict[str, int] = dict(zip(PROJECTIONS, (0, 0, 0, 1, 2, 2, 3), strict=True))  # which input each projection has


@dataclass(frozen=True, kw_only=True)
class Rows:
    """One training pass of a process: `texts` of `rows` rows that see `columns` columns; `heads` rows get scores."""

    texts: float
    rows: float
    columns: float
    heads: float

    @property
    def total(self) -> float:
        return self.texts * self.rows


def row_bytes(shape: Shape, *, mixed: bool, rank: int, targets: Collection[str] | None) -> float:
    """Kept of a row in one layer, apart from keys and values. targets: of an adapter; None: everything is trained."""
    number, D, Q = _number(mixed), shape.width, shape.heads * shape.head_size
    inputs = (D, Q, D, shape.inner)
    read = [READS[name] for name in (PROJECTIONS if targets is None else targets)]
    if not mixed:
        read = sorted(set(read))  # one tensor for all that read it; bfloat16 copies are each projection's own
    norms = 2 * MASTER * D * (2 if targets is None else 1)
    adapter = number * rank * len(targets or ())
    return norms + number * (2 * Q + 3 * shape.inner + sum(inputs[place] for place in read)) + adapter


def activations(
    shape: Shape,
    rows: Rows,
    *,
    mixed: bool,
    rank: int = 0,
    targets: Collection[str] | None = None,
    checkpoint: bool = False,
) -> float:
    """Kept by one pass, apart from the scores. With checkpoints: each layer's input, and one layer whole."""
    number = _number(mixed)
    keys = 2 * number * shape.key_heads * shape.head_size * rows.texts * rows.columns
    copies = 2 * shape.layer_matrices if mixed else 0
    layer = rows.total * row_bytes(shape, mixed=mixed, rank=rank, targets=targets) + keys + copies
    group = shape.heads // shape.key_heads
    mask = number * rows.texts * group * rows.rows * rows.columns
    last = rows.total * shape.width * MASTER * (2 if targets is None else 1) + number * rows.heads * shape.width
    if checkpoint:
        return shape.layers * MASTER * rows.total * shape.width + layer + mask + last
    return shape.layers * layer + mask + last


def scores(*, heads: float, vocab: int, copies: int = SCORES) -> float:
    """Float32 scores of the rows that get a loss."""
    return 4.0 * copies * heads * vocab


def optimizer(shape: Shape, *, name: str, others: int) -> float:
    """State of a trained body and `others` numbers beside it: AdamW keeps two of each, Muon one of a matrix."""
    matrices = shape.layers * shape.layer_matrices
    return MASTER * ((1 if name == "muon" else 2) * matrices + 2 * (shape.body - matrices + others))


def adapter(shape: Shape, *, rank: int, targets: Collection[str]) -> float:
    """Weights of an adapter; its gradients take as much, AdamW's state twice as much."""
    return MASTER * lora_numbers(shape, rank=rank, targets=targets)


def _number(mixed: bool) -> int:
    return 2 if mixed else MASTER
