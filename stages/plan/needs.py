"""What a stage takes: bytes on the fullest GPU part by part, bytes on disk, tokens, operations, seconds by kind of GPU.

Memory is for the longest texts that params.yaml allows, time for texts of the mean length that facts.yaml assumes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple

from stages.plan import memory, work
from stages.plan.memory import MASTER, Rows
from stages.plan.settings import Profile, Training, assumed, gpus
from stages.plan.shapes import Shape

PREFILL_ROWS = 1024  # of one pass, as stages/common/decode.py has them
KINDS = gpus()
ASSUMED = assumed()


@dataclass(frozen=True, kw_only=True)
class Need:
    stage: str
    gpus: int = 0  # side by side
    memory: Mapping[str, float] = field(default_factory=dict)
    disk: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)  # on the wall

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())


class Text(NamedTuple):
    """Tokens of the longest and of the mean prompt and answer."""

    longest_prompt: int
    longest_output: int

    @property
    def longest(self) -> int:
        return self.longest_prompt + self.longest_output

    @property
    def prompt(self) -> float:
        return self.longest_prompt * ASSUMED.prompt_share

    @property
    def output(self) -> float:
        return self.longest_output * ASSUMED.output_share

    @property
    def middle(self) -> float:
        """Tokens seen in the middle of a mean answer."""
        return self.prompt + self.output / 2


def models(p: Profile) -> Need:
    """The hub's files, in bfloat16; a tiny or wheel model is not downloaded as such."""
    shapes = [p.verifier] + ([p.foreign] if p.foreign else [])
    return Need(stage="models", disk=sum(2.0 * shape.parameters for shape in shapes))


def trajectories(p: Profile) -> Need:
    """The verifier's answers to the corpus, many side by side."""
    t, shape, count = p.trajectories, p.verifier, p.texts["corpus"]
    text = Text(p.longest_prompt, t.max_new_tokens)
    together = t.tensor_parallel or spread(p)  # GPUs that hold one verifier
    apart = t.tensor_parallel or (p.plan.count if p.placement.verifier == "tp" else 1)  # and work at the same time
    slots = ASSUMED.slots if t.tensor_parallel else t.batch_size
    weights = p.number * shape.parameters / together
    per_token = shape.cache_bytes(number=p.number)
    cache = per_token * (slots + 1) * text.longest / together
    if t.tensor_parallel:  # vLLM takes what it may for its cache
        cache = max(0.0, t.memory_share * KINDS[p.plan.gpu].memory - weights)
    logits = memory.scores(heads=slots, vocab=shape.vocab, copies=2)
    tokens = count * (text.prompt + text.output)
    flops = work.forward(shape, rows=tokens, columns=text.middle, heads=count * text.output)
    passes = count * text.output / (slots * t.processes)
    one = work.forward(shape, rows=slots, columns=text.middle, heads=slots)
    read = p.number * (shape.parameters - shape.embedding) + slots * text.middle * per_token
    prefill = work.forward(shape, rows=count * text.prompt, columns=text.prompt) / (t.processes * apart)
    seconds = {
        name: passes
        * work.pass_seconds(
            gpu, ASSUMED, flops=one / apart, read=read / apart, layers=0 if t.tensor_parallel else shape.layers
        )
        + prefill / (gpu.flops * ASSUMED.batch_share)
        for name, gpu in KINDS.items()
    }
    kept = len(t.keep_layers)
    return Need(
        stage="trajectories",
        gpus=together * t.processes,
        memory={"weights": weights, "cache": cache, "activations": passing(p, shape, PREFILL_ROWS), "logits": logits},
        disk=tokens * (ASSUMED.text_bytes + shape.cache_bytes(number=2, layers=kept) * (kept > 0)),
        tokens=tokens,
        flops=flops,
        seconds=seconds,
    )


def features(p: Profile, layers: int) -> Need:
    """The verifier reads its own answers once; `layers` of its hidden states are kept in float16."""
    shape, text = p.verifier, Text(p.longest_prompt, p.trajectories.max_new_tokens)
    tokens = p.texts["corpus"] * (text.prompt + text.output)
    flops = work.forward(shape, rows=tokens, columns=text.middle)
    together = spread(p)
    parts = {
        "weights": p.number * shape.parameters / together,
        "cache": shape.cache_bytes(number=p.number) * text.longest / together,
        "activations": passing(p, shape, PREFILL_ROWS),
    }
    seconds = {name: flops / (gpu.flops * ASSUMED.batch_share) for name, gpu in KINDS.items()}
    disk = tokens * layers * shape.width * 2
    return Need(stage="features", gpus=together, memory=parts, disk=disk, tokens=tokens, flops=flops, seconds=seconds)


