"""What every source yields, how two prompts are compared, and how a few are picked out of many."""

import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import NamedTuple


class Item(NamedTuple):
    """One prompt before it is worded. `category` is what a small selection is spread over.

    more: the user's turns behind the first, of a chat.
    """

    id: str
    text: str
    reference: str | None
    category: str
    more: tuple[str, ...] = ()


def words(text: str) -> list[str]:
    """Words without case, spacing and punctuation; a text of nothing else keeps its symbols."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    plain = "".join(letter if letter.isalnum() else " " for letter in folded).split()
    return plain or folded.split()


def without_duplicates(items: Sequence[Item]) -> list[Item]:
    """The first of every group of items with the same words."""
    seen: set[tuple[str, ...]] = set()
    kept: list[Item] = []
    for item in items:
        key = tuple(words(item.text))
        if key not in seen:
            seen.add(key)
            kept.append(item)
    return kept


def spread(items: Sequence[Item], limit: int, *, seed: str) -> list[Item]:
    """`limit` items (or all, if fewer), one category after the other in a seeded order; input order is kept.

    The first n of a file would be one author's or one template's; this takes from all alike.
    """
    random = Random(seed)
    groups: dict[str, list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        groups[item.category].append(index)
    order = sorted(groups)
    random.shuffle(order)
    for name in order:
        random.shuffle(groups[name])
    rounds = max(map(len, groups.values()), default=0)
    picked = [groups[name][turn] for turn in range(rounds) for name in order if turn < len(groups[name])]
    return [items[index] for index in sorted(picked[:limit])]
