"""Tables of benchmarks: Markdown with what produced it, and the same rows as CSV."""

import csv
import io
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from stages.common import provenance, store

T = TypeVar("T")


def setting(module: str, *, dtype: torch.dtype, root: Path, argv: Sequence[str] | None = None) -> list[str]:
    """Lines above a table: command, machine, versions, commit of the code in `root`."""
    stamp = provenance.stamp(device="cpu", dtype=dtype)
    words = shlex.join(sys.argv[1:] if argv is None else list(argv))
    return [
        f"`python -m {module} {words}`",
        "",
        f"{stamp['device']}, {stamp['cores']} cores, {stamp['threads']} threads, {stamp['dtype']}; Python "
        f"{stamp['python']}, torch {stamp['torch']}, transformers {stamp['transformers']}; commit {commit(root)}.",
        "",
    ]


def commit(root: Path) -> str:
    """Short name of the commit, with `-dirty` where tracked files differ from it; `unknown` outside Git."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def turns(contestants: Sequence[T], number: int) -> list[T]:
    """In the order of a round: another one first each time, so that none is always behind the same other."""
    first = number % max(1, len(contestants))
    return [*contestants[first:], *contestants[:first]]


def markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A table whose columns are the first row's keys."""
    columns = list(rows[0])
    cells = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in rows)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells]


def interval(value: float, low: float, high: float, digits: int = 2) -> str:
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, columns in the order they first appear; empty where a row has none, or None."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def publish(out: Path | None, lines: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the page, and write it if `out` says where."""
    page = "\n".join(lines) + "\n"
    print(page)
    if out is not None:
        store.write_text(out.with_name(f"{out.name}.md"), page)
        store.write_text(out.with_name(f"{out.name}.csv"), csv_text(rows))
