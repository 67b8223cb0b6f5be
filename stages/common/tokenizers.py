"""The verifier's tokenizer and chat template.

A tracked model folder may hold `template.json`: keyword arguments of the chat template, such as

    {"enable_thinking": false, "date_string": "26 Jul 2024"}

A prompt must be the same tomorrow: a template that asks for today's date is refused until one of them settles it. A
template that takes no date as an argument is given a clock that stands still: {"strftime_now": "2024-07-26"}.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from stages.common import hub

TEMPLATE = "template.json"
CLOCK = "strftime_now"  # what templates call for the date, and the name of the setting that stops it
Settings = Mapping[str, str | int | float | bool]


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
        self._settings = self._template_settings()
        self._render([{"role": "user", "content": "x"}])  # a template that cannot be used fails here

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
        return self._inner.apply_chat_template(chat, tokenize=tokenize, **{**self._settings, **how})

    def _template_settings(self) -> dict[str, Any]:
        path = self.folder / TEMPLATE
        settings: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        template = self._inner.get_chat_template()
        if unknown := [name for name in settings if name not in template]:
            raise ValueError(f"{path}: the chat template asks for nothing named {', '.join(unknown)}; leave it out")
        return settings | {CLOCK: _clock(settings.get(CLOCK), path)}


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def write_template(folder: Path, settings: Settings) -> None:
    """Keep the arguments of the chat template in a tracked model folder; nothing is written if there are none."""
    if settings:
        (folder / TEMPLATE).write_text(json.dumps(dict(settings), indent=1, sort_keys=True) + "\n")


def _clock(stopped_at: str | None, path: Path) -> Callable[[str], str]:
    """What a template gets for a clock: one that stands still, or one that refuses."""
    if stopped_at is not None:
        try:
            then = datetime.fromisoformat(stopped_at)
        except (TypeError, ValueError):
            raise ValueError(f"{path}: {CLOCK}: {stopped_at!r} is no date; write one like 2024-07-26") from None
        return then.strftime

    def refuse(_format: str) -> str:
        raise ValueError(
            f"{path.parent}: the chat template asks for today's date, and prompts would change from day to day; write "
            'models.verifier.template: {date_string: "26 Jul 2024"} in params.yaml if the template has date_string, '
            f'else {{{CLOCK}: "2024-07-26"}}'
        )

    return refuse
