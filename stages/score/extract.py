r"""Final answers out of texts, and whether an answer is right. No model and no clock: scoring again takes seconds.

The answer is, in this order: the last closed \boxed{..} (or \fbox, or \boxed 2 without braces); the number behind the
last ####; what the last "answer is" or "answer:" announces; the last number, which counts only in a text that came to
its end, since in one that was cut it may stand anywhere.

Two numbers are compared exactly (exact.py). Where one of the two is an expression, math-verify decides; where both are
words, the words do, without case and spacing.
"""

import logging
import re
from collections.abc import Iterable

from stages.score.exact import equal, in_prose, number, undressed

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_HASHES = re.compile(r"^\s*####(?!#)[ \t]*(.+)$", re.MULTILINE)
_ANNOUNCED = re.compile(r"\banswer\b[ \w'\"*_]{0,60}?(?:\bis\b|\bwas\b|:|=)[\s:*_]*(.+)", re.IGNORECASE)
_OPERATORS = "+-*/=×÷·^"
_MATHS = re.compile(r"[\\^_=<>+*/()\[\]{}]|\d")


def final_answer(text: str, *, whole: bool) -> str | None:
    """The answer as written; None if there is none. `whole`: the text was not cut by the limit of tokens."""
    for stated in (boxed(text), behind_hashes(text), announced(text)):
        if stated is not None:
            return stated
    return _last(in_prose(text)) if whole else None


def boxed(text: str) -> str | None:
    """What the last closed box holds: braces are balanced, an escaped one does not count."""
    found = None
    for box in _BOX.finditer(text):
        inner = _braced(text, box.end()) if text[box.end() : box.end() + 1] == "{" else _bare(text, box.end())
        found = inner or found
    return found


def behind_hashes(text: str) -> str | None:
    """What stands behind the last #### that a number follows; a heading of that depth is no answer."""
    return _last(line.strip() for line in _HASHES.findall(text) if number(line) is not None)


def announced(text: str) -> str | None:
    """What the last "answer is" names: a number it begins with, the result of an equation, else the line's last number,
    else its words."""
    line = _last(_ANNOUNCED.findall(text))
    if line is None:
        return None
    plain = undressed(line).strip().lstrip("*_: ")
    found = list(in_prose(plain))
    if found and plain.startswith(found[0]):
        behind = plain.removeprefix(found[0]).lstrip()
        if not behind.startswith(tuple(_OPERATORS)):
            return found[0]
    if number(plain) is not None:
        return plain.rpartition("=")[2].strip(" .")
    return _last(found) or line.strip(" .*_\"'") or None


def canonical(answer: str) -> str:
    """One spelling for answers that are equal: what a vote counts."""
    value = number(answer)
    return " ".join(undressed(answer).casefold().split()).rstrip(".") if value is None else str(value.value)


def is_right(answer: str, reference: str) -> bool:
    """Whether an answer is the reference: exactly for numbers, as mathematics for expressions, else as words."""
    mine, wanted = number(answer), number(reference)
    if mine is not None and wanted is not None:
        return equal(mine, wanted)
    if canonical(answer) == canonical(reference):
        return True
    return bool(_MATHS.search(answer) and _MATHS.search(reference)) and _same_mathematics(answer, reference)


def _same_mathematics(answer: str, reference: str) -> bool:
    """math-verify's word on two expressions; what it cannot read is not right."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # an unreadable answer is a wrong one, not an error
    wanted, mine = (parse(f"${text.strip(' $')}$", fallback_mode="no_fallback") for text in (reference, answer))
    return bool(wanted and mine and verify(wanted, mine))


def _braced(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and its partner; None if it has none, or nothing stands there."""
    depth, place = 0, start
    while place < len(text):
        letter = text[place]
        if letter == "\\":
            place += 1
        elif letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : place].strip() or None
        place += 1
    return None


def _bare(text: str, start: int) -> str | None:
    found = re.match(r"[^\s$]+", text[start:])
    return found[0].rstrip(".,;:!") or None if found else None


def _last(found: Iterable[str]) -> str | None:
    return next(reversed([*found]), None)
