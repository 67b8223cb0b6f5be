"""No benchmark prompt may reach training: exact and near duplicates between a benchmark and the corpus.

Compared are words without case, spacing and punctuation. Exact: the benchmark prompt stands, whole, in a
corpus prompt (whatever wording surrounds it). Near: of the runs of `ngram` words of the shorter of the two,
a share of at least `overlap` stands in the other. Leaks of this kind raise acceptance, not accuracy, so
nothing else shows them.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stages.download.items import Item, words
from stages.download.params import Guard

LISTED = 20


class Pair(NamedTuple):
    """A benchmark prompt, the corpus prompt it is found in, and how much of it (None: exact)."""

    prompt: str
    corpus: str
    share: float | None


class Corpus:
    """The corpus, indexed by its runs of `ngram` words."""

    def __init__(self, texts: Mapping[str, str], *, ngram: int) -> None:
        self.ngram = ngram
        self._words = {name: words(text) for name, text in texts.items()}
        self._grams = {name: _grams(value, ngram) for name, value in self._words.items()}
        self._where: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name, grams in self._grams.items():
            for gram in grams:
                self._where[gram].append(name)

    def exact(self, text: str) -> list[str]:
        """Ids of corpus prompts that contain the text."""
        mine = words(text)
        near = self._where.get(tuple(mine[: self.ngram]), []) if len(mine) >= self.ngram else self._words
        run = f" {' '.join(mine)} "
        return [name for name in near if run in f" {' '.join(self._words[name])} "]

    def near(self, text: str, *, overlap: float) -> list[tuple[str, float]]:
        """Ids and shares of corpus prompts that share at least `overlap` of the shorter one's runs."""
        grams = _grams(words(text), self.ngram)
        common = Counter(name for gram in grams for name in self._where.get(gram, []))
        shares = [(name, count / min(len(grams), len(self._grams[name]))) for name, count in common.items()]
        return [(name, share) for name, share in shares if share >= overlap]


def check(
    splits: Mapping[str, Sequence[Item]], corpus: Corpus, guard: Guard, *, shared_templates: Sequence[str]
) -> dict[str, int]:
    """Count of prompts with near duplicates, by declared split; ValueError lists every other pair by id."""
    pairs: list[Pair] = []
    declared = dict.fromkeys(shared_templates, 0)
    for split, items in splits.items():
        for item in items:
            texts = (item.text, *item.more)
            exact = [name for text in texts for name in corpus.exact(text)]
            pairs += [Pair(item.id, name, None) for name in exact]
            near = [
                Pair(item.id, name, share)
                for text in texts
                for name, share in corpus.near(text, overlap=guard.overlap)
                if name not in exact
            ]
            if split in declared:
                declared[split] += bool(near)
            else:
                pairs += near
    if pairs:
        raise ValueError(_report(pairs))
    return declared


def check_templates(items: Sequence[Item], categories: Mapping[str, str]) -> None:
    """ValueError if a held-out template stands in the corpus: its word runs need not show it."""
    held_out = {item.category for item in items}
    if trained := [name for name, category in categories.items() if category in held_out]:
        listed = ", ".join(trained[:LISTED])
        raise ValueError(
            f"{len(trained)} corpus prompts come from held-out templates ({listed}); write `templates: others` in "
            "that part of download.corpus"
        )


def _report(pairs: Sequence[Pair]) -> str:
    lines = [
        f"  {prompt} in corpus prompt {name}: " + ("exact" if share is None else f"{share:.0%} of the word runs")
        for prompt, name, share in sorted(pairs, key=lambda pair: -(pair.share or 2.0))[:LISTED]
    ]
    if len(pairs) > LISTED:
        lines.append(f"  and {len(pairs) - LISTED} more")
    return "\n".join(
        [
            f"{len(pairs)} benchmark prompts stand in the training corpus; change seed, modules or file of "
            "that part of download.corpus, name them in its source's `omit`, or declare the split in "
            "shared_templates if its near duplicates are meant:",
            *lines,
        ]
    )


def _grams(value: Sequence[str], size: int) -> set[tuple[str, ...]]:
    return {tuple(value[start : start + size]) for start in range(len(value) - size + 1)}
