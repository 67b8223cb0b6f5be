"""The large profiles through `dvc repro`, with tiny models in the hub's cache: nothing else of them is small."""

import pytest

from stages.common import store
from stages.plan.settings import LISTS, plan_of
from tests.pipeline import twins, warm
from tests.pipeline.project import STARTED, Project, clone, commit
from tests.pipeline.test_large import PAIRS

pytestmark = pytest.mark.large

METHODS = ["specdiff2", "specdiff2_tree"]  # of both objectives
BENCHMARKS = ["math500", "gpqa"]


@pytest.fixture(scope="module")
def twinned(tmp_path_factory) -> Project:
    """All four, after one `dvc repro`."""
    home, aside = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("warm")
    project = clone(tmp_path_factory.mktemp("twins"), programs=aside)
    whole = project.params()
    sections = {f"{name}_tiny": twins.twin(whole[name], folder=project.root) for name in PAIRS}
    for name, section in sections.items():
        twins.fill_cache(home, section, aside=tmp_path_factory.mktemp(name))
    twins.write_profiles(project, sections)
    lists = {**plan_of(PAIRS[0]).lists, "methods": METHODS, "benchmarks": BENCHMARKS}
    project.set(profiles=list(sections), **{name: list(lists[name]) for name in LISTS})
    commit(project)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(home))
        with warm.started(aside, project.env()):
            output = project.dvc("repro")
    started = STARTED.findall(output)
    assert len(set(started)) == len(started)
    assert {f"report@{name}" for name in sections} <= set(started)
    return project


@pytest.mark.parametrize("name", [f"{name}_tiny" for name in PAIRS])
def test_a_twin_goes_from_the_hub_to_the_report(twinned, name):
    for benchmark in BENCHMARKS:
        cells = {
            method: store.read_parquet(twinned.root / store.cell_file(name, benchmark, method), store.CELLS)
            for method in ("vanilla", *METHODS)
        }
        texts = [row["output_ids"] for row in cells["vanilla"]]
        assert texts
        for rows in cells.values():
            assert [row["output_ids"] for row in rows] == texts
    card = store.read_json(twinned.root / store.drafter_folder(name, "streak") / "drafter.json")
    assert card["base"] == "models/drafter"
    assert (twinned.root / store.report_folder(name) / "report.md").exists()
