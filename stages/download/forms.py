"""Data sets whose rows are no prompts yet, by name: what their fields hold together (`form` of a source).

    gsm8k          `question`; the reference is what stands behind #### in `answer`
    mbpp           the task and its asserts; the reference is the asserts, which the grader `code` runs
    gpqa           the question and its four options, in an order keyed by the record; the reference is a letter
    livecodebench  the question and its starter code; the reference is the public tests, which no grader runs yet
    alpaca         the instruction and, where there is one, its input

Sentences around a prompt (how to answer, in a box or in a fence) are the part's `wording`, in params.yaml.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from stages.download.items import Item
from stages.download.records import Record

LETTERS = "ABCD"
WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def item_of(form: str, record: Record, *, name: str) -> Item:
    """The prompt of a row; `name` is the category where the data set has none. ValueError names a missing field."""
    return _FORMS[form](_Row(record), name)


class _Row:
    """A row that says what it lacks."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.value: Mapping[str, Any] = record.value

    def __getitem__(self, field: str) -> Any:
        found = self.value.get(field)
        if found is None:
            raise ValueError(
                f"{self.record.place}: no field {field!r}; correct `form` (there: {', '.join(self.value)})"
            )
        return found

    def text(self, field: str) -> str:
        """Non-empty text, its outer blank space taken off."""
        found = self[field]
        if not isinstance(found, str) or not found.strip():
            raise ValueError(f"{self.record.place}: field {field!r} holds no text; repair or remove the row")
        return found.strip()


def _gsm8k(row: _Row, name: str) -> Item:
    _, hashes, reference = row.text("answer").rpartition("####")
    if not hashes or not reference.strip():
        raise ValueError(f"{row.record.place}: no #### with an answer behind it; write `fields` if this is not GSM8K")
    return Item(f"{name}-{row.record.number}", row.text("question"), reference.strip(), name)


def _mbpp(row: _Row, name: str) -> Item:
    """The full set calls the task `text`, the sanitized one `prompt`; what the asserts stand on, too, has two names."""
    task = row.text("text" if row.value.get("text") else "prompt")
    asserts = [line.replace("\r\n", "\n").strip() for line in row["test_list"]]
    setup = row.value.get("test_setup_code") or "\n".join(row.value.get("test_imports") or [])
    reference = "\n".join(filter(None, [setup.replace("\r\n", "\n").strip(), *asserts]))
    return Item(f"{name}-{row['task_id']}", "\n".join([task, "", *asserts]), reference, name)


def _gpqa(row: _Row, name: str) -> Item:
    """The order of the options hangs on the record alone: the same on every machine and in every subset."""
    record, right = str(row["Record ID"]), row.text("Correct Answer")
    options = [right, *(row.text(field) for field in WRONG)]
    order = sorted(range(len(options)), key=lambda i: hashlib.sha256(f"{record}\0{i}".encode()).digest())
    lines = [f"{letter}) {options[i]}" for letter, i in zip(LETTERS, order, strict=True)]
    category = str(row.value.get("High-level domain") or name)
    return Item(record, "\n".join([row.text("Question"), "", *lines]), LETTERS[order.index(0)], category)


def _livecodebench(row: _Row, name: str) -> Item:
    starter = str(row.value.get("starter_code") or "").strip("\n")
    text = row.text("question_content") + (f"\n\n```python\n{starter}\n```" if starter.strip() else "")
    return Item(str(row["question_id"]), text, row.text("public_test_cases"), str(row.value.get("difficulty") or name))


def _alpaca(row: _Row, name: str) -> Item:
    given = str(row.value.get("input") or "").strip()
    text = row.text("instruction") + (f"\n\n{given}" if given else "")
    return Item(f"{name}-{row.record.number}", text, row.value.get("output") or None, name)


_FORMS: dict[str, Callable[[_Row, str], Item]] = {
    "gsm8k": _gsm8k,
    "mbpp": _mbpp,
    "gpqa": _gpqa,
    "livecodebench": _livecodebench,
    "alpaca": _alpaca,
}
