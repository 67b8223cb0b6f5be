"""Rows with named fields out of the formats that data sets come in: JSON lines, a JSON list, CSV, Parquet."""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

csv.field_size_limit(1 << 30)


class Record(NamedTuple):
    """A row, its number from 1 and where it stands, for messages."""

    place: str
    number: int
    value: dict[str, Any]


def read(content: bytes, *, where: str) -> Iterator[Record]:
    """Rows of a file's contents, one at a time; the ending of `where` says the format, and whatever else is JSON lines.

    ValueError names the line or row that cannot be read.
    """
    if where.endswith(".parquet"):
        return _parquet(content, where)
    text = _text(content, where)
    if where.removesuffix(".gz").endswith(".csv"):
        return _csv(text, where)
    if where.removesuffix(".gz").endswith(".json") and text.lstrip().startswith("["):
        return _json(text, where)
    return _json_lines(text, where)


def _text(content: bytes, where: str) -> str:
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: not readable as UTF-8 text ({error}); fetch it again") from None


def _json_lines(text: str, where: str) -> Iterator[Record]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{where}: line {number}"
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place}: not JSON ({error}); repair or remove the line") from None
            yield Record(place, number, _object(value, place, "line"))


def _json(text: str, where: str) -> Iterator[Record]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); fetch it again") from None
    for number, value in enumerate(values, start=1):
        place = f"{where}: row {number}"
        yield Record(place, number, _object(value, place, "row"))


def _object(value: Any, place: str, unit: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: not an object with named fields; repair or remove the {unit}")
    return value


def _csv(text: str, where: str) -> Iterator[Record]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for number, value in enumerate(reader, start=1):
            if None in value or None in value.values():
                raise ValueError(f"{where}: row {number}: not as many values as the first row has names; repair it")
            yield Record(f"{where}: row {number}", number, value)
    except csv.Error as error:
        raise ValueError(f"{where}: line {reader.line_num}: not CSV ({error}); fetch it again") from None


def _parquet(content: bytes, where: str) -> Iterator[Record]:
    try:
        rows = pq.ParquetFile(pa.BufferReader(content)).read().to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{where}: not Parquet ({(str(error).splitlines() or [''])[0]}); fetch it again") from None
    for number, value in enumerate(rows, start=1):
        yield Record(f"{where}: row {number}", number, value)
