"""Every path and every file format of the pipeline, written so that a file is either whole or absent.

Paths are functions of the profile, relative to the repository root. Files go to a temporary sibling first,
are synced and renamed. Readers check footer, schema and rows, and name the stage that makes the file again.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA = Path("data")
REPORTS = Path("reports")


# Paths ------------------------------------------------------------------------------------------------------


def verifier_folder(profile: str) -> Path:
    return DATA / profile / "models" / "verifier"


def foreign_folder(profile: str) -> Path:
    """A published drafter, where the profile's models name one."""
    return DATA / profile / "models" / "drafter"


def prompts_file(profile: str, name: str) -> Path:
    """`name` is a benchmark or "corpus"."""
    return DATA / profile / "prompts" / f"{name}.parquet"


def corpus_file(profile: str) -> Path:
    return prompts_file(profile, "corpus")


def trajectories_file(profile: str) -> Path:
    return DATA / profile / "trajectories.parquet"


def contexts_folder(profile: str) -> Path:
    """What the verifier cached while it wrote the trajectories."""
    return DATA / profile / "contexts"


def drafter_folder(profile: str, objective: str) -> Path:
    """`objective` is "adapt" (the unaligned drafter) or a distillation objective."""
    return DATA / profile / "drafters" / objective


def curves_file(profile: str, objective: str) -> Path:
    return DATA / profile / "curves" / f"{objective}.csv"


def checkpoints_folder(profile: str, objective: str) -> Path:
    return DATA / profile / "checkpoints" / objective


def checkpoint_folder(profile: str, objective: str, step: int) -> Path:
    return checkpoints_folder(profile, objective) / f"step_{step}"


def export_folder(profile: str, drafter: str) -> Path:
    """A drafter as a folder for others."""
    return DATA / profile / "exports" / drafter


def manifest_file(profile: str, method: str) -> Path:
    """Which drafter a method decodes with, and its hash."""
    return DATA / profile / "drafts_with" / f"{method}.json"


def cell_file(profile: str, benchmark: str, method: str) -> Path:
    return DATA / profile / "cells" / benchmark / f"{method}.parquet"


def report_folder(profile: str) -> Path:
    return REPORTS / profile


def scratch_file(*parts: str) -> Path:
    """Downloads and resume state: safe to delete at any time."""
    return DATA.joinpath("scratch", *parts)


def stage_of(path: str | Path) -> str:
    """The stages that may make a file, for error messages."""
    parts = Path(path).parts
    for part, stage in (
        ("models", "models"),
        ("prompts", "corpus" if Path(path).stem == "corpus" else "benchmark"),
        ("trajectories.parquet", "trajectories"),
        ("contexts", "trajectories"),
        ("features", "features"),
        ("drafters", "adapt" if "adapt" in parts else "distill baselines"),
        ("curves", "adapt" if Path(path).stem == "adapt" else "distill baselines"),
        ("checkpoints", "distill"),
        ("drafters_of_size", "sizes"),
        ("exports", "export"),
        ("drafts_with", "drafter"),
        ("cells", "evaluate"),
        ("grids", "grid"),
        ("sweeps", "points" if Path(path).stem == "points" else "sweep"),
        ("graded", "score"),
        ("reports", "report"),
    ):
        if part in parts:
            return stage
    return ""


def _remedy(path: Path) -> str:
    return f"run dvc repro {stage_of(path)}".rstrip()


# Schemas ----------------------------------------------------------------------------------------------------


def _schema(**types: pa.DataType) -> pa.Schema:
    """Fields are required; a name that ends in `_or_null` may be null."""
    return pa.schema(
        [
            pa.field(name.removesuffix("_or_null"), kind, nullable=name.endswith("_or_null"))
            for name, kind in types.items()
        ]
    )


_TEXT, _INT, _SECONDS, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_IDS = pa.list_(pa.int32())

