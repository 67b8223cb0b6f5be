"""From a part of params.yaml to items, and from items to the rows of a prompts file."""

from collections.abc import Callable, Sequence
from typing import Any

from stages.common.params import ParamError
from stages.common.provenance import prompt_sha256
from stages.download import generated, jsonl
from stages.download.items import Item
from stages.download.params import PROMPT, File, Generator, Made, Magpie, Part, Stdlib, Wheel
from stages.download.stdlib import from_stdlib

Encode = Callable[[Sequence[str]], list[int]]


def items_of(
    part: Part, *, name: str, held_out: Sequence[int], magpie: Callable[[Magpie], list[Item]] | None
) -> list[Item]:
    """Every item of a part's source, before any choice. `magpie` needs a verifier: the caller brings it."""
    source = part.source
    if isinstance(source, Wheel):
        return jsonl.from_wheel(source, name=name)
    if isinstance(source, File):
        return jsonl.from_file(source, name=name)
    if isinstance(source, Generator):
        return generated.from_generator(source, held_out=held_out)
    if isinstance(source, Made):
        return generated.from_made(source)
    if magpie is None:
        raise ParamError(f"{name}: source {source.source!r} makes training prompts, not a benchmark")
    if isinstance(source, Stdlib):
        return from_stdlib(source)
    return magpie(source)


def worded(item: Item, wording: str) -> str:
    """The user's turn. Only line ends around the prompt are taken off, indentation is code."""
    return wording.replace(PROMPT, item.text.strip("\n"))


def row(item: Item, *, split: str, wording: str, encode: Encode, prefix: str = "") -> dict[str, Any]:
    """A row of the prompts contract; its hash is that of the rendered prompt's ids."""
    turns = [worded(item, wording)]
    return {
        "id": prefix + item.id,
        "split": split,
        "turns": turns,
        "reference": item.reference,
        "category": item.category,
        "prompt_sha256": prompt_sha256(encode(turns)),
    }


def require(items: Sequence[Item], limit: int, *, key: str) -> None:
    """ValueError where a part has fewer prompts than it should give."""
    if len(items) < limit:
        raise ValueError(
            f"params.yaml: {key}: {len(items)} prompts are left for limit {limit}; lower `limit` or "
            "enlarge the source (`size`, `attempts`, `modules`)"
        )
