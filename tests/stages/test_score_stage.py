"""The stage that scores: made rows in, the same rows with answers out, and what stops it."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.common import entry, store, studies
from stages.common.params import PARAMS
from stages.score import __main__ as stage
from tests.stages.test_score_programs import LIMITS, RIGHT, TEST, TURN

LIMIT = 20
SECTION = {"graders": {"sums": "answer", "code": "code"}, "code": vars(LIMITS)}
PROMPTS = {
    "sums": [("a", "What is 1 + 1?", "2"), ("b", "What is 1,000 - 1?", "999")],
    "code": [("f", TURN, TEST)],
    "talk": [("t", "Hello", None)],
}


def row(
    prompt_id: str, text: str, *, benchmark: str = "sums", method: str = "vanilla", repeat: int = 0, tokens: int = 9
):
    flat = dict.fromkeys(store.CELLS.names, 0)
    return flat | {
        "benchmark": benchmark,
        "split": "test",
        "method": method,
        "prompt_id": prompt_id,
        "repeat": repeat,
        "temperature": 0.7,
        "output_ids": [1] * tokens,
        "new_tokens": tokens,
        "accepted": [0] * (tokens - 1),
        "text": text,
        "answer": None,
        "correct": None,
        "matches_vanilla": True,
        "first_difference": -1,
        "top2_gap": 0.0,
        "excused": False,
    }


def facts(method: str = "vanilla") -> dict[str, Any]:
    return {
        "method": method,
        "params": {"shared": {"max_new_tokens": LIMIT}},
        "sweep": {"index": 0},
        "stamp": {"cores": 2},
    }


@pytest.fixture(autouse=True)
def _project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_params()
    for benchmark, prompts in PROMPTS.items():
        rows = [
            {"id": i, "split": "test", "turns": [turn], "reference": r, "category": "c", "prompt_sha256": "0"}
            for i, turn, r in prompts
        ]
        store.write_parquet(store.prompts_file("p", benchmark), rows, store.PROMPTS, {})


def write_params(**score: Any) -> None:
    profile = {"models": {}, "sweeps": {"s": {}, "empty": {}}, "score": SECTION | score}
    lists = {"benchmarks": ["sums", "talk"], "reasoning": ["code"], "graded": ["s"]}
    Path(PARAMS).write_text(json.dumps(lists | {"p": profile}))  # JSON is YAML


def put(name: str, rows: list[dict[str, Any]], provenance: dict[str, Any] | None = None) -> None:
    path = studies.sweep_folder("p", "s") / f"{name}.parquet"
    store.write_parquet(path, rows, store.CELLS, facts() if provenance is None else provenance)


def scored(name: str) -> list[dict[str, Any]]:
    return store.read_parquet(studies.graded_folder("p", "s") / f"{name}.parquet", store.CELLS)


def run(what: str = "s") -> None:
    entry.run(stage.main, compute=False, argv=["p", what], what=stage.whats)


def test_rows_come_back_with_answers_and_nothing_else_changed():
    made = [
        row("a", "1 + 1 = 2. The answer is 2.00"),
        row("a", "It is 3.", repeat=1),
        row("b", "1000 - 1 = 999", tokens=LIMIT),
        row("b", r"\boxed{999} since", repeat=1, tokens=LIMIT),
        row("b", "I do not know.", repeat=2),
    ]
    put("method-vanilla", made)
    put("method-x", [row("b", "#### 1,998", method="x")], facts("x"))
    run()
    assert [(r["answer"], r["correct"]) for r in scored("method-vanilla")] == [
        ("2", True),
        ("3", False),
        (None, False),
        ("999", True),
        (None, False),
    ], "a text that the limit cut has an answer only where it states one"
    assert [(r["answer"], r["correct"]) for r in scored("method-x")] == [("1998", False)]
    for before, after in zip(made, scored("method-vanilla"), strict=True):
        assert {**after, "answer": None, "correct": None} == before
    found = store.read_provenance(studies.graded_folder("p", "s") / "method-x.parquet")
    assert found == facts("x") | {"score": {"grader": "answer"}}


def test_code_is_run(capfd):
    texts = {RIGHT: True, "    return numbers": False, "Sorry.": False}
    put("code", [row("f", text, benchmark="code", repeat=i) for i, text in enumerate([*texts, RIGHT])])
    run()
    rows = scored("code")
    assert [r["correct"] for r in rows] == [*texts.values(), True]
    assert RIGHT in rows[0]["answer"]
    assert rows[2]["answer"] is None
    found = store.read_provenance(studies.graded_folder("p", "s") / "code.parquet")["score"]
    assert found["limits"] == vars(LIMITS)
    assert set(found["isolation"]) == {"network", "files", "processes", "limits"}


def test_scoring_again_gives_the_same_bytes():
    put("method-vanilla", [row("a", "2"), row("b", "1")])
    run()
    path = studies.graded_folder("p", "s") / "method-vanilla.parquet"
    before = path.read_bytes()
    run()
    assert path.read_bytes() == before


def test_the_check_grades_every_reference_and_names_the_sweeps():
    run("check")
    found = store.read_json(studies.check_file("p"))
    assert found["sweeps"] == ["s"]
    assert found["benchmarks"]["sums"] == {"grader": "answer", "prompts": 2}
    assert found["benchmarks"]["code"]["grader"] == "code"
    assert found["benchmarks"]["code"]["isolation"]["limits"]
    assert "talk" not in found["benchmarks"]


def stopped(capsys, what: str = "s") -> str:
    with pytest.raises(SystemExit) as stop:
        run(what)
    assert stop.value.code
    return capsys.readouterr().err


def test_what_cannot_be_scored_is_named(capsys):
    assert "no points; run dvc repro sweep@p-s" in stopped(capsys)
    put("x", [row("t", "Hello", benchmark="talk")])
    assert "p.score.graders: no grader for 'talk'" in stopped(capsys)
    put("x", [row("z", "2")])
    assert "no prompt 'z'" in stopped(capsys)
    put("x", [row("a", "2")], {"params": {}})
    assert "names no max_new_tokens" in stopped(capsys)
    write_params(graders={"talk": "answer"})
    put("x", [row("t", "2", benchmark="talk")])
    assert "prompt 't' has no reference" in stopped(capsys)
    write_params(graders={"sums": "vibes"})
    assert "'vibes' is not one of answer, code, choice" in stopped(capsys)
    assert "accepted: check, s, empty" in stopped(capsys, "other")
    assert not studies.graded_folder("p", "s").exists()


def test_tests_that_pass_anything_are_found(capsys):
    rows = store.read_parquet(store.prompts_file("p", "code"), store.PROMPTS)
    rows[0]["reference"] = "def check(candidate):\n    candidate([])"
    store.write_parquet(store.prompts_file("p", "code"), rows, store.PROMPTS, {})
    assert "its tests pass a function without a body" in stopped(capsys, "check")
