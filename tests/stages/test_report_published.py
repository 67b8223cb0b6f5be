"""Published numbers as tables: every number of the file once, and ours beside its kin."""

import pandas as pd
import pytest

from stages.report import published
from tests.stages.test_report_measures import cell, record, speedups

FACTS = pd.read_csv(published.FILE, keep_default_na=False)


def test_every_row_has_a_source_and_a_number() -> None:
    assert FACTS["source"].ne("").all()
    assert FACTS["value"].gt(0).all()
    assert not FACTS.duplicated(["source", "verifier", "benchmark", "method", "metric", "setting"]).any()


@pytest.mark.parametrize("name", published.sources())
def test_a_figures_table_has_each_of_its_numbers_once(name: str) -> None:
    wide = published.figure(name)
    shown = sorted(wide.select_dtypes("number").drop(columns=["T_d"], errors="ignore").stack())
    assert shown == sorted(FACTS.loc[FACTS["source"] == name, "value"])
    assert published.about(name).startswith(f"The paper's {name}: ")


def test_the_axis_is_what_varies_most() -> None:
    five = published.figure("Figure 5")
    assert list(five.columns) == ["verifier", "T_d", "K = 1", "K = 2", "K = 4", "K = 8"]
    assert five.iloc[1].tolist() == ["Qwen2.5-14B-Instruct", 1.0, 3.37, 3.44, 3.53, 3.58]
    two = published.figure("Figure 2").set_index("method")
    assert list(two.columns)[:2] == ["j = 1", "j = 2"]
    assert two.loc["streak", "j = 2"] == 0.547
    one = published.figure("Figure 1")
    assert list(one.columns) == ["verifier", "eagle", "eagle2", "specdiff", "specdiff2"]


def test_a_figure_nobody_read_off_says_so() -> None:
    assert published.figure("Figure 10").empty
    assert "no number in published.csv" in published.about("Figure 10")


def test_published_numbers_stand_beside_their_kin() -> None:
    table = speedups(
        cell([record(0, [4])], method="specdiff"),
        cell([record(0, [1], split="seen_template")], method="specdiff"),
    )
    lines = published.beside(table)
    assert set(lines["method"]) == {"specdiff"}
    assert lines["published"].tolist() == ["2.51", "3.19"]
    assert lines["same method here"].tolist() == ["1.33 to 3.33"] * 2
