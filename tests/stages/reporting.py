"""A small profile's cells and curves as files, and the report of them."""

from pathlib import Path
from typing import Any

import pandas as pd
from ruamel.yaml import YAML

from stages.common import entry, store
from stages.common.params import load
from stages.report import __main__ as stage
from stages.report.params import ReportParams
from stages.report.study import Plate, Sheet, Study
from tests.stages.test_report_measures import NAMES, STAMP, record

BENCHMARKS = {"gsm_symbolic": ("new_template", "seen_template"), "humaneval": ("test",)}
SECTION = {
    "resamples": 100,
    "confidence": 0.95,
    "cost_tolerance": 0.1,
    "colours": {
        "methods": {"vanilla": "#999999", "specdiff": "#E69F00", "specdiff2_tree": "#0072B2"},
        "trainings": {"adapt": "#E69F00", "streak": "#56B4E9"},
        "phases": {"draft": "#CC79A7", "verify": "#009E73", "other": "#999999"},
    },
}
CURVE = """step,tokens,windows,lr,loss,grad_norm,split,streak,trie16,accept_1,accept_2,extra
1,10,2,0.1,3.0,1.0,train,,,,,
2,20,4,0.1,2.5,1.0,train,,,,,
2,20,4,0.1,2.6,,valid,0.9,1.6,0.6,0.3,x
"""
SVG = (
    '<svg viewBox="0 0 9 9"><defs><clipPath id="a"/></defs><g id="b" clip-path="url(#a)"><path d="M0 0L9 9"/></g></svg>'
)


def rows_of(benchmark: str, method: str, **changes: Any) -> list[dict[str, Any]]:
    accepted = {"vanilla": [0, 0, 0], "specdiff": [0, 1, 0], "specdiff2_tree": [2, 0, 4]}[method]
    return [
        record(
            i,
            accepted,
            benchmark=benchmark,
            split=split,
            method=method,
            num_draft_tokens=0 if method == "vanilla" else 12,
            decode_s=0.3 + 0.01 * i if method == "vanilla" else 0.45 + 0.01 * i,
            **changes,
        )
        for split in BENCHMARKS[benchmark]
        for i in range(3)
    ]


def put_cell(profile: str, benchmark: str, method: str, rows: list[dict[str, Any]], **stamp: Any) -> None:
    drafter = None if method == "vanilla" else {"parameters": 1000, "objective": "streak"}
    section = {"drafter": None if method == "vanilla" else "streak", "gamma": 4}
    provenance = {"stamp": STAMP | stamp, "drafter": drafter, "profile": profile, "params": {method: section}}
    store.write_parquet(store.cell_file(profile, benchmark, method), rows, store.CELLS, provenance)


def set_up(folder: Path) -> None:
    """params.yaml, cells and curves of the profiles `cpu` and `smoke`."""
    document = {
        "seed": 0,
        "benchmarks": [*BENCHMARKS],
        "methods": NAMES[1:],  # vanilla is always there
        "objectives": ["streak"],
        "soft_objectives": [],
        "baselines": [],
        "report": SECTION,
    }
    for profile in ("cpu", "smoke"):
        document[profile] = {"models": {}}
        for benchmark in BENCHMARKS:
            for method in NAMES:
                put_cell(profile, benchmark, method, rows_of(benchmark, method))
        for training in ("adapt", "streak"):
            store.write_text(store.curves_file(profile, training), CURVE)
    YAML().dump(document, folder / "params.yaml")


def make(profile: str = "cpu") -> Path:
    stage.main(entry.Run(profile=profile, words={}), load(ReportParams, "report"), seed=0)
    return store.report_folder(profile)


def study(profile: str, params: ReportParams, *, seed: int) -> list[Study]:
    """A study with a wide table, a wordy one, and a figure with published numbers."""
    wide = pd.DataFrame([{f"column number {i}": i + 0.25 for i in range(24)}])
    wordy = pd.DataFrame(
        {"name": ["b", "a", "c"], "value": ["10.5 (1)", "n/a", "9 (2)"], "words": ["many words " * 30] * 3}
    )
    plate = Plate(name="window", title="By <window>", reading="Right is wider.", alt="A line.", svg=SVG)
    return [
        Study(
            name="study_of_windows",
            title="Windows",
            lead="Two & a half.",
            plates=[plate, Plate(name="steps", title="Steps", reading="", alt="", missing="Not drawn: no step.")],
            sheets=[
                Sheet(name="wide", title="Windows", note="In tokens.", rows=wide),
                Sheet(
                    name="wordy", title="Wordy", note="", rows=wordy, data=pd.DataFrame({"n": [1.5]}), best=("value",)
                ),
            ],
            files={"window_points.csv": "x,y\n1,2\n"},
        )
    ]
