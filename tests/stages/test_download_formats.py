"""Data sets as they come: formats of files, forms of known benchmarks, configurations and splits of the hub."""

import csv
import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.common import store
from stages.common.params import ParamError, checked
from stages.download import datasets, records, tabular
from stages.download.benchmarks import make_benchmark
from stages.download.collect import items_of
from stages.download.corpus import make_corpus
from stages.download.items import Item
from stages.download.params import Benchmark, Corpus, Fields, File, Guard, Hub, Part, recorded
from tests.hub import COMMIT, lay_out, serve, use_cache

ROWS = [{"id": "a", "text": 'One,\n"two"?', "answer": "3"}, {"id": "b", "text": "Vier – fünf", "answer": "9"}]
FIELDS = Fields(id="id", prompt="text", reference="answer", category=None)
ITEMS = [Item("a", 'One,\n"two"?', "3", "bench"), Item("b", "Vier – fünf", "9", "bench")]


def lines(rows):
    return "\n".join(map(json.dumps, rows)).encode()


def parquet(rows):
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def table(rows):
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def source(**how):
    return File(source="file", path="x", sha256="", **how)


def parsed(content, where, **how):
    return tabular.parse(records.read(content, where=where), source(**how), name="bench", where=where)


def of_form(form, *rows):
    return parsed(lines(rows), "x.jsonl", form=form)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", lines(ROWS)),
        ("x.jsonl.gz", gzip.compress(lines(ROWS), mtime=0)),
        ("x.json", json.dumps(ROWS, indent=1).encode()),
        ("x.json", lines(ROWS)),
        ("x.csv", b"\xef\xbb\xbf" + table(ROWS)),
        ("x.csv.gz", gzip.compress(table(ROWS), mtime=0)),
        ("x.parquet", parquet(ROWS)),
    ],
)
def test_every_format_gives_the_same_items(name, content):
    assert parsed(content, name, fields=FIELDS) == ITEMS


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.json", b"[{]", "not JSON"),
        ("x.json", b"[1]", "row 1: not an object"),
        ("x.csv", b"id,text,answer\na,b,c\nd,e\n", "row 2: not as many values"),
        ("x.csv", b"id,text,answer\na,b,c,d\n", "row 1: not as many values"),
        ("x.csv", b'id,text,answer\na,"b,c\n', r"line \d: not CSV"),
        ("x.csv", b"id,text\na,b\n", "row 1: no field 'answer'; .*there: id, text"),
        ("x.csv", b"", "holds no prompt"),
        ("x.parquet", parquet(ROWS)[:-9], "not Parquet"),
        ("x.parquet", parquet([*ROWS, ROWS[0]]), "row 3: id 'a' stands in row 1 too"),
        ("x.parquet", parquet([{"id": "a", "text": None, "answer": "x"}]), "row 1: field 'text' holds no text"),
    ],
)
def test_what_cannot_be_read_names_its_row(name, content, said):
    with pytest.raises(ValueError, match=rf"{name}: {said}"):
        parsed(content, name, fields=FIELDS)


def test_rows_without_an_id_are_numbered_and_some_can_be_left_out():
    fields = Fields(id=None, prompt="text", reference=None, category="answer")
    assert [item.id for item in parsed(parquet(ROWS), "x.parquet", fields=fields)] == ["bench-1", "bench-2"]
    assert [item.id for item in parsed(lines(ROWS), "x", fields=fields, omit=("bench-1",))] == ["bench-2"]
    with pytest.raises(ValueError, match=r"x: omit: no row has the id 'bench-7'"):
        parsed(lines(ROWS), "x", fields=fields, omit=("bench-7", "bench-1"))


# Known data sets ---------------------------------------------------------------------------------------------


def test_gsm8k_takes_what_stands_behind_the_hashes():
    rows = {"question": "How many?\n", "answer": "2 + 3 = <<2+3=5>>5\n#### 1,005"}
    assert of_form("gsm8k", rows, rows) == [Item(f"bench-{n}", "How many?", "1,005", "bench") for n in (1, 2)]
    with pytest.raises(ValueError, match=r"x\.jsonl: line 1: no #### with an answer"):
        of_form("gsm8k", {"question": "How many?", "answer": "5"})
    with pytest.raises(ValueError, match=r"line 1: no field 'question'; correct `form` \(there: text, answer\)"):
        of_form("gsm8k", {"text": "How many?", "answer": "#### 5"})


