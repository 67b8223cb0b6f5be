"""The large profiles through `dvc repro`, with tiny models in the hub's cache: nothing else of them is small."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stages.common import store
from stages.plan.settings import plan_of
from tests.pipeline import twins, warm
from tests.pipeline.project import STARTED, Project, clone

pytestmark = pytest.mark.large

METHODS = ("specdiff2", "specdiff2_tree")  # of both objectives


class Bench(NamedTuple):
    project: Project  # for one twin after the other
    params: dict[str, Any]  # params.yaml as in the working tree
    hub: Path


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[Bench]:
    """Stages, and what torchrun starts in them, are warm."""
    aside, hub = tmp_path_factory.mktemp("warm"), tmp_path_factory.mktemp("hub")
    project = clone(tmp_path_factory.mktemp("twins"), programs=aside)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(hub))
        patch.setenv("PYTHON_EXEC", str(aside / "python"))
        with warm.started(aside, project.env()):
            yield Bench(project, project.params(), hub)


@pytest.mark.parametrize(
    ("profile", "benchmark", "processes"),
    [("qwen14b", "math500", 2), ("qwen72b", "gpqa", 1), ("llama13b", "humaneval", 1), ("llama70b", "mt_bench", 1)],
)
def test_a_twin_goes_from_the_hub_to_the_report(bench, profile, benchmark, processes, tmp_path):
    """A benchmark each, of other forms: they take most of the time."""
    name, root = f"{profile}_tiny", bench.project.root
    lists = {**plan_of(profile).lists, "methods": METHODS, "benchmarks": (benchmark,)}
    section = twins.twin(bench.params[profile], lists, processes=processes, folder=root)
    twins.fill_cache(bench.hub, section, aside=tmp_path)
    twins.write_profile(bench.project, name, section, lists)

    started = STARTED.findall(bench.project.dvc("repro"))
    assert len(set(started)) == len(started)
    assert f"report@{name}" in started
    cells = {
        method: store.read_parquet(root / store.cell_file(name, benchmark, method), store.CELLS)
        for method in ("vanilla", *METHODS)
    }
    texts = [row["output_ids"] for row in cells["vanilla"]]
    assert texts
    for rows in cells.values():
        assert [row["output_ids"] for row in rows] == texts
    for objective in lists["objectives"]:
        card = store.read_json(root / store.drafter_folder(name, objective) / "drafter.json")
        assert card["base"] == "models/drafter"
    assert (root / store.report_folder(name) / "report.md").exists()
