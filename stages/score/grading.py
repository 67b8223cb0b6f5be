"""How a benchmark is graded: by its references' answers or letters, or by its tests."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stages.common import store
from stages.score import asserts, choices, extract, programs
from stages.score.programs import Limits, Stub


@dataclass(frozen=True, kw_only=True)
class Score:
    """`<profile>.score`. graders: by benchmark; `answer` and `choice` (a letter) compare with the reference, `code`
    runs it as tests."""

    graders: dict[str, Literal["answer", "code", "choice"]]
    code: Limits


class Grade(NamedTuple):
    """`answer` in its canonical spelling (of code: the program), None where the text has none: that is never right."""

    answer: str | None
    correct: bool


class Grader:
    """Grades the texts of one benchmark; equal texts of a prompt are graded once."""

    def __init__(self, profile: str, benchmark: str, params: Score) -> None:
        if benchmark not in params.graders:
            known = ", ".join(params.graders)
            raise ValueError(
                f"params.yaml: {profile}.score.graders: no grader for {benchmark!r}; add it there (answer, code, "
                f"choice) or take the sweep out of `graded`. There are {known}"
            )
        self.kind = params.graders[benchmark]
        self.limits = params.code
        self.path = store.prompts_file(profile, benchmark)
        self.prompts = {row["id"]: row for row in store.read_parquet(self.path, store.PROMPTS)}
        self.isolation: dict[str, str] = {}
        self._known: dict[tuple[str, str, bool], Grade] = {}

    def grade(self, prompt_id: str, text: str, *, whole: bool) -> Grade:
        """ValueError: an unknown prompt, one without a reference, or tests that were not run."""
        if prompt_id not in self.prompts:
            raise ValueError(f"{self.path}: no prompt {prompt_id!r}; run dvc repro of the sweep that has it")
        place = (prompt_id, text, whole)
        if place not in self._known:
            self._known[place] = self._graded(prompt_id, text, whole)
        return self._known[place]

    def _graded(self, prompt_id: str, text: str, whole: bool) -> Grade:
        if self.kind == "code":
            return self._code(prompt_id, text)
        return self._choice(prompt_id, text) if self.kind == "choice" else self._answer(prompt_id, text, whole)

    def described(self) -> dict[str, Any]:
        """What graded, for the provenance of a file."""
        if self.kind != "code":
            return {"grader": self.kind}
        return {"grader": self.kind, "limits": asdict(self.limits), "isolation": self.isolation}

    def reference(self, prompt_id: str) -> str:
        reference = self.prompts[prompt_id]["reference"]
        if reference is None:
            raise ValueError(f"{self.path}: prompt {prompt_id!r} has no reference to grade by; drop its grader")
        return reference

    def _answer(self, prompt_id: str, text: str, whole: bool) -> Grade:
        answer = extract.final_answer(text, whole=whole)
        if answer is None:
            return Grade(None, False)
        return Grade(extract.canonical(answer), extract.is_right(answer, self.reference(prompt_id)))

    def _choice(self, prompt_id: str, text: str) -> Grade:
        letter = choices.letter(text)
        return Grade(letter, letter == self.reference(prompt_id))

    def task(self, prompt_id: str) -> tuple[Stub, str]:
        """(beginning of the function, tests) of a prompt of code: from its stub, or from asserts alone."""
        where, reference = f"{self.path}: {prompt_id}", self.reference(prompt_id)
        if not asserts.is_check(reference):
            return asserts.as_check(reference, where=where)
        return programs.read_stub(self.prompts[prompt_id]["turns"][0], where=where), reference

    def _code(self, prompt_id: str, text: str) -> Grade:
        stub, test = self.task(prompt_id)
        program = programs.program_of(stub, text)
        if program is None:
            return Grade(None, False)
        verdict = programs.run(program, stub, test, self.limits, where=f"{self.path}: {prompt_id}")
        self.isolation = verdict.isolation or self.isolation
        return Grade(program, verdict.passed)


def check(profile: str, benchmark: str, params: Score) -> dict[str, Any]:
    """That a benchmark can be graded: references are right by their own grader, and no program is.

    ValueError names the first prompt where that fails.
    """
    grader = Grader(profile, benchmark, params)
    for prompt_id in grader.prompts:
        where = f"{grader.path}: {prompt_id}"
        if grader.kind == "code":
            stub, test = grader.task(prompt_id)
            empty = f"{stub.text}\n{stub.indent}pass\n"
            verdict = programs.run(empty, stub, test, params.code, where=where)
            grader.isolation = verdict.isolation
            if verdict.passed:
                raise ValueError(f"{where}: its tests pass a function without a body")
            continue
        reference = grader.reference(prompt_id)
        if not grader.grade(prompt_id, f"\\boxed{{{reference}}}", whole=True).correct:
            raise ValueError(f"{where}: the reference {reference!r} is not right by its own grader")
    return grader.described() | {"prompts": len(grader.prompts)}


def max_new_tokens(facts: dict[str, Any], path: Path) -> int:
    """The limit that texts of a file were decoded with."""
    try:
        return facts["params"]["shared"]["max_new_tokens"]
    except (KeyError, TypeError):
        raise ValueError(f"{path}: its provenance names no max_new_tokens; run dvc repro of its sweep") from None
