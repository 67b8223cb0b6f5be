"""From nothing to the report: once through, then nothing to do, and nothing of it in Git."""

import json
import re

import pytest
from ruamel.yaml import YAML

from stages.code.imports import ROOT
from stages.common import store
from tests.pipeline.project import STARTED, commit

pytestmark = pytest.mark.slow


def test_every_stage_ran_once(smoke):
    started = STARTED.findall(smoke.output)
    assert len(set(started)) == len(started)
    stages = set(YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"])
    assert {name.split("@")[0] for name in started} == stages - {"distill_soft"}  # the same program as distill


def test_the_second_run_does_nothing(smoke):
    output = smoke.project.dvc("repro")
    assert "Data and pipelines are up to date." in output
    assert STARTED.findall(output) == []


def test_git_sees_no_data(smoke):
    listed = smoke.project.run("git", "status", "--porcelain", "--untracked-files=all").splitlines()
    assert [line[3:] for line in listed] in ([], ["dvc.lock"])


def test_nothing_half_done_stays(smoke):
    scratch = smoke.project.root / store.scratch_file()
    assert not [path for path in scratch.rglob("*") if path.is_file()]
    assert not [path for path in (smoke.project.root / "data").rglob("*") if "partial" in path.name]


def test_the_report_says_that_the_numbers_mean_nothing(smoke):
    from stages.report.words import SMOKE  # late: brings pandas and matplotlib

    folder = smoke.project.root / store.report_folder("smoke")
    assert SMOKE in (folder / "report.md").read_text()
    assert SMOKE in (folder / "report.html").read_text()
    assert list((folder / "figures").glob("*.svg"))


def test_every_text_is_vanillas(smoke):
    """float32 on one thread: no difference is excused, and one fails the stage."""
    params = smoke.project.params()
    for benchmark in params["benchmarks"]:
        folder = smoke.project.root / store.cell_file("smoke", benchmark, "vanilla").parent
        cells = {file.stem: store.read_parquet(file, store.CELLS) for file in sorted(folder.iterdir())}
        assert set(cells) == {"vanilla", *params["methods"]}
        texts = [row["output_ids"] for row in cells["vanilla"]]
        assert texts
        for rows in cells.values():
            assert [row["output_ids"] for row in rows] == texts


ACCOUNT = re.compile(
    r"specdiff2_tree: (\d+) tokens, acceptance length \d\.\d\d, [\d.]+ tokens/s against [\d.]+ of vanilla: \d+\.\d\dx\n"
)


def test_a_question_is_answered_on_the_terminal(smoke):
    def ask(*words: str) -> str:
        return smoke.project.run("python", "-m", "stages.generate", "--profile", "smoke", "1 + 1", *words)

    plain, coloured = ask(), ask("--colour")
    account = ACCOUNT.search(plain)
    assert account is not None, plain
    assert 1 < int(account[1]) <= smoke.project.params()["smoke"]["evaluate"]["shared"]["max_new_tokens"]
    assert "\033[" not in plain
    assert coloured.startswith("\033[33m"), "the first word comes from the prefill: the verifier's own"
    words = re.sub(r"\033\[\d+m", "", coloured)
    assert words.startswith(plain[: account.start()]), "colour changes no word"
    assert "specdiff2_tree: 0 token(s), nothing to measure" in ask("--max-new-tokens", "0")


def test_dvc_compares_two_revisions(smoke, tmp_path):
    """`dvc exp diff`, `metrics diff` and `plots diff` between two commits, with the numbers of both."""
    project = smoke.project.copy(tmp_path / "copy")
    project.run("git", "add", "--force", store.report_folder("smoke").as_posix())  # only real profiles' live in Git
    commit(project)
    file = project.root / store.report_folder("smoke") / "metrics.json"
    metrics = json.loads(file.read_text())
    metrics["lossless"]["excused_differences"] = 7
    file.write_text(json.dumps(metrics))
    commit(project)
    for words in (("exp", "diff"), ("metrics", "diff")):
        shown = json.loads(project.dvc(*words, "HEAD~1", "HEAD", "--json").splitlines()[-1])
        changed = shown.get("metrics", shown)["reports/smoke/metrics.json"]["lossless.excused_differences"]
        assert (changed["old"], changed["new"]) == (0, 7)
    output = project.dvc("plots", "diff", "HEAD~1", "HEAD", "--out", str(project.root / ".plots"))
    assert "failed" not in output.lower()
    assert "speed-up" in (project.root / ".plots" / "index.html").read_text()


def test_dvc_shows_metrics_and_plots(smoke):
    shown = json.loads(smoke.project.dvc("metrics", "show", "--json").splitlines()[-1])
    assert "reports/smoke/metrics.json" in shown[""]["data"]
    output = smoke.project.dvc("plots", "show", "--out", str(smoke.project.notes.with_name(".plots")))
    assert "failed" not in output.lower()
    page = (smoke.project.root / ".plots" / "index.html").read_text()
    for name in ("speed-up", "acceptance by position", "training"):
        assert name in page
