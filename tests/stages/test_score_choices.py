r"""Letters of multiple choice, and tests that are a list of asserts."""

import pytest

from stages.common import store
from stages.score import asserts, choices
from stages.score.grading import Grader, Score, check
from stages.score.programs import Limits

LIMITS = Limits(cpu_seconds=2, wall_seconds=5, memory_mb=256, file_mb=1, open_files=32, processes=0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"So it is \boxed{B}.", "B"),
        (r"\boxed{A} no, \boxed{\text{(C)}}", "C"),
        (r"\boxed{D) ice}", "D"),
        (r"\boxed{\textbf{A}}", "A"),
        (r"\boxed{ice}", None),
        (r"The answer is C, though \boxed{42}", None),  # a box is the last word
        ("The correct answer is (B).", "B"),
        ("The answer is **D**", "D"),
        ("**Answer:** C) tea", "C"),
        ("Final answer: option A.", "A"),
        ("The answer is A. Wait: the answer is B, by symmetry.", "B"),
        ("Answer: Box 3", None),
        ("The answer is a guess", None),
        ("All of it.\n\nC", "C"),
        ("All of it.\n(C)", "C"),
        ("All of it.\nC. ice", "C"),
        ("A cat sat", None),
        ("I think so", None),
        ("", None),
    ],
)
def test_the_letter_of_a_text(text, found):
    assert choices.letter(text) == found


TESTS = "import math\nassert set(twice((1, 2))) == {2, 4}\nassert math.isclose(sum(twice((0.5,))), 1.0)"


def test_asserts_name_the_function_and_become_a_check():
    stub, test = asserts.as_check(TESTS, where="here")
    assert (stub.entry_point, stub.text) == ("twice", "def twice(*args, **kwargs):")
    assert test.startswith("import math\n")
    assert "def check(candidate):\n    assert set(twice(" in test
    assert not asserts.is_check(TESTS)
    assert asserts.is_check(test)
    helped = "def near(a, b):\n    return abs(a - b) < 1\nassert near(half(3), 1)"
    assert asserts.as_check(helped, where="here")[0].entry_point == "half"


@pytest.mark.parametrize("reference", ["", "assert True", "assert sorted([1]) == [1]", "assert f(", "f(1)"])
def test_tests_without_a_function_are_named(reference):
    with pytest.raises(ValueError, match="here: "):
        asserts.as_check(reference, where="here")


@pytest.fixture
def graded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, turn, reference in (("mbpp", f"Double.\n\n{TESTS}", TESTS), ("gpqa", "Which?\n\nA) x\nB) y", "B")):
        row = {"id": "q", "split": "test", "turns": [turn], "reference": reference, "category": "c"}
        store.write_parquet(store.prompts_file("p", name), [row | {"prompt_sha256": "0"}], store.PROMPTS, {})
    params = Score(graders={"mbpp": "code", "gpqa": "choice"}, code=LIMITS)
    return params, {name: Grader("p", name, params) for name in params.graders}


def test_programs_are_run_against_asserts(graded):
    params, graders = graded
    body = "def twice(xs):\n    return tuple({} * x for x in xs)"

    def right(text):
        return graders["mbpp"].grade("q", text, whole=True).correct

    assert right(f"Here:\n```python\n{body.format(2)}\n```\nDone.")
    assert not right(f"```python\n{body.format(3)}\n```")
    assert not right("```python\ndef other(xs):\n    return xs\n```")
    assert not right("I cannot.")
    assert check("p", "mbpp", params)["prompts"] == 1


def test_choices_are_compared_with_the_letter(graded):
    params, graders = graded
    assert graders["gpqa"].grade("q", r"\boxed{B}", whole=True) == ("B", True)
    assert graders["gpqa"].grade("q", "Answer: A", whole=True) == ("A", False)
    assert graders["gpqa"].grade("q", "None.", whole=True) == (None, False)
    assert check("p", "gpqa", params) == {"grader": "choice", "prompts": 1}