PROMPTS = _schema(
    id=_TEXT, split=_TEXT, turns=pa.list_(_TEXT), reference_or_null=_TEXT, category=_TEXT, prompt_sha256=_TEXT
)
TRAJECTORIES = _schema(
    id=_TEXT, prompt_ids=_IDS, output_ids=_IDS, finish_reason=_TEXT, temperature=pa.float64(), seed=_INT
)
CELLS = _schema(
    benchmark=_TEXT,
    split=_TEXT,
    method=_TEXT,
    prompt_id=_TEXT,
    repeat=_INT,
    seed=_INT,
    temperature=pa.float64(),
    output_ids=_IDS,
    new_tokens=_INT,
    accepted=pa.list_(pa.int16()),  # one entry for each cycle
    num_draft_tokens=_INT,
    window=_INT,
    nodes=_INT,
    prefill_s=_SECONDS,
    decode_s=_SECONDS,
    draft_s=_SECONDS,
    verify_s=_SECONDS,
    other_s=_SECONDS,
    yardstick_tokens=_INT,
    yardstick_s=_SECONDS,
    step_s=_SECONDS,
    text=_TEXT,
    answer_or_null=_TEXT,
    correct_or_null=_FLAG,
    matches_vanilla=_FLAG,
    first_difference=_INT,
    top2_gap=pa.float64(),
    excused=_FLAG,
    covered_tokens=_INT,
)


# Parquet ----------------------------------------------------------------------------------------------------


def write_parquet(
    path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema, provenance: Mapping[str, Any]
) -> None:
    """Write rows whose keys are exactly the schema's; `provenance` becomes JSON in the file's metadata."""
    names = set(schema.names)
    for number, row in enumerate(rows):
        assert set(row) == names, f"{path}: row {number}: keys {sorted(set(row) ^ names)} do not match the schema"
        empty = [field.name for field in schema if not field.nullable and row[field.name] is None]
        assert not empty, f"{path}: row {number}: {empty} must not be null"
    metadata = {b"provenance": json.dumps(provenance, sort_keys=True).encode()}
    table = pa.Table.from_pylist(list(rows), schema=schema.with_metadata(metadata))
    with replacing(path) as partial:
        pq.write_table(table, partial, compression="zstd")


def read_parquet(path: Path, schema: pa.Schema) -> list[dict[str, Any]]:
    """Rows as dictionaries; ValueError if the file is missing, damaged or of another schema."""
    table = _table(path)
    if not table.schema.equals(schema, check_metadata=False):
        have = {(field.name, str(field.type), field.nullable) for field in table.schema}
        want = {(field.name, str(field.type), field.nullable) for field in schema}
        odd = sorted({name for name, *_ in have ^ want}) or ["the order of columns"]
        raise ValueError(f"{path}: columns do not match the contract ({', '.join(odd)}); {_remedy(path)}")
    return table.to_pylist()


def read_provenance(path: Path) -> dict[str, Any]:
    """The provenance stored with a Parquet file."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged(path, error) from None
    if b"provenance" not in metadata:
        raise ValueError(f"{path}: carries no provenance; {_remedy(path)}")
    return json.loads(metadata[b"provenance"])


def _table(path: Path) -> pa.Table:
    try:
        # One file, read as it stands: a reader of datasets would guess columns from folder names.
        return pq.ParquetFile(path).read()
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ValueError:
    if isinstance(error, FileNotFoundError):
        return ValueError(f"{path}: not found; {_remedy(path)}")
    reason = (str(error).splitlines() or ["unreadable"])[0]
    return ValueError(f"{path}: damaged or half-written ({reason}); delete it and {_remedy(path)}")


# JSON, text, folders ----------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: not found; {_remedy(path)}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not readable as JSON ({error}); delete it and {_remedy(path)}") from None


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as partial:
        partial.write_bytes(content)


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Fill the yielded folder; it takes the place of `path` on success, on any error `path` stays."""
    path = Path(path)
    partial, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in _files(partial):
            _sync(file)
        if path.exists():
            path.rename(old)
        partial.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write the yielded sibling; it takes the place of `path` on success, on any error `path` stays."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        _sync(partial)
        os.replace(partial, path)
        _sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Digests ----------------------------------------------------------------------------------------------------


def sha256_file(path: Path) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_folder(path: Path) -> str:
    """Digest over the sorted relative names and contents of a folder's files."""
    digest = hashlib.sha256()
    for file in _files(Path(path)):
        digest.update(f"{file.relative_to(path).as_posix()}\0{sha256_file(file)}\n".encode())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())
