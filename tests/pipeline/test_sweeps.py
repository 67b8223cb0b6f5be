"""Sweeps through DVC: what they need is made, a value that a sweep does not use reruns none, one that it uses does."""

import pytest

from stages.common import store, studies
from tests.pipeline.project import STARTED

pytestmark = pytest.mark.slow

POINTS = {"size": 4, "products_budget": 2}  # of each sweep
GRIDS = {f"grid@smoke-{name}" for name in POINTS}


def test_every_point_has_its_file_and_vanillas_texts(smoke):
    for name, points in POINTS.items():
        files = sorted((smoke.project.root / studies.sweep_folder("smoke", name)).iterdir())
        assert len(files) == points
        rows = [row for file in files for row in store.read_parquet(file, store.CELLS)]
        assert rows
        for row in rows:
            assert row["matches_vanilla"] or row["method"] == "specdiff", "Leviathan's rule has other coins at T_v > 0"


def test_the_report_shows_them(smoke):
    folder = smoke.project.root / store.report_folder("smoke")
    assert "sweep_size.svg" in {file.name for file in (folder / "figures").iterdir()}
    assert "Drafter size" in (folder / "report.md").read_text()


def test_what_is_graded_has_answers(smoke):
    files = sorted((smoke.project.root / studies.graded_folder("smoke", "products_budget")).iterdir())
    assert len(files) == POINTS["products_budget"]
    assert all(row["correct"] is not None for file in files for row in store.read_parquet(file, store.CELLS))


def test_a_value_reruns_the_sweeps_that_use_it(smoke, tmp_path):
    """Grids are made again whenever a method's section changes; only one that came out different goes on."""
    project = smoke.project.copy(tmp_path / "copy")
    values = {
        "smoke.evaluate.specdiff2_fed.nodes": 5,  # in neither
        "smoke.evaluate.specdiff2_tree.gamma": 3,  # in `size`
    }
    with project.edited("params.yaml", **values):
        assert set(STARTED.findall(project.dvc("repro", "--single-item", *sorted(GRIDS)))) == GRIDS
        assert {name for name in project.effect().changed if name.startswith("sweep@")} == {"sweep@smoke-size"}
