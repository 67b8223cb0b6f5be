"""Two reports beside each other: of two profiles, and of two revisions."""

import subprocess
from pathlib import Path

import pandas as pd
import pytest
from ruamel.yaml import YAML

from stages.common import store
from stages.report import compare

ROWS = [("maths", "seen", "vanilla", 1.0, 0.0), ("maths", "seen", "tree", 1.5, 1.2), ("code", "test", "tree", 0.9, 0.4)]


def put_report(profile, rows):
    columns = ["benchmark", "split", "method", "speedup", "accepted_streak"]
    table = pd.DataFrame(rows, columns=columns)
    table["speedup_low"], table["speedup_high"] = table["speedup"] - 0.1, table["speedup"] + 0.1
    store.write_text(store.report_folder(profile) / "speedups.csv", table.to_csv(index=False))


def git(*words):
    who = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    subprocess.run(["git", *who, *words], check=True, capture_output=True)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    YAML().dump({"short": {"models": {}}, "long": {"models": {}}, "bare": {"models": {}}}, Path("params.yaml"))
    put_report("short", ROWS)
    put_report("long", [(*ROWS[1][:3], 2.0, 2.5), ("code", "test", "new", 1.25, 1.0)])


def cells(text):
    table = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_two_profiles(capsys):
    compare.main(["--profile", "short", "--compare", "long"])
    found = {(row["benchmark"], row["method"]): row for row in cells(capsys.readouterr().out)}
    assert set(found) == {("maths", "vanilla"), ("maths", "tree"), ("code", "tree"), ("code", "new")}
    tree = found["maths", "tree"]
    assert (tree["speed-up short"], tree["streak short"]) == ("1.50 [1.40, 1.60]", "1.20")
    assert (tree["speed-up long"], tree["streak long"]) == ("2.00 [1.90, 2.10]", "2.50")
    assert (found["code", "tree"]["speed-up short"], found["code", "tree"]["speed-up long"]) == (
        "0.90 [0.80, 1.00]",
        "n/a",
    )
    assert found["code", "new"]["streak short"] == "n/a"
    assert (tree["ratio"], tree["intervals"]) == ("0.75", "apart")
    assert (found["code", "tree"]["ratio"], found["code", "tree"]["intervals"]) == ("n/a", "n/a")


def test_what_differs_is_said_first():
    said = compare.side_by_side("short", "long").splitlines()[0]
    assert "1 row of drafting methods are in both: short is faster in 0 of them, 0.75 times long" in said
    assert "in 1 the intervals are apart." in said
    assert "Only in short: 2 rows (vanilla, tree)." in said
    assert "Only in long: 1 row (new)." in said
    assert "LOSSLESS" not in said
    table = pd.read_csv(store.report_folder("long") / "speedups.csv").assign(unexcused_differences=[0, 2])
    store.write_text(store.report_folder("long") / "speedups.csv", table.to_csv(index=False))
    assert "long is NOT LOSSLESS: 2 answers differ" in compare.side_by_side("short", "long")


def test_order_is_that_of_the_reports():
    put_report("short", [("z", "s", "b", 1.5, 1.0), ("a", "s", "c", 1.5, 1.0)])
    put_report("long", [("z", "s", "a", 1.5, 1.0), ("z", "s", "b", 1.5, 1.0)])
    found = cells(compare.side_by_side("short", "long"))
    assert [(row["benchmark"], row["method"]) for row in found] == [("z", "b"), ("a", "c"), ("z", "a")]


def test_a_report_from_before_a_column_existed_still_compares():
    file = store.report_folder("long") / "speedups.csv"
    store.write_text(file, "benchmark,split,method,speedup,remark\nmaths,seen,tree,2.0,x\n")
    [tree] = [
        row for row in cells(compare.side_by_side("short", "long")) if row["method"] == "tree" and row["ratio"] != "n/a"
    ]
    assert (tree["speed-up long"], tree["intervals"], tree["streak long"]) == ("2.00 [n/a, n/a]", "n/a", "n/a")
    store.write_text(file, "place,speedup\nx,1\n")
    with pytest.raises(ValueError, match=r"long/speedups.csv: no column benchmark, split, method"):
        compare.side_by_side("short", "long")


def test_two_revisions():
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    put_report("short", [(*ROWS[1][:3], 1.75, 1.5)])
    found = {(row["benchmark"], row["method"]): row for row in cells(compare.side_by_side("short", "HEAD"))}
    assert found["maths", "tree"]["speed-up short"] == "1.75 [1.65, 1.85]"
    assert found["maths", "tree"]["speed-up HEAD"] == "1.50 [1.40, 1.60]"
    assert found["code", "tree"]["speed-up short"] == "n/a"


def test_what_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"reports/bare/speedups\.csv: not found; run dvc repro report@bare"):
        compare.side_by_side("short", "bare")
    git("init", "-q")
    with pytest.raises(ValueError, match=r"'nowhere' is neither a profile \(short, long, bare\) nor a revision"):
        compare.side_by_side("short", "nowhere")
