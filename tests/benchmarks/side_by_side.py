"""Several systems that decode the same prompts in one process: passes counted, turns rotated, texts compared.

    tokens per call   new tokens / passes of the verifier, counted by a hook on it; the prompt's pass is one of them,
                      in however many parts it is read, so that plain decoding is exactly 1
    ratio             sum_i tokens_i (base seconds_i / base tokens_i) / sum_i seconds_i over prompts i: the base's time
                      for as many tokens over the system's; paired bootstrap over prompts (stages/report/measures.py)

Seconds are those of the whole answer, the prompt included, since not every system can tell the two apart; where one
can, the decoding rate without the prompt stands beside it.
"""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import nn

from stages.report import measures
from tests.benchmarks import tables

RESAMPLES, CONFIDENCE = 4000, 0.95


class Text(NamedTuple):
    """An answer: its tokens, end token included, and what it took. No `prefill_seconds`: the system cannot tell."""

    ids: list[int]
    seconds: float
    prefill_seconds: float | None
    verifier_calls: int


class System(Protocol):
    """Something that decodes greedily, one prompt at a time."""

    name: str
    version: str
    note: str

    def available(self) -> str | None:
        """Why it cannot run here; None if it can. Loads nothing."""
        ...

    def generate(self, ids: Sequence[int], max_new_tokens: int) -> Text: ...


class Calls:
    """Counts the passes of a body in which the prompt's last token, or one behind it, is read."""

    def __init__(self, body: nn.Module) -> None:
        self.count, self.first_at = 0, 0.0
        self._unread = 0
        body.register_forward_hook(self._listen)

    def start(self, prompt_tokens: int) -> None:
        self.count, self.first_at, self._unread = 0, 0.0, prompt_tokens

    def _listen(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._unread -= output[0].shape[1]
        if self._unread > 0:
            return
        self.count += 1
        if self.count == 1:
            self.first_at = perf_counter()


def clocked(calls: Calls, ids: Sequence[int], decode: Callable[[], list[int]], *, splits: bool) -> Text:
    """Run `decode` and account for it. splits: its first counted pass is the prompt's and nothing else."""
    calls.start(len(ids))
    start = perf_counter()
    output_ids = decode()
    seconds = perf_counter() - start
    return Text(output_ids, seconds, calls.first_at - start if splits else None, calls.count)


class Measured(NamedTuple):
    """Texts by system and prompt, and why those systems that are missing could not run."""

    texts: dict[str, list[Text]]
    skipped: dict[str, str]


def measure(
    systems: Sequence[System],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    warm_up_tokens: int,
    say: Callable[[str], None],
) -> Measured:
    """Warm every system up, then decode prompt by prompt, another system first each time.

    A peer that fails is left out with its reason: it is another's code, and the others' hours are not lost.
    """
    skipped = {s.name: reason for s in systems if (reason := s.available()) is not None}
    running = [s for s in systems if s.name not in skipped]
    texts: dict[str, list[Text]] = {s.name: [] for s in running}

    def attempt(system: System, ids: Sequence[int], limit: int, where: str) -> Text | None:
        try:
            return system.generate(ids, limit)
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            skipped[system.name] = f"fails {where}: {type(error).__name__}: {reason}"
            say(f"{system.name}: {skipped[system.name]}")
            texts.pop(system.name)
            running.remove(system)
            return None

    for system in list(running):
        attempt(system, prompts[0], warm_up_tokens, "on the warm-up")
    for turn, ids in enumerate(prompts):
        for system in tables.turns(running, turn):
            text = attempt(system, ids, max_new_tokens, f"on prompt {turn}")
            if text is not None:
                texts[system.name].append(text)
                say(f"prompt {turn + 1} of {len(prompts)}: {system.name}: {len(text.ids)} tokens, {text.seconds:.2f} s")
    return Measured(texts, skipped)


def first_difference(ids: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Place of the first token that differs, or where the shorter text ends; None for equal texts."""
    if list(ids) == list(wanted):
        return None
    pairs = zip(ids, wanted, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(wanted)))


def speed_ratio(texts: Sequence[Text], base: Sequence[Text]) -> measures.Interval:
    over_P = np.array([len(t.ids) * b.seconds / len(b.ids) for t, b in zip(texts, base, strict=True)])
    under_P = np.array([t.seconds for t in texts])
    return measures.ratio(over_P, under_P, resamples=RESAMPLES, confidence=CONFIDENCE, seed=0)


def row(name: str, measured: Measured, *, reference: str, base: str) -> dict[str, Any]:
    """One line of the table. `reference`: whose texts are the right ones; `base`: whose speed is 1."""
    texts = measured.texts[name]
    tokens, seconds = sum(len(t.ids) for t in texts), sum(t.seconds for t in texts)
    ratio = speed_ratio(texts, measured.texts[base])
    decode_s = [t.seconds - t.prefill_seconds for t in texts if t.prefill_seconds is not None]
    whole = len(decode_s) == len(texts) and sum(decode_s) > 0
    pairs = zip(texts, measured.texts[reference], strict=True)
    places = [place for t, wanted in pairs if (place := first_difference(t.ids, wanted.ids)) is not None]
    return {
        "system": name,
        "prompts": len(texts),
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "decode_tokens_per_s": (tokens - len(texts)) / sum(decode_s) if whole else None,
        "verifier_calls": sum(t.verifier_calls for t in texts),
        "tokens_per_call": tokens / max(1, sum(t.verifier_calls for t in texts)),
        "equal_texts": len(texts) - len(places),
        "first_difference": median(places) if places else None,
        "earliest_difference": min(places) if places else None,
    }
