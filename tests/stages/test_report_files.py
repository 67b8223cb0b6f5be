"""The report as files: same bytes for same data, complete, self-contained, loud where it must be."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from ruamel.yaml import YAML

from stages.common import entry, store
from stages.common.params import ParamError, load
from stages.report import __main__ as stage
from stages.report import content, figures, style, tables
from stages.report.params import ReportParams
from tests.stages.test_report_measures import NAMES, PARAMS, STAMP, cell, record

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
    provenance = {"stamp": STAMP | stamp, "drafter": drafter, "profile": profile}
    store.write_parquet(store.cell_file(profile, benchmark, method), rows, store.CELLS, provenance)


def set_up(folder: Path) -> None:
    """params.yaml, cells and curves of the profiles `cpu` and `smoke`."""
    document = {
        "seed": 0,
        "benchmarks": [*BENCHMARKS],
        "methods": NAMES[1:],  # vanilla is always there
        "objectives": ["streak"],
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


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An own copy of the data, to change."""
    monkeypatch.chdir(tmp_path)
    set_up(tmp_path)


@pytest.fixture
def wordy(workplace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `workplace`, without the seconds that figures take."""
    monkeypatch.setattr(stage.gallery, "plates", lambda report: [])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report to look at, made once."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        set_up(folder)
        return (folder / make()).resolve()


def make(profile: str = "cpu") -> Path:
    stage.main(entry.Run(profile=profile, words={}), load(ReportParams, "report"), seed=0)
    return store.report_folder(profile)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_all_files_and_the_same_bytes_twice(made: Path, workplace: None) -> None:
    first = contents(made)
    names = {"speedup", "acceptance", "acceptance_training", "histogram", "cost", "training"}
    assert set(first) == {f"figures/{name}.svg" for name in names} | {
        *(
            "metrics.json",
            "speedups.csv",
            "speedups.md",
            "speedups.tex",
            "methods.tex",
            "bars.csv",
            "curves.csv",
            "acceptance.csv",
        ),
        *("report.html", "report.md"),
    }
    assert contents(make()) == first


def test_other_data_gives_other_bytes(made: Path, workplace: None) -> None:
    first = contents(made)
    put_cell("cpu", "humaneval", "specdiff", rows_of("humaneval", "specdiff", verify_s=0.9))
    second = contents(make())
    assert first["figures/cost.svg"] != second["figures/cost.svg"]
    assert first["report.html"] != second["report.html"]
    assert first["figures/histogram.svg"] == second["figures/histogram.svg"]


def test_a_colour_changes_figures_but_no_number(made: Path, workplace: None) -> None:
    first = contents(made)
    text = Path("params.yaml").read_text().replace("#0072B2", "#D55E00")
    Path("params.yaml").write_text(text)
    second = contents(make())
    assert first["figures/speedup.svg"] != second["figures/speedup.svg"]
    assert first["speedups.csv"] == second["speedups.csv"]


def test_table_has_the_promised_columns(made: Path) -> None:
    table = pd.read_csv(made / "speedups.csv")
    assert ",".join(table.columns) == (
        "benchmark,split,method,prompts,speedup,speedup_low,speedup_high,acceptance_length,acceptance_length_mean,"
        "accepted_streak,cost_ratio,tokens_per_s,excused_differences,unexcused_differences,draft_vocab_coverage"
    )
    assert len(table) == 3 * len(NAMES)
    metrics = json.loads((made / "metrics.json").read_text())
    written = table.set_index(["benchmark", "split", "method"])["speedup"]
    for (benchmark, split, method), speedup in written.items():  # pyright: ignore
        assert metrics[benchmark][split][method]["speedup"] == pytest.approx(speedup)
    bars = pd.read_csv(made / "bars.csv").set_index("place")["speedup"]
    assert len(bars) == 3 * (len(NAMES) - 1), "dvc plots show: a bar of its own for each"
    place = ("gsm_symbolic", "seen_template", "specdiff2_tree")
    assert bars[" / ".join(place)] == pytest.approx(written[place])
    assert metrics["training"]["streak"] == {"loss": 2.6, "streak": 0.9, "trie16": 1.6}
    assert metrics["lossless"] == {"excused_differences": 0, "unexcused_differences": 0}
    acceptance = pd.read_csv(made / "acceptance.csv")
    taught = acceptance[acceptance["source"] == "teacher_forced"]
    assert taught["acceptance_at_pos_j"].tolist() == [0.6, 0.3] * 2
    assert taught["alpha_j"].tolist() == [0.6, 0.5] * 2


def test_slower_is_printed_as_slower(made: Path) -> None:
    """specdiff: 4 tokens would take 0.4 s, took 0.46 s on average."""
    row = pd.read_csv(made / "speedups.csv").query("method == 'specdiff'").iloc[0]
    assert row["speedup"] == pytest.approx(0.4 / 0.46, rel=1e-5)
    for name in ("speedups.md", "speedups.tex", "report.md", "report.html"):
        assert "0.87" in (made / name).read_text(), name


def test_findings_follow_the_data(wordy: None) -> None:
    text = (make() / "report.md").read_text()
    assert "The fastest method is specdiff2_tree. It decodes at" in text
    assert "1.96 times on humaneval (test) [" in text
    assert "even the fastest" not in text
    slow = [row | {"decode_s": 2.0} for row in rows_of("humaneval", "specdiff2_tree")]
    put_cell("cpu", "humaneval", "specdiff2_tree", slow)
    text = (make() / "report.md").read_text()
    assert "0.87 times on humaneval (test) with specdiff [" in text
    assert "On humaneval (test) even the fastest is slower than vanilla." in text


class Page(HTMLParser):
    """Tags that stay open, requests, ids and images without words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.requests: list[str] = []
        self.mute = 0
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        if tag not in ("meta", "br", "hr", "img", "link"):
            self.open.append(tag)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        self.requests += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href") and not str(v).startswith("#")]
        self.mute += tag == "svg" and not given.get("aria-label")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag


def test_page_stands_alone(made: Path) -> None:
    text = (made / "report.html").read_text()
    page = Page(text)
    assert "http" not in text
    assert "@import" not in text
    assert not page.requests
    assert not page.open
    assert not page.mute
    assert page.tags.count("svg") == 6
    assert len(page.ids) == len(set(page.ids)), "figures must not share ids"
    used = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    assert used
    assert used <= set(page.ids), "a clip path or marker lost its target"


def test_svg_has_no_date_and_is_whole(made: Path) -> None:
    for path in (made / "figures").glob("*.svg"):
        text = path.read_text()
        assert text.rstrip().endswith("</svg>")
        assert "<metadata" not in text
        assert not re.search(r"20\d\d-\d\d-\d\d", text)


def test_smoke_says_that_it_means_nothing(wordy: None) -> None:
    for name in ("report.html", "report.md"):
        assert "The numbers below mean nothing." in (make("smoke") / name).read_text()
        assert "mean nothing" not in (make("cpu") / name).read_text()


def test_unexcused_difference_is_loud(wordy: None, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of("humaneval", "specdiff")
    rows[0] |= {"matches_vanilla": False, "first_difference": 2}
    rows[1] |= {"matches_vanilla": False, "first_difference": 1, "excused": True}
    put_cell("cpu", "humaneval", "specdiff", rows)
    entry.run(stage._run, compute=False, argv=["cpu"])
    loud = "NOT LOSSLESS: 1 answer differ"
    assert loud in capsys.readouterr().err
    for name in ("report.html", "report.md"):
        assert loud in (store.report_folder("cpu") / name).read_text()
    metrics = json.loads((store.report_folder("cpu") / "metrics.json").read_text())
    assert metrics["lossless"] == {"excused_differences": 1, "unexcused_differences": 1}


def test_shared_templates_are_declared(made: Path) -> None:
    assert "share templates with training" in (made / "report.html").read_text()


def test_mixed_machines_stop_the_stage(wordy: None, capsys: pytest.CaptureFixture[str]) -> None:
    put_cell("cpu", "humaneval", "specdiff", rows_of("humaneval", "specdiff"), device="A100")
    with pytest.raises(SystemExit) as stopped:
        entry.run(stage._run, compute=False, argv=["cpu"])
    assert stopped.value.code == 1
    assert "dvc repro -f -s evaluate@cpu-humaneval-specdiff" in capsys.readouterr().err
    assert not store.report_folder("cpu").exists(), "nothing half-made"


def test_missing_cell_is_named(wordy: None) -> None:
    store.cell_file("cpu", "humaneval", "specdiff").unlink()
    with pytest.raises(ValueError, match=r"cells/humaneval/specdiff.parquet: not found"):
        make()


def test_what_cannot_be_drawn_is_said(workplace: None) -> None:
    """No curves, and answers too short to time: the page says so and stands."""
    shutil.rmtree(store.curves_file("cpu", "adapt").parent)
    for benchmark in BENCHMARKS:
        for method in NAMES:
            rows = [
                row
                | {
                    "yardstick_tokens": 0,
                    "yardstick_s": 0.0,
                    "step_s": 0.0,
                    "new_tokens": 0,
                    "accepted": [],
                    "covered_tokens": 0,
                }
                for row in rows_of(benchmark, method)
            ]
            put_cell("cpu", benchmark, method, rows)
    folder = make()
    text = (folder / "report.html").read_text()
    assert "no training has written a curve" in text
    assert "No method besides vanilla was timed" in text
    assert not list((folder / "figures").glob("*.svg"))
    json.loads((folder / "metrics.json").read_text())


def test_curve_without_its_columns_is_named(wordy: None) -> None:
    store.write_text(store.curves_file("cpu", "adapt"), "loss\n1.0\n")
    with pytest.raises(ValueError, match=r"curves/adapt.csv: no column split, step"):
        make()


def test_training_rows_alone_still_draw() -> None:
    curve = pd.DataFrame({"step": [1, 2], "split": "train", "loss": [3.0, 2.5]})
    with style.settings():
        text = style.svg(figures.training({"adapt": curve}, {"adapt": "#E69F00"}))
    assert "no held-out streak was written" in text


def test_latex_escapes_and_balances() -> None:
    table = pd.DataFrame({"a_b": ["50% & {x} $ # ~ ^ \\"], "n": [1.5]})
    text = tables.latex(table)
    assert r"a\_b" in text
    assert r"50\% \& \{x\} \$ \# \textasciitilde{} \textasciicircum{} \textbackslash{}" in text
    bare = re.sub(r"\\.", "", text)
    assert bare.count("{") == bare.count("}")
    assert re.search(r"\\toprule.*\\midrule.*\\bottomrule", text, re.DOTALL)


def test_latex_lines_have_all_columns(made: Path) -> None:
    text = (made / "speedups.tex").read_text()
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 1 + 9
    assert {line.count("&") for line in lines} == {len(tables.COLUMNS) - 1}
    assert not re.search(r"(?<!\\)_", "\n".join(lines))


def test_markup_in_names_is_text() -> None:
    made = cell([record(0, [1], split="<b>&|")])
    report = content.build("cpu", [made], {}, trainings=[], objectives=[], params=PARAMS, seed=0)
    assert "&lt;b&gt;&amp;|" in stage.page.main_table(report)
    assert r"<b>&\|" in tables.markdown(report.table)


def test_a_missing_colour_names_the_key(wordy: None) -> None:
    document = YAML(typ="safe").load(Path("params.yaml"))
    del document["report"]["colours"]["methods"]["specdiff"]
    YAML().dump(document, Path("params.yaml"))
    with pytest.raises(ValueError, match=r"report\.colours\.methods\.specdiff: missing"):
        make()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("resamples", 0, "report.resamples"),
        ("confidence", 95.0, "report.confidence"),
        ("cost_tolerance", "1e-1", "text"),
    ],
)
def test_params_out_of_range(workplace: None, key: str, value: Any, message: str) -> None:
    document = YAML(typ="safe").load(Path("params.yaml"))
    document["report"][key] = value
    YAML().dump(document, Path("params.yaml"))
    with pytest.raises(ParamError, match=message):
        load(ReportParams, "report")


def test_no_colour_is_a_word(workplace: None) -> None:
    Path("params.yaml").write_text(Path("params.yaml").read_text().replace("'#CC79A7'", "pink"))
    with pytest.raises(ParamError, match=r"phases\.draft: 'pink' is not a colour"):
        load(ReportParams, "report")
