"""Score: which answers of a sweep are right. Apart from generation: no model, and seconds to run again.

    python -m stages.score <profile> <sweep>
    python -m stages.score <profile> check

Reads   data/<profile>/sweeps/<sweep>/<point>.parquet, data/<profile>/prompts/<benchmark>.parquet
Writes  data/<profile>/graded/<sweep>/<point>.parquet: the same rows with `answer` and `correct`
        data/<profile>/graded/check.json: which sweeps are graded and, if any is, that every reference is right by its
                                        own grader
Params  <profile>.score; graded, benchmarks and reasoning for the check
"""

from typing import Any

from tqdm import tqdm

from stages.common import entry, store, studies
from stages.common.params import keys_at, load
from stages.score.grading import Grader, Score, check, max_new_tokens

CHECK = "check"


def main(run: entry.Run) -> None:
    params = load(Score, run.profile, "score")
    if run.what == CHECK:
        graded = keys_at("graded")
        known = (*keys_at("benchmarks"), *keys_at("reasoning")) if graded else ()
        there = [name for name in known if name in params.graders]
        found = {name: check(run.profile, name, params) for name in there}
        store.write_json(studies.check_file(run.profile), {"sweeps": graded, "benchmarks": found})
    else:
        score(run.profile, run.what, params)


def score(profile: str, sweep: str, params: Score) -> None:
    """Grade every point of a sweep. ValueError: no points, no grader for its benchmark, or tests that were not run."""
    folder = studies.sweep_folder(profile, sweep)
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise ValueError(f"{folder}: no points; run dvc repro sweep@{profile}-{sweep}")
    points = {file: store.read_parquet(file, store.CELLS) for file in files}
    graders = {
        name: Grader(profile, name, params) for name in sorted({r["benchmark"] for p in points.values() for r in p})
    }
    total = sum(map(len, points.values()))
    with (
        store.replace_folder(studies.graded_folder(profile, sweep)) as out,
        tqdm(total=total, desc=f"score {sweep}", unit="answer", mininterval=5) as bar,
    ):
        for file, rows in points.items():
            facts = store.read_provenance(file)
            limit = max_new_tokens(facts, file)
            graded = [graded_row(row, graders[row["benchmark"]], limit, bar) for row in rows]
            how = [grader.described() for name, grader in graders.items() if any(r["benchmark"] == name for r in rows)]
            store.write_parquet(out / file.name, graded, store.CELLS, facts | {"score": how[0] if how else None})


def graded_row(row: dict[str, Any], grader: Grader, limit: int, progress: Any) -> dict[str, Any]:
    """The row with its answer and whether it is right; a text of `limit` tokens was cut."""
    grade = grader.grade(row["prompt_id"], row["text"], whole=row["new_tokens"] < limit)
    progress.update(1)
    return row | {"answer": grade.answer, "correct": grade.correct}


def whats(profile: str) -> list[str]:
    return [CHECK, *keys_at(profile, "sweeps")]


if __name__ == "__main__":
    entry.run(main, compute=False, what=whats)