def training(p: Profile, stage: str, t: Training, shape: Shape, *, words: int, prefix: str, kept: bool) -> Need:
    """adapt, distill, sizes, and the baselines about: prefix "causal". kept: checkpoints that stay."""
    if t.steps == 0:
        return Need(stage=stage)
    processes = t.parallel.processes if t.parallel else 1
    mixed = t.parallel is not None and p.number == 2
    parts = training_memory(t, shape, words=words, prefix=prefix, mixed=mixed)
    held_out = replace(t, windows=p.validation.windows)
    scored = rows_of(held_out, prefix, texts=t.sequences).heads  # of a validation pass: every place of every window
    parts["logits"] = max(parts["logits"], memory.scores(heads=scored, vocab=words))
    mean = min(t.max_tokens, Text(p.longest_prompt, p.trajectories.max_new_tokens).prompt + t.max_tokens / 2)
    rows = rows_of(replace(t, max_tokens=round(mean)), prefix, texts=t.sequences * t.accumulation)
    lora = {"rank": t.lora.rank, "targets": t.lora.targets} if t.lora else {}
    checkpoint = t.parallel is not None and t.parallel.checkpoint_activations
    one = work.step(
        shape, rows=rows.total, columns=rows.columns, heads=rows.heads, vocab=words, checkpoint=checkpoint, **lora
    )
    seen = rows_of(replace(held_out, max_tokens=round(mean)), prefix, texts=1)
    sizes = {"rows": seen.total, "columns": seen.columns, "heads": seen.heads, "vocab": words}
    evaluations = (t.steps // t.evaluate_every + 1) * p.validation.share * p.texts["corpus"]
    flops = t.steps * one + evaluations * work.forward(shape, **sizes)
    saved = trained_bytes(t, shape, words)
    copies = 1 + (t.steps // t.evaluate_every if kept else 0)
    return Need(
        stage=stage,
        gpus=processes,
        memory=parts,
        disk=saved * copies + 3 * saved,  # and the state that a killed training goes on from
        tokens=t.steps * rows.total,
        flops=flops,
        seconds={name: flops / (processes * gpu.flops * ASSUMED.training_share) for name, gpu in KINDS.items()},
    )


def training_memory(t: Training, shape: Shape, *, words: int, prefix: str, mixed: bool) -> dict[str, float]:
    """Bytes of one process at the height of a step."""
    processes, fsdp = (t.parallel.processes, t.parallel.strategy == "fsdp2") if t.parallel else (1, False)
    rows = rows_of(t, prefix, texts=ceil(t.sequences / processes))
    head = words * shape.width
    weights, embedding = MASTER * (shape.body + head), MASTER * shape.embedding
    saved = trained_bytes(t, shape, words)
    state = 2 * saved if t.lora else memory.optimizer(shape, name=t.optimizer, others=head + shape.width)
    weights += saved if t.lora else 0.0
    gradients = saved * (2 if processes > 1 and not fsdp else 1)  # DDP sums them in buckets of their own
    if fsdp:  # spread, but for the embedding, two layers on the way and the head
        passing_by = (2 if mixed else MASTER) * (2 * shape.layer_matrices + head)
        weights, gradients, state = weights / processes + passing_by, gradients / processes, state / processes
    lora = {"rank": t.lora.rank, "targets": t.lora.targets} if t.lora else {}
    checkpoint = t.parallel is not None and t.parallel.checkpoint_activations
    return {
        "weights": weights + embedding,
        "gradients": gradients,
        "optimizer": state,
        "activations": memory.activations(shape, rows, mixed=mixed, checkpoint=checkpoint, **lora),
        "logits": memory.scores(heads=rows.heads, vocab=words),
    }


def trained_bytes(t: Training, shape: Shape, words: int) -> float:
    """Everything but the embedding, or the adapter alone."""
    if t.lora:
        return memory.adapter(shape, rank=t.lora.rank, targets=t.lora.targets) + MASTER * shape.width
    return MASTER * (shape.body + words * shape.width + shape.width)


def rows_of(t: Training, prefix: str, *, texts: int) -> Rows:
    """The passes of `texts` texts laid out as kernels/window.py does it."""
    W, G, T = t.windows, t.window, t.max_tokens
    heads = texts * W * G
    if prefix == "causal":
        return Rows(texts=texts, rows=T, columns=T, heads=texts * T)
    if prefix == "bidirectional":  # every window sees, and is seen by, a prefix of its own
        return Rows(texts=texts * W, rows=T + G - 1, columns=T + G - 1, heads=heads)
    if prefix == "verifier":
        return Rows(texts=texts, rows=W * G, columns=T + W * G, heads=heads)
    return Rows(texts=texts, rows=T + W * (G - 1), columns=T + W * (G - 1), heads=heads)


def spread(p: Profile) -> int:
    """GPUs that hold one verifier."""
    return 1 if p.placement.verifier == "one" else p.plan.count


def passing(p: Profile, shape: Shape, rows: int) -> float:
    """What a pass without gradients has in hand at a time: a layer's widest tensors."""
    return float(p.number * rows * (3 * shape.inner + 4 * shape.width))
