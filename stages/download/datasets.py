"""Which files of a hub data set a configuration and split are: by its card, else by where they lie."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

READABLE = (".jsonl", ".jsonl.gz", ".json", ".csv", ".csv.gz", ".parquet")
HEADER = re.compile(r"\A\ufeff?---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
DEFAULT = "default"


def files_of(card: str, names: Sequence[str], *, config: str | None, split: str, where: str) -> list[str]:
    """The files in order. card: README.md, or nothing. ValueError lists what there is."""
    declared = _declared(card, where)
    patterns = _patterns(declared, config, split, where) if declared else list(_conventional(config, split))
    found = [name for pattern in patterns for name in sorted(names) if _matches(name, pattern)]
    if not found:
        there = ", ".join(name for name in sorted(names) if name.endswith(READABLE)) or "no file that can be read"
        wanted = f"split {split!r}, config {config or DEFAULT!r}"
        raise ValueError(f"{where}: no file of {wanted}; name `file` (there: {there})")
    if odd := [name for name in found if not name.endswith(READABLE)]:
        raise ValueError(f"{where}: {odd[0]} is none of {', '.join(READABLE)}; name another `file`")
    return list(dict.fromkeys(found))


def _declared(card: str, where: str) -> dict[str, Any]:
    """Entries of the card's `configs` that list files, by name."""
    header = HEADER.match(card)
    try:
        facts = YAML(typ="safe").load(io.StringIO(header[1])) if header else None
    except YAMLError as error:
        raise ValueError(f"{where}: README.md: not readable as YAML: {' '.join(str(error).split())}") from None
    configs = facts.get("configs") if isinstance(facts, Mapping) else None
    return {
        str(entry.get("config_name", DEFAULT)): entry
        for entry in configs or ()
        if isinstance(entry, Mapping) and "data_files" in entry
    }


def _patterns(declared: Mapping[str, Any], config: str | None, split: str, where: str) -> list[str]:
    """What the card says of the split: a path, a list of paths, or paths by split."""
    only = next(iter(declared)) if len(declared) == 1 else None
    marked = next((name for name, entry in declared.items() if entry.get("default")), None)
    chosen = config or (DEFAULT if DEFAULT in declared else marked or only)
    if chosen is None or chosen not in declared:
        raise ValueError(f"{where}: no config {chosen or config!r}; write one of {', '.join(declared)}")
    folder, data = str(declared[chosen].get("data_dir") or ""), declared[chosen]["data_files"]
    by_split: dict[str, list[str]] = {}
    for entry in data if isinstance(data, list) else [data]:
        if isinstance(entry, Mapping) and "path" in entry:
            paths, name = entry["path"], str(entry.get("split", "train"))
        elif isinstance(entry, Mapping):
            by_split |= {str(key): _listed(value) for key, value in entry.items()}
            continue
        else:
            paths, name = entry, "train"  # what the hub calls files without a split
        by_split[name] = by_split.get(name, []) + _listed(paths)
    if split not in by_split:
        raise ValueError(f"{where}: config {chosen!r} has no split {split!r}; write one of {', '.join(by_split)}")
    return [str(PurePosixPath(folder, path)) for path in by_split[split]]


def _listed(paths: Any) -> list[str]:
    return [str(path) for path in (paths if isinstance(paths, list) else [paths])]


def _conventional(config: str | None, split: str) -> Iterator[str]:
    """<config>/<split>-00000-of-00001.parquet, data/<split>-.., <split>.jsonl, with or without a number."""
    folders = [config] if config else ["data", DEFAULT, "main", ""]
    for folder in folders:
        for name in (f"{split}-*", f"{split}.*"):
            yield str(PurePosixPath(folder, name))


def _matches(name: str, pattern: str) -> bool:
    """A star stays within its folder, two do not."""
    mine, wanted = PurePosixPath(name).parts, PurePosixPath(pattern).parts
    if "**" in pattern:
        return fnmatchcase(name, pattern.replace("**/", "*").replace("**", "*"))
    return len(mine) == len(wanted) and all(fnmatchcase(a, b) for a, b in zip(mine, wanted, strict=True))
