"""The training mixture: its sources, its selection and its file."""

from dataclasses import replace

import pytest
import torch

from stages.common import store, tiny
from stages.common.decode import Decoded
from stages.common.tokenizers import load_tokenizer
from stages.download import generated, magpie, stdlib
from stages.download.collect import worded
from stages.download.corpus import make_corpus
from stages.download.items import Item, spread, without_duplicates, words
from stages.download.params import Corpus, Generator, Made, Magpie, Part, Stdlib

GSM = Generator(source="generator", dataset="gsm_symbolic", seed=5, size=200)
HELD_OUT = (0, 1, 2, 3, 4, 5, 6, 7)


def encode(turns):
    return [ord(letter) for turn in turns for letter in turn]


def part(source, limit, wording="{prompt}"):
    return Part(source=source, limit=limit, wording=wording)


def test_spread_takes_from_all_categories_alike():
    items = [Item(str(i), f"text {i}", None, "big" if i < 90 else f"small{i % 5}") for i in range(100)]
    chosen = spread(items, 12, seed="0/x")
    counts = {}
    for item in chosen:
        counts[item.category] = counts.get(item.category, 0) + 1
    assert len(chosen) == 12
    assert sorted(counts.values()) == [2, 2, 2, 2, 2, 2]
    assert chosen == sorted(chosen, key=lambda item: int(item.id))
    assert chosen == spread(items, 12, seed="0/x")
    assert chosen != spread(items, 12, seed="1/x")
    assert spread(items, 200, seed="0/x") == items
    assert spread([], 3, seed="0/x") == []


def test_words_ignore_case_spacing_and_punctuation():
    assert words("What  is\t2+3?") == words("WHAT is: 2, 3") == ["what", "is", "2", "3"]
    assert words("++ --") == ["++", "--"]
    items = [Item("a", "One two", None, "x"), Item("b", "one TWO!", None, "x"), Item("c", "two one", None, "x")]
    assert [item.id for item in without_duplicates(items)] == ["a", "c"]


def test_wording_keeps_indentation_and_braces():
    item = Item("a", '\ndef f(x):\n    """{x}"""\n', None, "x")
    assert worded(item.text, "Do:\n{prompt}\n") == 'Do:\ndef f(x):\n    """{x}"""\n'
    with pytest.raises(ValueError, match="exactly once"):
        part(GSM, 1, "no place")


def test_templates_are_held_out_whole():
    others = generated.from_generator(replace(GSM, templates="others"), held_out=HELD_OUT)
    held_out = generated.from_generator(replace(GSM, templates="held_out"), held_out=HELD_OUT)
    everything = generated.from_generator(GSM, held_out=HELD_OUT)
    held = {f"template_{number:02d}" for number in HELD_OUT}
    assert held_out
    assert {item.category for item in held_out} <= held
    assert not {item.category for item in others} & held
    assert sorted(others + held_out) == sorted(everything)


def test_a_template_is_what_its_name_says():
    """Items of one category share their fixed words, items of different categories do not."""
    items = generated.from_generator(replace(GSM, size=600), held_out=())
    groups = {}
    for item in items:
        groups.setdefault(item.category, []).append(set(words(item.text)))
    common = {name: set.intersection(*group) for name, group in groups.items() if len(group) > 3}
    assert len(common) > 50
    for name, fixed in common.items():
        strangers = [group[0] for other, group in groups.items() if other != name]
        assert len(fixed) > 10
        assert not any(fixed <= stranger for stranger in strangers)


def test_generator_takes_off_the_ending_and_keeps_the_answer():
    ending = " Give the result as your final answer. Do not include units."
    whole, cut = (
        generated.from_generator(replace(GSM, size=5, without=without), held_out=()) for without in ("", ending)
    )
    assert [item.text for item in whole] == [item.text + ending for item in cut]
    assert all(float(item.reference) >= 0 for item in cut)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dataset": "nope"}, "nope"),
        ({"dataset": "chain_sum", "options": {"min_term": 3}}, "options"),
        ({"dataset": "chain_sum", "templates": "others"}, "templates: all"),
        ({"size": 1, "templates": "held_out"}, "raise `size`"),
    ],
)
def test_generator_errors_name_dataset_and_remedy(change, said):
    with pytest.raises(ValueError, match=said):
        generated.from_generator(replace(GSM, **change), held_out=(99,))


def test_unknown_template_is_named():
    with pytest.raises(ValueError, match=r"held_out_templates: \[32\]"):
        generated.from_generator(GSM, held_out=(32,))


def test_stdlib_gives_signature_and_docstring_only():
    source = Stdlib(source="stdlib", modules=("heapq", "textwrap", "os", "email.utils"), min_words=5, max_words=150)
    items = {item.id: item for item in stdlib.from_stdlib(source)}
    assert items == {item.id: item for item in stdlib.from_stdlib(source)}
    text = items["textwrap.dedent"].text
    assert text.startswith("def dedent(text):\n")
    assert text.rstrip().endswith('"""')
    assert "re.sub" not in text
    method = items["textwrap.TextWrapper.wrap"].text
    assert method.startswith("def wrap(self, text):\n    ")
    for item in items.values():
        compile(item.text, item.id, "exec")
        assert not item.id.split(".")[-1].startswith("_")
    with pytest.raises(ValueError, match=r"'no_such'.*take it off"):
        stdlib.from_stdlib(replace(source, modules=("no_such",)))


