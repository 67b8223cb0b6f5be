r"""The letter that a text chooses (GPQA): in the last box, else behind the last "answer is", else the last line.

    \boxed{B}   \boxed{\text{(B)}}   The answer is **(B)**.   Answer: B) ice   B

A letter counts alone or where the option's sign stands behind it, so neither "answer is a guess" nor "Box" is one.
"""

import re

from stages.score.extract import boxed

_DRESSED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_LETTER = r"[\s*_(\[$\"']*([A-Z])(?![A-Za-z'’])[)\]*_]*"
_ALONE = re.compile(rf"{_LETTER}(?:[.):,].*|\s*)", re.DOTALL)
_SAID = r"\b(?:answer|choice|option)\b[ \w*_]{0,40}?(?:\bis\b|:|=)[\s:*_]*(?:(?:option|choice)\s+)?"
_ANNOUNCED = re.compile(rf"(?i:{_SAID}){_LETTER}(?=[\s.,:;$]|$)")


def letter(text: str) -> str | None:
    """The capital letter; None if the text names none."""
    box = boxed(text)
    if box is not None:
        return _alone(_DRESSED.sub(r"\1", box))
    if found := _ANNOUNCED.findall(text):
        return found[-1]
    lines = text.strip().splitlines()
    return _alone(lines[-1]) if lines else None


def _alone(text: str) -> str | None:
    found = _ALONE.fullmatch(text.strip())
    return found[1] if found else None
