"""LaTeX tables: escaped, balanced, with as many cells in a line as the tabular has columns."""

import re
from pathlib import Path

import pandas as pd
import pytest

from stages.report import latex, tables
from tests.stages.test_report_measures import cell, record, speedups

MULTI = re.compile(r"\\multicolumn\{(\d+)\}")


def columns_of(text: str) -> int:
    found = re.search(r"\\begin\{tabular\}\{([lcr]+)\}", text)
    assert found
    return len(found[1])


def check(text: str) -> None:
    """What makes TeX stop: a special character, an open group or environment, a line with too many cells."""
    assert text.isascii()
    begun, ended = (re.findall(rf"\\{word}\{{(\w+)\}}", text) for word in ("begin", "end"))
    assert begun == ended == ["tabular"]
    bare = re.sub(r"\\.", "", text.replace("\\\\", ""))
    assert bare.count("{") == bare.count("}")
    width, lines = columns_of(text), [line for line in text.splitlines() if line.endswith("\\\\")]
    assert lines
    for line in lines:
        spans = [int(span) for span in MULTI.findall(line)]
        assert len(re.findall(r"(?<!\\)&", line)) + 1 + sum(spans) - len(spans) == width, line
        inside = re.sub(r"\$\\(?:alpha|cdot|times|pm)\$", "", line)
        assert not re.search(r"(?<!\\)[_%#$]|[~^<>]", inside), line
    for rule in re.findall(r"\\cmidrule\(lr\)\{(\d+)-(\d+)\}", text):
        assert 1 < int(rule[0]) < int(rule[1]) <= width


def test_every_table_of_a_report_is_well_formed(made: Path) -> None:
    files = sorted(made.rglob("*.tex"))
    assert {"speedups.tex", "methods.tex", "fairness.tex", "wordy.tex"} <= {path.name for path in files}
    for path in files:
        check(path.read_text(encoding="utf-8"))


def test_special_characters() -> None:
    text = latex.table(pd.DataFrame({"a_b": ["50% & {x} $ # ~ ^ \\ < > α"], "n": [1.5]}))
    assert r"a\_b" in text
    assert (
        r"50\% \& \{x\} \$ \# \textasciitilde{} \textasciicircum{} \textbackslash{} \textless{} \textgreater{}" in text
    )
    assert r"$\alpha$" in text
    check(text)


@pytest.mark.parametrize("broken", ["a & b & c \\\\", "50% & x \\\\", "a_b & x \\\\", "{ & x \\\\"])
def test_the_check_finds_what_is_broken(broken: str) -> None:
    good = latex.table(pd.DataFrame({"a": ["1"], "b": ["2"]}))
    check(good)
    with pytest.raises(AssertionError):
        check(good.replace("1 & 2 \\\\", broken))


def test_numbers_stand_right_and_rows_of_a_place_together(made: Path) -> None:
    text = (made / "speedups.tex").read_text(encoding="utf-8")
    assert "{lll" + "r" * (len(tables.COLUMNS) - 3) + "}" in text
    assert text.count("\\addlinespace") == 2, "between three places"


def test_the_papers_table_has_two_columns_for_each_place_and_the_fastest_in_bold() -> None:
    table = speedups(
        cell([record(0, [0])], method="vanilla"),
        cell([record(0, [1, 1], split="x"), record(0, [1, 1], split="y")], method="specdiff"),
        cell([record(0, [4, 4], split="x")], method="specdiff2_tree"),
    )
    text = latex.by_method(table)
    check(text)
    assert columns_of(text) == 1 + 2 * 2
    assert r" & \multicolumn{2}{c}{gsm\_symbolic x} & \multicolumn{2}{c}{gsm\_symbolic y} \\" in text
    lines = [line for line in text.splitlines() if line.startswith("specdiff")]
    assert lines == [
        r"specdiff & 1.33 & 1.00 & \textbf{1.33} & 1.00 \\",
        r"specdiff2\_tree & \textbf{3.33} & 4.00 & n/a & n/a \\",
    ]


def test_a_table_without_a_drafting_method_is_still_a_table() -> None:
    check(latex.by_method(speedups(cell([record(0, [0])], method="vanilla"))))
