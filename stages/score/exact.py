r"""Numbers as people and models write them, read exactly: a fraction, never a float.

    number("$1,234.50")   1234.5      number(r"\dfrac{3}{4}")  3/4      number("3 million")  3000000
    number("12 apples")   12          number("1 1/2")          3/2      number("x = 5")      5
    number("50%")         50, a percentage                              number("3x"), number("1, 2")  None

Read are thousands separators, currency signs, LaTeX fractions and spaces, mixed numbers, powers of ten, scale words, a
degree or percent sign and a unit behind the number. Whatever else stands there makes it no number: better none than
another one.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
UNIT_LETTERS = "mgshlLKCFNJWVA"  # units of one letter; any other single letter is a variable

_INTEGER = r"(?>\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?>{_INTEGER}(?:\.\d+)?|\.\d+)"
_POWER = r"(?:[eE][-+]?\d{1,3}(?!\d)|\s*(?:\\times|\\cdot|[×*x])\s*10\s*\^\s*\{?\s*[-+]?\d{1,3}\s*\}?)"
_FRACTION = rf"(?:\d+\s+)?{_DECIMAL}\s*/\s*{_DECIMAL}(?!\s*/)"
_VALUE = rf"(?:{_FRACTION}|{_DECIMAL}{_POWER}?)"
_SCALED = rf"(?:\s+(?:{'|'.join(SCALES)})\b)?"
_PERCENT = r"(?:\s*(?:%|percent\b|per cent\b))?"
_ALONE = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<value>{_VALUE})(?P<scale>{_SCALED})(?P<percent>{_PERCENT})(?P<unit>.*)", re.DOTALL
)
_IN_PROSE = re.compile(rf"(?<![\w.]){_VALUE}(?!(?:st|nd|rd|th)\b){_SCALED}{_PERCENT}")
_UNIT = re.compile(
    rf"\s*[A-Za-z]{{2,}}(?:[ /·-][A-Za-z]+)*(?:\^?[23²³])?|\s+[{UNIT_LETTERS}](?:/[A-Za-z]+)?(?:\^?[23²³])?"
)
_UNDRESSED = [
    (re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"(?<=\d)\s*(?=\\[dt]?frac)"), " "),
    (re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}"), r"\1/\2 "),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"\1/\2 "),
    (re.compile(r"(?<=\d)(?:\\[,!]|[\u2009\u202f])(?=\d{3})"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?\b|°"), " "),
    (re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[()\[\]]|\\?[$€£¥]|`|\*\*|__"), ""),
    (re.compile(r"\\[,;:! ]|[~\u00a0\u2009\u202f]"), " "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"[−–]"), "-"),
]


class Number(NamedTuple):
    """A value as it stands before its percent sign, if it has one."""

    value: Fraction
    percent: bool


def number(text: str) -> Number | None:
    """The number that the whole text is, behind its last equals sign; None if it is anything else."""
    plain = undressed(text).rpartition("=")[2].strip().rstrip(".,;:!").strip()
    found = _ALONE.fullmatch(plain)
    if found is None or (found["unit"] and not _UNIT.fullmatch(found["unit"])):
        return None
    value = _value(found["value"])
    if value is None:
        return None
    scale = SCALES.get(found["scale"].strip(), 1)
    return Number(value * scale * (-1 if found["sign"] == "-" else 1), bool(found["percent"]))


def equal(one: Number, other: Number) -> bool:
    """Equal as fractions; a percent sign is a unit that may be left out, or read as hundredths: 50% is 50 and 1/2."""
    if one.value == other.value:
        return True
    if one.percent == other.percent:
        return False
    percentage, share = (one, other) if one.percent else (other, one)
    return percentage.value / 100 == share.value


def in_prose(text: str) -> Iterator[str]:
    """Every number of a text, in order, as written: with sign, scale word and percent sign. Ordinals are none."""
    plain = undressed(text)
    for found in _IN_PROSE.finditer(plain):
        yield ("-" if _is_negative(plain[: found.start()]) else "") + found[0]


def undressed(text: str) -> str:
    """Without markup, currency and LaTeX's spaces and fractions."""
    for pattern, plain in _UNDRESSED:
        text = pattern.sub(plain, text)
    return text


def _is_negative(before: str) -> bool:
    """Whether a minus before a number is its sign: '= -3' and 'is -3', but neither '10 -3' nor 'top-3'."""
    if not before.endswith("-"):
        return False
    rest = before[:-1]
    left = rest.rstrip()
    if not left:
        return True
    return not (left[-1].isdigit() or left[-1] in ")]}%" or (left == rest and left[-1].isalpha()))


def _value(text: str) -> Fraction | None:
    """A mixed number, a fraction, or a decimal with a power of ten; None for a zero denominator."""
    plain = text.replace(",", "")
    if "/" in plain:
        top, _, bottom = plain.partition("/")
        whole, _, top = top.strip().rpartition(" ")
        below = Fraction(bottom.strip())
        return Fraction(whole.strip() or 0) + Fraction(top) / below if below else None
    if found := re.fullmatch(r"(\d*\.?\d+)[^\d.].*?([-+]?\d+)\s*\}?", plain):
        return Fraction(found[1]) * Fraction(10) ** int(found[2])
    return Fraction(plain)
