"""The verifier's tokenizer and chat template.

A tracked model folder may hold `template.json`: keyword arguments of the chat template, such as

    {"enable_thinking": false, "date_string": "26 Jul 2024"}

A prompt must be the same tomorrow: a template that asks for today's date is refused until one of them settles it. A
template that takes no date as an argument is given a clock that stands still: {"strftime_now": "2024-07-26"}.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from stages.common import hub

TEMPLATE = "template.json"
CLOCK = "strftime_now"  # what templates call for the date, and the name of the setting that stops it
CALL = re.compile(CLOCK + r"""\(\s*(['"])(.*?)\1\s*\)""")


class Tokenizer:
    """The verifier's tokenizer and what the rest of the project asks of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inner = AutoTokenizer.from_pretrained(hub.local_folder(folder))
        if self._inner.chat_template is None:
            raise ValueError(
                f"{folder}: the tokenizer has no chat template; add chat_template.jinja to the folder, or name a model "
                "that was trained to chat"
            )
        self.size = len(self._inner)
        self._template, self._settings = self._settled()

    def encode_prompt(self, turns: Sequence[str]) -> list[int]:
        """Ids of the chat so far (user and assistant in turn) up to the place where the assistant speaks.

        Rendered and tokenised in one call, so that a beginning-of-text id never comes twice.
        """
        roles = ("user", "assistant")
        chat = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        ids = self._render(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        return [int(i) for i in ids]

    def encode(self, text: str) -> list[int]:
        """Ids of a text that already carries its special tokens; none are added."""
        return [int(i) for i in self._inner(text, add_special_tokens=False)["input_ids"]]

    def user_turn_prefix(self) -> list[int]:
        """Ids of a chat up to the place where the user speaks (the bare template of Magpie, arXiv 2406.08464)."""
        marker = "\u2063user-turn\u2063"
        text = self._render([{"role": "user", "content": marker}])
        if marker not in text:
            raise ValueError(f"{self.folder}: the chat template rewrites what the user says")
        return self.encode(text[: text.index(marker)])

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=skip_special)

    def fingerprint(self) -> str:
        """Hash of the id-to-token map: two models speak the same ids only where it is equal."""
        vocabulary = sorted(self._inner.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()

    def _render(self, chat: list[dict[str, str]], *, tokenize: bool = False, **how: Any) -> Any:
        how = {"chat_template": self._template, **self._settings, **how}
        return self._inner.apply_chat_template(chat, tokenize=tokenize, **how)

    def _settled(self) -> tuple[str, dict[str, Any]]:
        """The template with a clock that stands still, and its arguments. ValueError if it asks for today's date."""
        path = self.folder / TEMPLATE
        settings: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        template = self._inner.get_chat_template()
        if unknown := [name for name in settings if name not in template]:
            raise ValueError(f"{path}: the chat template asks for nothing named {', '.join(unknown)}; leave it out")
        if (date := settings.pop(CLOCK, None)) is not None:
            return _stopped(template, date, path), settings
        days = [_stopped(template, date, path) for date in ("2000-01-01", "2011-11-22")]
        chat = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
        made = [self._inner.apply_chat_template(chat, tokenize=False, chat_template=day, **settings) for day in days]
        if made[0] != made[1]:
            raise ValueError(
                f"{self.folder}: the chat template asks for today's date, and prompts would change from day to day; "
                'write models.verifier.template: {date_string: "26 Jul 2024"} in params.yaml if the template has '
                f'date_string, else {{{CLOCK}: "2024-07-26"}}'
            )
        return days[0], settings


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def _stopped(template: str, date: str, path: Path) -> str:
    """The template with every call for the time answered by this date."""
    try:
        then = datetime.fromisoformat(date)
    except (TypeError, ValueError):
        raise ValueError(f"{path}: {CLOCK}: {date!r} is no date; write one like 2024-07-26") from None
    text = CALL.sub(lambda call: json.dumps(then.strftime(call[2])), template)
    if f"{CLOCK}(" in text:
        raise ValueError(f"{path.parent}: the chat template asks for the time in a way that is not understood")
    return text
