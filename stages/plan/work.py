"""Floating-point operations of a pass and of a training step, and the seconds they take at stated rates.

A product of [a, b] and [b, c] counts 2abc operations; attention counts two of them a layer, scores and values, over all
columns of the mask (masked places are computed, too). Norms, activations and sampling are left out: below a hundredth.
"""

from collections.abc import Collection
from dataclasses import dataclass

from stages.plan.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a device can do at best, by its data sheet (dense bfloat16)."""

    memory: float  # bytes
    flops: float  # a second
    bandwidth: float  # bytes a second


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """What a run gets of that, and what a text is like: ours, from nothing but experience; facts.yaml has them."""

    memory_share: float  # of a device's memory that tensors may fill
    training_share: float  # of the peak, in training
    batch_share: float  # of the peak, in passes with many rows: prefill, batched decoding, verification of trees
    bandwidth_share: float  # of the bandwidth, in passes that read all weights for few rows
    layer_s: float  # seconds that a layer's kernels take to launch in an eager pass
    prompt_share: float  # a prompt's mean length over the longest
    output_share: float  # an answer's mean length over the longest
    accepted: float  # drafted tokens accepted in a cycle
    slots: int  # texts that vLLM decodes side by side
    text_bytes: float  # on disk, of a token kept in Parquet


def forward(shape: Shape, *, rows: float, columns: float, heads: float = 0, vocab: int | None = None) -> float:
    """Operations of one pass over `rows` rows that look at `columns` columns each; `heads` of them get scores."""
    matrices = 2 * rows * shape.layers * shape.layer_matrices
    attention = 4 * rows * columns * shape.layers * shape.heads * shape.head_size
    return matrices + attention + 2 * heads * shape.width * (shape.vocab if vocab is None else vocab)


def lora_numbers(shape: Shape, *, rank: int, targets: Collection[str]) -> int:
    """Trained numbers of an adapter: two thin matrices beside each target of every layer."""
    sizes = shape.matrices()
    return shape.layers * sum(rank * sum(sizes[name]) for name in targets)


def step(
    shape: Shape,
    *,
    rows: float,
    columns: float,
    heads: float,
    vocab: int,
    rank: int = 0,
    targets: Collection[str] = (),
    checkpoint: bool = False,
) -> float:
    """Operations of one training pass and its gradients.

    Trained matrices cost twice the pass again (gradients of inputs and of weights), frozen ones once (of inputs alone);
    with checkpointed activations the layers are computed once more.
    """
    once = forward(shape, rows=rows, columns=columns)
    head = forward(shape.cut(0), rows=0, columns=0, heads=heads, vocab=vocab)
    attention = forward(shape, rows=rows, columns=columns) - forward(shape, rows=rows, columns=0)
    if not rank:
        return 3 * (once + head) + once * checkpoint
    adapter = 2 * rows * lora_numbers(shape, rank=rank, targets=targets)
    return 2 * (once + head) + attention + 3 * adapter + (once + adapter) * checkpoint


def pass_seconds(
    gpu: Gpu, assumed: Assumed, *, flops: float, read: float, layers: int, share: float | None = None
) -> float:
    """Seconds of one pass: what its arithmetic, its reading or its launches take, whichever is longest.

    read: bytes of weights and cache that it must fetch. share: of the peak; the assumed one of wide passes by default.
    """
    arithmetic = flops / (gpu.flops * (assumed.batch_share if share is None else share))
    return max(arithmetic, read / (gpu.bandwidth * assumed.bandwidth_share), layers * assumed.layer_s)
