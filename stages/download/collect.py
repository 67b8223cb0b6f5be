"""From a part of params.yaml to items, and from items to the rows of a prompts file."""

from collections.abc import Callable, Sequence
from typing import Any

from stages.common.params import ParamError
from stages.common.provenance import prompt_sha256
from stages.download import generated, tabular
from stages.download.items import Item
from stages.download.params import PROMPT, File, Generator, Hub, Made, Magpie, Part, Stdlib, Wheel
from stages.download.stdlib import from_stdlib

Encode = Callable[[Sequence[str]], list[int]]


def items_of(
    part: Part, *, name: str, held_out: Sequence[int], magpie: Callable[[Magpie], list[Item]] | None
) -> list[Item]:
    """Every item of a part's source, before any choice. `magpie` needs a verifier: the caller brings it."""
    items = _of_source(part, name=name, held_out=held_out, magpie=magpie)
    return items if part.turns == "all" else [item._replace(more=()) for item in items]


def _of_source(
    part: Part, *, name: str, held_out: Sequence[int], magpie: Callable[[Magpie], list[Item]] | None
) -> list[Item]:
    source = part.source
    if isinstance(source, Wheel):
        return tabular.from_wheel(source, name=name)
    if isinstance(source, File):
        return tabular.from_file(source, name=name)
    if isinstance(source, Hub):
        return tabular.from_hub(source, name=name)
    if isinstance(source, Generator):
        return generated.from_generator(source, held_out=held_out)
    if isinstance(source, Made):
        return generated.from_made(source)
    if magpie is None:
        raise ParamError(f"{name}: source {source.source!r} makes training prompts, not a benchmark")
    if isinstance(source, Stdlib):
        return from_stdlib(source)
    return magpie(source)


def worded(text: str, wording: str) -> str:
    """The user's turn. Only line ends around the prompt are taken off, indentation is code."""
    return wording.replace(PROMPT, text.strip("\n"))


def rows(item: Item, *, split: str, wording: str, encode: Encode, prefix: str = "") -> list[dict[str, Any]]:
    """Rows of the prompts contract, one for each of the user's turns: `<id>`, `<id>#2` ..

    A row's `turns` end with its own; what the verifier answers to those before it is known when they are decoded. So
    its hash is that of the ids of every turn rendered alone.
    """
    turns = [worded(text, wording) for text in (item.text, *item.more)]
    ids = [encode([turn]) for turn in turns]
    return [
        {
            "id": prefix + item.id + (f"#{count}" if count > 1 else ""),
            "split": split,
            "turns": turns[:count],
            "reference": item.reference if count == 1 else None,
            "category": item.category,
            "prompt_sha256": prompt_sha256([token for turn in ids[:count] for token in turn]),
        }
        for count in range(1, len(turns) + 1)
    ]


def require(items: Sequence[Item], limit: int, *, key: str) -> None:
    """ValueError where a part has fewer prompts than it should give."""
    if len(items) < limit:
        raise ValueError(
            f"params.yaml: {key}: {len(items)} prompts are left for limit {limit}; lower `limit` or "
            "enlarge the source (`size`, `attempts`, `modules`)"
        )