def test_magpie_keeps_what_can_be_used():
    texts = ["  How do birds fly?\n", "How", "", "Tell me more about", "Use <|im_start|> here please", "a b c \ufffd d"]
    decoded = [Decoded([1], "stop")] * 3 + [Decoded([1], "length")] + [Decoded([1], "stop")] * 2
    kept = magpie.keep(texts, decoded, min_words=3)
    assert [(item.id, item.text) for item in kept] == [("0", "How do birds fly?")]


def test_magpie_continues_the_bare_user_header(tmp_path, monkeypatch):
    tiny.save_tiny(tmp_path, tiny.build_tiny("llama", seed=0))
    tokenizer = load_tokenizer(tmp_path)
    source = Magpie(source="magpie", attempts=5, seed=3, temperature=0.7, max_new_tokens=20, batch_size=2, min_words=3)
    asked = {}

    def decode_batch(verifier, prompts, *, keys, progress, **settings):
        asked.update(settings, prompts=prompts, keys=keys)
        progress(20, len(prompts))
        return [Decoded([*tokenizer.encode(f"Tell me about {key}?"), 2], "stop") for key in keys]

    monkeypatch.setattr(magpie, "decode_batch", decode_batch)
    items = magpie.from_magpie(source, folder=tmp_path, dtype=torch.float32, device="cpu")
    assert [item.text for item in items] == [f"Tell me about magpie/{i}?" for i in range(5)]
    assert asked["temperature"] == 0.7
    assert (asked["seed"], asked["max_new_tokens"], asked["batch_size"]) == (3, 20, 2)
    assert len(set(asked["keys"])) == 5
    header = tokenizer.decode(asked["prompts"][0], skip_special=False)
    assert header == "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\n"


@pytest.fixture
def mixture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Corpus(
        max_prompt_tokens=400,
        parts={
            "maths": part(replace(GSM, templates="others"), 20, "{prompt}\nThink."),
            "code": part(Stdlib(source="stdlib", modules=("heapq", "glob"), min_words=5, max_words=99), 4),
            "made": part(Made(source="made", kind="open", seed=1, size=30), 5),
            "open": part(
                Magpie(
                    source="magpie", attempts=9, seed=1, temperature=1.0, max_new_tokens=9, batch_size=2, min_words=1
                ),
                3,
            ),
        },
    )


def write(params):
    def instructions(source):
        return [Item(str(i), f"Please tell me about number {i}", None, "magpie") for i in range(source.attempts)]

    return make_corpus("p", params, held_out=HELD_OUT, seed=0, encode=encode, magpie=instructions)


def test_corpus_file(mixture):
    assert write(mixture) == {"maths": 20, "code": 4, "made": 5, "open": 3}
    path = store.corpus_file("p")
    rows = store.read_parquet(path, store.PROMPTS)
    assert len({row["id"] for row in rows}) == len(rows) == 32
    assert {row["split"] for row in rows} == {"train"}
    assert all(len(row["prompt_sha256"]) == 64 for row in rows)
    maths = [row for row in rows if row["id"].startswith("maths/")]
    assert all(row["turns"][0].endswith("\nThink.") and row["reference"] for row in maths)
    assert not {row["category"] for row in maths} & {f"template_{number:02d}" for number in HELD_OUT}
    assert store.read_provenance(path)["python"]
    first = path.read_bytes()
    write(mixture)
    assert path.read_bytes() == first


def test_too_few_prompts_is_an_error_and_leaves_nothing(mixture):
    short = replace(mixture, max_prompt_tokens=3)
    with pytest.raises(ValueError, match=r"p\.download\.corpus\.parts\.maths: 0 prompts.*lower `limit`"):
        write(short)
    assert not store.corpus_file("p").exists()


def test_prompt_hash_follows_the_rendered_prompt(tmp_path, monkeypatch, mixture):
    tiny.save_tiny(tmp_path / "a", tiny.build_tiny("llama", seed=0))
    write(mixture)
    plain = store.read_parquet(store.corpus_file("p"), store.PROMPTS)
    tokenizer = load_tokenizer(tmp_path / "a")
    few = Corpus(max_prompt_tokens=400, parts={"made": mixture.parts["made"]})
    make_corpus("p", few, held_out=(), seed=0, encode=tokenizer.encode_prompt, magpie=lambda source: [])
    rendered = store.read_parquet(store.corpus_file("p"), store.PROMPTS)
    hashes = {row["turns"][0]: row["prompt_sha256"] for row in plain}
    assert all(hashes[row["turns"][0]] != row["prompt_sha256"] for row in rendered)