def test_mbpp_shows_the_asserts_and_keeps_them_with_what_they_stand_on():
    tests = ["assert twice(2) == 4", "assert twice(0) == 0\r\n"]
    full = {"task_id": 11, "text": "Double it.", "test_list": tests, "test_setup_code": "x = 1\r\n"}
    cleaned = {"task_id": 12, "prompt": "Double it.", "test_list": tests, "test_imports": ["import math"]}
    one, two = of_form("mbpp", full, cleaned)
    assert one.text == two.text == "Double it.\n\nassert twice(2) == 4\nassert twice(0) == 0"
    assert one.reference == "x = 1\nassert twice(2) == 4\nassert twice(0) == 0"
    assert two.reference == "import math\nassert twice(2) == 4\nassert twice(0) == 0"
    assert [one.id, two.id] == ["bench-11", "bench-12"]


def gpqa(record):
    return {
        "Record ID": record,
        "Question": "Which is cold?",
        "Correct Answer": "ice\n",
        "Incorrect Answer 1": "fire",
        "Incorrect Answer 2": "sun",
        "Incorrect Answer 3": "tea, hot",
        "High-level domain": "Physics",
    }


def test_gpqa_orders_the_options_by_the_record_alone():
    items = parsed(table([gpqa(f"rec{n}") for n in range(40)]), "gpqa.csv", form="gpqa")
    again = parsed(table([gpqa("rec7")]), "other.csv", form="gpqa")
    assert again == [items[7]]
    for item in items:
        options = item.text.split("\n")
        assert options[:2] == ["Which is cold?", ""]
        assert sorted(line[3:] for line in options[2:]) == ["fire", "ice", "sun", "tea, hot"]
        assert f"{item.reference}) ice" in options
        assert item.category == "Physics"
    assert {item.reference for item in items} == set("ABCD")
    assert items[7].reference == "B"  # on every machine


def test_livecodebench_shows_the_starter_code_where_there_is_one():
    tests = json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])
    plain = {"question_id": "abc300_a", "question_content": "Add one.", "starter_code": "", "public_test_cases": tests}
    typed = plain | {
        "question_id": 3001,
        "starter_code": "class Solution:\n    def f(self):\n        ",
        "difficulty": "hard",
    }
    one, two = of_form("livecodebench", plain, typed)
    assert one == Item("abc300_a", "Add one.", tests, "bench")
    assert two.text == "Add one.\n\n```python\nclass Solution:\n    def f(self):\n        \n```"
    assert (two.id, two.category) == ("3001", "hard")


def test_alpaca_joins_instruction_and_input():
    rows = [{"instruction": "Translate.", "input": "Haus", "output": "house"}, {"instruction": "Sing.", "input": ""}]
    one, two = of_form("alpaca", *rows)
    assert (one.text, one.reference) == ("Translate.\n\nHaus", "house")
    assert (two.text, two.reference, two.id) == ("Sing.", None, "bench-2")


def test_chats_keep_their_later_turns_where_they_are_asked_for(tmp_path):
    """MT-Bench and Spec-Bench: question_id, category, turns."""
    rows = [{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}]
    rows += [{"question_id": 82, "category": "rag", "turns": ["Look up."]}]
    path = tmp_path / "question.jsonl"
    path.write_bytes(lines(rows))
    fields = Fields(id="question_id", prompt="turns", reference=None, category="category")
    where = File(source="file", path=str(path), sha256=store.sha256_file(path), fields=fields)
    for turns, more in (("first", [(), ()]), ("all", [("Again.",), ()])):
        part = Part(source=where, limit=2, wording="{prompt}", turns=turns)
        items = items_of(part, name="chat", held_out=(), magpie=None)
        assert [(item.id, item.category) for item in items] == [("81", "writing"), ("82", "rag")]
        assert [item.more for item in items] == more


def test_a_source_says_how_its_rows_are_read():
    for how in ({}, {"fields": FIELDS, "form": "gsm8k"}):
        with pytest.raises(ValueError, match="write `fields` or `form`, one of the two"):
            source(**how)


