"""The report as files: same bytes for same data, complete, loud where it must be."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from ruamel.yaml import YAML

from stages.common import entry, store
from stages.common.params import ParamError, load
from stages.report import content, figures, style, tables
from stages.report.params import ReportParams
from tests.stages.reporting import BENCHMARKS, make, put_cell, rows_of, set_up, stage, study
from tests.stages.test_report_measures import NAMES, PARAMS, cell, record


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An own copy of the data, to change."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stage, "studies", study)
    set_up(tmp_path)


@pytest.fixture
def wordy(workplace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `workplace`, without the seconds that figures take."""
    monkeypatch.setattr(stage.gallery, "plates", lambda report: [])


@pytest.fixture
def quick(workplace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `workplace`, without the figures that take longest."""

    def absent(*_: Any, **__: Any) -> None:
        raise figures.Absent("left out by the test")

    for name in ("positions", "training"):
        monkeypatch.setattr(figures, name, absent)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_all_files_and_the_same_bytes_twice(made: Path, workplace: None) -> None:
    first = contents(made)
    names = {"speedup", "acceptance", "acceptance_training", "histogram", "cost", "training", "window"}
    sheets = {"by_method", "contrasts", "lossless", "costs", "fairness", "settings", "machine", "wide", "wordy"}
    sheets |= {"published", "published_figure_5", "published_figure_6", "published_figure_7"}
    assert set(first) == {f"figures/{name}.svg" for name in names} | {
        *(f"tables/{name}.{end}" for name in sheets for end in ("csv", "tex")),
        *("tables/histogram.csv", "tables/window_points.csv", "tables/loss_adapt.csv", "tables/loss_streak.csv"),
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


def test_other_data_gives_other_bytes(made: Path, quick: None) -> None:
    first = contents(made)
    put_cell("cpu", "humaneval", "specdiff", rows_of("humaneval", "specdiff", verify_s=0.9))
    second = contents(make())
    assert first["figures/cost.svg"] != second["figures/cost.svg"]
    assert first["tables/costs.csv"] != second["tables/costs.csv"]
    assert first["figures/histogram.svg"] == second["figures/histogram.svg"]


def test_a_colour_changes_figures_but_no_number(made: Path, quick: None) -> None:
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
    assert (made / "tables" / "loss_streak.csv").read_text() == "step,loss\n1,3\n2,2.5\n"
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


def test_svg_has_no_date_and_is_whole(made: Path) -> None:
    for path in (made / "figures").glob("*.svg"):
        text = path.read_text()
        assert text.rstrip().endswith("</svg>")
        assert "<metadata" not in text
        assert not re.search(r"20\d\d-\d\d-\d\d", text)


def test_smoke_says_that_it_means_nothing(wordy: None) -> None:
    smoke, real = make("smoke"), make("cpu")
    for name in ("report.html", "report.md"):
        assert "The numbers below mean nothing." in (smoke / name).read_text()
        assert "mean nothing" not in (real / name).read_text()


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
    assert [path.name for path in (folder / "figures").glob("*.svg")] == ["window.svg"], "the study's"
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


def test_a_cell_pulled_from_another_machine_is_no_part_of_a_ratio(workplace: None) -> None:
    """`dvc pull` and DVC's run-cache bring cells from wherever they were timed."""
    put_cell("cpu", "humaneval", "specdiff2_tree", rows_of("humaneval", "specdiff2_tree"), device="A100", cores=64)
    with pytest.raises(ValueError, match=r"humaneval/specdiff2_tree: cores 64, device A100") as error:
        make()
    assert str(error.value).endswith("dvc repro -f -s evaluate@cpu-humaneval-specdiff2_tree")
