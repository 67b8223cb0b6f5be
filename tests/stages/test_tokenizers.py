"""The chat template: its arguments, its date, what begins a text, and what is refused."""

import json
from datetime import date

import pytest
from tokenizers.processors import TemplateProcessing

from stages.common import tiny
from stages.common.tokenizers import CLOCK, TEMPLATE, load_tokenizer

LLAMA = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "Today: {{ date_string }}\n"
)
MISTRAL = "{{ bos_token }}{% set today = strftime_now('%Y-%m-%d') %}Today: {{ today }}\n"
THINKING = "{% if enable_thinking is defined and not enable_thinking %}no thinking\n{% endif %}"
TURNS = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"


def folder_of(path, template, settings=None, *, adds_bos=False):
    inner = tiny.byte_tokenizer()
    inner.chat_template = template
    if adds_bos:
        inner.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{tiny.TURN_START} $A", special_tokens=[(tiny.TURN_START, 1)]
        )
    inner.save_pretrained(path)
    if settings:
        (path / TEMPLATE).write_text(json.dumps(settings))
    return path


def prompt_text(folder):
    tokenizer = load_tokenizer(folder)
    return tokenizer.decode(tokenizer.encode_prompt(["hi"]))


@pytest.mark.parametrize("template", [LLAMA, MISTRAL])
def test_a_template_that_asks_for_the_date_is_refused_with_the_remedy(tmp_path, template):
    with pytest.raises(ValueError, match=r"today's date.*models\.verifier\.template: \{date_string: .*strftime_now"):
        load_tokenizer(folder_of(tmp_path, template + TURNS))


def test_a_date_given_as_an_argument_is_the_date(tmp_path):
    folder = folder_of(tmp_path, LLAMA + TURNS, {"date_string": "26 Jul 2024"})
    assert prompt_text(folder) == "Today: 26 Jul 2024\nuser: hi\n"


@pytest.mark.parametrize(("template", "wanted"), [(LLAMA, "26 Jul 2024"), (MISTRAL, "2024-07-26")])
def test_a_clock_may_be_stopped(tmp_path, template, wanted):
    folder = folder_of(tmp_path, template + TURNS, {CLOCK: "2024-07-26"})
    assert prompt_text(folder) == f"Today: {wanted}\nuser: hi\n"
    assert str(date.today().year) not in prompt_text(folder)


def test_a_clock_stops_at_a_date(tmp_path):
    with pytest.raises(ValueError, match=r"template\.json: strftime_now: '26 Jul' is no date"):
        load_tokenizer(folder_of(tmp_path, MISTRAL + TURNS, {CLOCK: "26 Jul"}))


def test_arguments_reach_every_way_to_render(tmp_path):
    plain = prompt_text(folder_of(tmp_path / "a", THINKING + TURNS))
    folder = folder_of(tmp_path / "b", THINKING + TURNS, {"enable_thinking": False})
    assert prompt_text(folder) == "no thinking\n" + plain
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.user_turn_prefix()) == "no thinking\nuser: "


def test_an_argument_that_the_template_does_not_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"template\.json: the chat template asks for nothing named enable_thinkng"):
        load_tokenizer(folder_of(tmp_path, THINKING + TURNS, {"enable_thinkng": False}))


def test_a_text_begins_once(tmp_path):
    """A template that writes the beginning-of-text token, and a tokenizer that adds it."""
    folder = folder_of(tmp_path, "{{ bos_token }}" + TURNS, adds_bos=True)
    tokenizer = load_tokenizer(folder)
    assert tokenizer._inner("hi")["input_ids"][0] == 1, "it does add the token"
    assert tokenizer.encode_prompt(["hi"]).count(1) == 1
    assert tokenizer.user_turn_prefix().count(1) == 1
    assert tokenizer.encode(tokenizer.decode(tokenizer.encode_prompt(["hi"]), skip_special=False)).count(1) == 1
    assert tokenizer.encode("hi").count(1) == 0


def test_a_prompt_may_contain_the_text_of_a_special_token(tmp_path):
    folder = folder_of(tmp_path, TURNS)
    ids = load_tokenizer(folder).encode_prompt(["say <|mask|> and <mask>"])
    assert min(ids) >= len(tiny.SPECIALS)
    assert max(ids) < tiny.VOCABULARY
