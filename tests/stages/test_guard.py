"""No benchmark prompt in the corpus, however it is spelled."""

import pytest

from stages.common import store
from stages.download import guard
from stages.download.benchmarks import make_benchmark
from stages.download.items import Item
from stages.download.params import Benchmark, Fields, File, Generator, Guard, Made, Part

LIMITS = Guard(ngram=4, overlap=0.5)
QUESTION = "A farmer has 12 cows and buys 5 more on Monday. How many cows has he now?"
OTHER = "Write a short poem about the sea in winter, with a lighthouse and two gulls in it."


def check(question, text, *, shared=(), ngram=4):
    corpus = guard.Corpus({"c1": OTHER, "c2": text}, ngram=ngram)
    splits = {"test": [Item("q7", question, None, "x")]}
    return guard.check(splits, corpus, LIMITS, shared_templates=shared)


@pytest.mark.parametrize(
    "planted",
    [
        QUESTION,
        QUESTION.upper(),
        "  a FARMER has 12 cows,\n\nand buys 5 more on monday; how many cows has he now",
        f"Please answer: {QUESTION} Think step by step.",
    ],
)
@pytest.mark.parametrize("ngram", [4, 50])  # 50: the question is shorter than a run
def test_a_planted_question_is_reported_by_id(planted, ngram):
    with pytest.raises(ValueError, match="q7 in corpus prompt c2: exact"):
        check(QUESTION, planted, ngram=ngram)


def test_a_near_duplicate_is_reported_with_its_share():
    near = QUESTION.replace("12", "31")
    with pytest.raises(ValueError, match=r"q7 in corpus prompt c2: \d+% of the word runs"):
        check(QUESTION, near)
    assert check(QUESTION, near, shared=["test"]) == {"test": 1}


def test_a_short_corpus_prompt_inside_a_long_question_is_near():
    with pytest.raises(ValueError, match="100% of the word runs"):
        check(f"{OTHER.replace('sea', 'lake')} {QUESTION} {OTHER.replace('gulls', 'crows')}", QUESTION)


def test_an_exact_duplicate_is_never_declared_away():
    with pytest.raises(ValueError, match="exact"):
        check(QUESTION, QUESTION.lower(), shared=["test"])


@pytest.mark.parametrize("text", ["", "How many cows?", "A farmer has a dog and buys one more cat on Sunday."])
def test_strangers_pass(text):
    assert check(QUESTION, text) == {}
    assert check(QUESTION, text, shared=["test"]) == {"test": 0}


def test_part_of_a_word_is_no_duplicate():
    assert check("owl is ten", "howl is tender, said the owl and is tent", ngram=2) == {}


def test_long_lists_are_cut():
    corpus = guard.Corpus({"c": QUESTION}, ngram=4)
    splits = {"test": [Item(f"q{i}", QUESTION, None, "x") for i in range(50)]}
    with pytest.raises(ValueError, match="and 30 more"):
        guard.check(splits, corpus, LIMITS, shared_templates=())


# The benchmark stage -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_corpus(texts, category="x"):
    rows = [
        {
            "id": f"part/{number}",
            "split": "train",
            "turns": [text],
            "reference": None,
            "category": category,
            "prompt_sha256": "0" * 64,
        }
        for number, text in enumerate(texts)
    ]
    store.write_parquet(store.corpus_file("p"), rows, store.PROMPTS, {})


def benchmark(source, *, limit=1, shared=()):
    part = Part(source=source, limit=limit, wording="{prompt} Be brief.")
    return Benchmark(splits={"test": part}, shared_templates=shared)


def write(params, held_out=()):
    return make_benchmark(
        "p", "bench", params, limits=LIMITS, held_out=held_out, seed=0, encode=lambda turns: [len(turns[0])]
    )


def from_file(folder, text):
    (folder / "q.jsonl").write_text('{"id": 7, "text": "%s"}\n' % text)  # noqa: UP031
    fields = Fields(id="id", prompt="text", reference=None, category=None)
    return File(source="file", path="q.jsonl", sha256=store.sha256_file(folder / "q.jsonl"), fields=fields)


def test_stage_stops_and_writes_nothing(folder):
    write_corpus([OTHER, f"  {QUESTION.upper()}"])
    with pytest.raises(ValueError, match="7 in corpus prompt part/1: exact"):
        write(benchmark(from_file(folder, QUESTION)))
    assert not store.prompts_file("p", "bench").exists()


def test_stage_writes_rows_and_counts(folder):
    write_corpus([OTHER, QUESTION.replace("12", "31")])
    assert write(benchmark(from_file(folder, QUESTION), shared=("test",))) == {"test": 1}
    path = store.prompts_file("p", "bench")
    (row,) = store.read_parquet(path, store.PROMPTS)
    assert (row["id"], row["split"], row["category"]) == ("7", "test", "bench")
    assert row["turns"] == [f"{QUESTION} Be brief."]
    assert store.read_provenance(path)["guard"]["near_duplicates_declared"] == {"test": 1}


def test_computed_sources_pass_over_what_the_corpus_has(folder):
    source = Made(source="made", kind="sum", seed=3, size=40)
    write_corpus([OTHER])
    write(benchmark(source, limit=40))
    texts = [row["turns"][0] for row in store.read_parquet(store.prompts_file("p", "bench"), store.PROMPTS)]
    write_corpus(texts[:30])
    write(benchmark(source, limit=10))
    left = [row["turns"][0] for row in store.read_parquet(store.prompts_file("p", "bench"), store.PROMPTS)]
    assert sorted(left) == sorted(texts[30:])
    assert store.read_provenance(store.prompts_file("p", "bench"))["passed_over"] == {"test": 30}
    with pytest.raises(ValueError, match=r"p\.download\.benchmarks\.bench\.splits\.test: 10 prompts"):
        write(benchmark(source, limit=11))


def test_a_held_out_template_in_the_corpus_stops_the_stage(folder):
    source = Generator(source="generator", dataset="gsm_symbolic", seed=5, size=300, templates="held_out")
    write_corpus([OTHER], category="template_08")
    with pytest.raises(ValueError, match=r"part/0.*templates: others"):
        write(benchmark(source), held_out=(8, 9))
    write_corpus([OTHER], category="template_10")
    assert write(benchmark(source), held_out=(8, 9)) == {"test": 1}


def test_missing_corpus_names_its_stage(folder):
    with pytest.raises(ValueError, match="run dvc repro corpus"):
        write(benchmark(Made(source="made", kind="sum", seed=3, size=4)))


def test_splits_must_differ(folder):
    write_corpus([OTHER])
    part = Part(source=Made(source="made", kind="sum", seed=3, size=4), limit=4, wording="{prompt}")
    with pytest.raises(ValueError, match="splits share prompts"):
        write(Benchmark(splits={"a": part, "b": part}, shared_templates=()))
    with pytest.raises(ValueError, match="'c'"):
        Benchmark(splits={"a": part}, shared_templates=("c",))