def test_what_came_later_leaves_the_provenance_of_older_files_alone():
    plain = Part(source=source(fields=FIELDS), limit=1, wording="{prompt}")
    assert recorded(plain) == {
        "source": {"source": "file", "path": "x", "sha256": "", "fields": vars(FIELDS)},
        "limit": 1,
        "wording": "{prompt}",
    }
    chat = Part(source=source(form="gsm8k", omit=("a",)), limit=1, wording="{prompt}", turns="all")
    assert (recorded(chat)["turns"], recorded(chat)["source"]["omit"]) == ("all", ("a",))


# The hub's data sets -----------------------------------------------------------------------------------------

CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: [main/test-00001.parquet, main/test-0000*.parquet]}
- config_name: gpqa
  data_files: gpqa.csv
- config_name: many
  data_dir: deep
  data_files: {test: "**/*.jsonl"}
---
# Words
"""
NAMES = ["README.md", "gpqa.csv", "main/test-00000.parquet", "main/test-00001.parquet", "main/train-00000.parquet"]
NAMES += ["deep/a/x.jsonl", "deep/y.jsonl", "main/sub/train-9.parquet"]


@pytest.mark.parametrize(
    ("card", "names", "config", "split", "found"),
    [
        (CARD, NAMES, "main", "train", ["main/train-00000.parquet"]),
        (CARD, NAMES, "main", "test", ["main/test-00001.parquet", "main/test-00000.parquet"]),
        (CARD, NAMES, "gpqa", "train", ["gpqa.csv"]),
        (CARD, NAMES, "many", "test", ["deep/a/x.jsonl", "deep/y.jsonl"]),
        (CARD.split("- config_name: gpqa")[0] + "---\n", NAMES, None, "train", ["main/train-00000.parquet"]),
        ("", NAMES, "main", "test", ["main/test-00000.parquet", "main/test-00001.parquet"]),
        ("# no header", ["data/test-0.parquet", "data/train-0.parquet"], None, "test", ["data/test-0.parquet"]),
        ("", ["test.jsonl", "train.jsonl", "test.py"], None, "train", ["train.jsonl"]),
    ],
)
def test_files_of_a_split_by_card_or_by_place(card, names, config, split, found):
    assert datasets.files_of(card, names, config=config, split=split, where="o/d") == found


@pytest.mark.parametrize(
    ("card", "names", "config", "split", "said"),
    [
        (CARD, NAMES, None, "test", "no config None; write one of main, gpqa, many"),
        (CARD, NAMES, "socratic", "test", "no config 'socratic'; write one of main"),
        (CARD, NAMES, "main", "dev", "config 'main' has no split 'dev'; write one of train, test"),
        (CARD, ["README.md"], "main", "test", "no file of split 'test', config 'main'; name `file` .*no file that"),
        ("", ["code.py", "test.txt"], None, "test", r"test\.txt is none of \.jsonl"),
        ("---\nconfigs: [\n---\n", NAMES, None, "test", r"README\.md: not readable as YAML"),
    ],
)
def test_a_split_that_is_not_there_names_what_is(card, names, config, split, said):
    with pytest.raises(ValueError, match=f"o/d: {said}"):
        datasets.files_of(card, names, config=config, split=split, where="o/d")


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store.write_parquet(store.corpus_file("p"), [], store.PROMPTS, {})
    return tmp_path


def benchmark(where, **how):
    part = Part(source=where, limit=2, wording="{prompt} Box it.", **how)
    make_benchmark(
        "p",
        "bench",
        Benchmark(splits={"test": part}, shared_templates=()),
        limits=Guard(ngram=3, overlap=0.5),
        held_out=(),
        seed=0,
        encode=lambda turns: list(turns[-1].encode()),
    )
    return store.read_parquet(store.prompts_file("p", "bench"), store.PROMPTS)


QUESTIONS = [{"question": f"What is {n} plus {n}?", "answer": f"#### {2 * n}"} for n in range(4)]


def test_a_benchmark_comes_from_the_hub_by_split_or_by_file(project, monkeypatch):
    shards = {f"main/test-0000{n}.parquet": parquet(QUESTIONS[2 * n : 2 * n + 2]) for n in range(2)}
    with serve(monkeypatch, project / "home") as server:
        server.repos["datasets/o/gsm"] = {"README.md": CARD.encode(), "train.jsonl": lines(QUESTIONS[:2]), **shards}
        repo = {"source": "hub", "repo": "o/gsm", "revision": COMMIT, "form": "gsm8k"}
        by_split = Hub(**repo, config="main", split="test", omit=("bench-2", "bench-4"))
        rows = benchmark(by_split)
        assert not any("train" in path for _, path in server.asked)  # what is not asked for stays there
        by_file = Hub(**repo, file="train.jsonl", sha256=store_hash(project, QUESTIONS[:2]))
        assert [row["id"] for row in benchmark(by_file)] == ["bench-1", "bench-2"]
        with pytest.raises(ValueError, match=r"o/gsm: train\.jsonl: its sha256 is .* pins 0000"):
            benchmark(Hub(**repo, file="train.jsonl", sha256="0" * 64))
    assert [(row["id"], row["turns"], row["reference"]) for row in rows] == [
        ("bench-1", ["What is 2 plus 2? Box it."], "4"),
        ("bench-3", ["What is 0 plus 0? Box it."], "0"),
    ]


def store_hash(folder, rows):
    (folder / "copy").write_bytes(lines(rows))
    return store.sha256_file(folder / "copy")


def test_offline_a_data_set_is_read_from_the_cache_and_guarded(project, monkeypatch):
    use_cache(monkeypatch, project / "home")
    lay_out(project / "home", "o/gsm", COMMIT, {"test.jsonl": lines(QUESTIONS)}, "dataset")
    where = Hub(source="hub", repo="o/gsm", revision=COMMIT, split="test", form="gsm8k")
    assert len(benchmark(where)) == 2
    planted = {"split": "train", "reference": None, "category": "x", "prompt_sha256": "0"}
    rows = [planted | {"id": f"gsm/{n}", "turns": [row["question"]]} for n, row in enumerate(QUESTIONS)]
    store.write_parquet(store.corpus_file("p"), rows, store.PROMPTS, {})
    with pytest.raises(ValueError, match=r"2 benchmark prompts stand in the training corpus; .*`omit`"):
        benchmark(where)


def test_a_later_turn_is_guarded_and_hashed_with_those_before(project):
    rows = [{"id": n, "turns": [f"Tell of {n} blue whales.", f"Now shorten that tale to {n} words."]} for n in (1, 2)]
    (project / "chat.jsonl").write_bytes(lines(rows))
    fields = Fields(id="id", prompt="turns", reference=None, category=None)
    where = File(source="file", path="chat.jsonl", sha256=store.sha256_file(Path("chat.jsonl")), fields=fields)
    first, second, *_ = found = benchmark(where, turns="all")
    assert [row["id"] for row in found] == ["1", "1#2", "2", "2#2"]
    assert second["turns"] == ["Tell of 1 blue whales. Box it.", "Now shorten that tale to 1 words. Box it."]
    assert first["turns"] == second["turns"][:1]
    assert len({row["prompt_sha256"] for row in found}) == 4
    planted = {"id": "c", "split": "train", "turns": ["Now shorten that tale to 1 words."], "reference": None}
    corpus = [planted | {"category": "x", "prompt_sha256": "0"}]
    store.write_parquet(store.corpus_file("p"), corpus, store.PROMPTS, {})
    with pytest.raises(ValueError, match="1 in corpus prompt c: exact"):
        benchmark(where, turns="all")
    assert [row["id"] for row in benchmark(where)] == ["1", "2"]  # the first turns are strangers
    part = Part(source=where, limit=1, wording="{prompt}", turns="all")
    with pytest.raises(ParamError, match=r"p\.download\.corpus\.parts\.chat\.turns: training takes the first only"):
        make_corpus(
            "p",
            Corpus(max_prompt_tokens=9, parts={"chat": part}),
            held_out=(),
            seed=0,
            encode=lambda turns: [1],
            magpie=lambda _: [],
        )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"file": None}, "write `file`, or `split`"),
        ({"split": "test"}, "write `file`, or `split`"),
        ({"config": "main"}, "write `file`, or `split`"),
        ({"file": None, "split": "test", "sha256": "0"}, "sha256: of one `file`"),
        ({"form": None}, "write `fields` or `form`"),
        ({"form": "gsm"}, "'gsm' is none of|is not one of"),
    ],
)
def test_a_hub_source_that_says_too_little_or_too_much(changed, said):
    section = {"source": "hub", "repo": "o/d", "revision": COMMIT, "file": "x.jsonl", "form": "gsm8k"}
    assert checked(Hub, section, "k") == Hub(**section)
    with pytest.raises(ParamError, match=said):
        checked(Hub, section | changed, "k")
