"""The paper's four pairs on a laptop: the whole graph is there before any weight is."""

import pytest

from stages.plan.settings import LISTS, plan_of
from tests.pipeline.project import STARTED, clone, commit

pytestmark = pytest.mark.large

PAIRS = ("qwen14b", "qwen72b", "llama13b", "llama70b")


def test_dvc_repro_dry_lists_every_stage_of_all_four(tmp_path):
    """One start of DVC for all of them: it costs seconds.

    --force: without it DVC 3.67 looks at dependencies that only a run would make, and stops at the first.
    """
    project = clone(tmp_path / "large")
    project.keep(*PAIRS)
    lists = [plan_of(profile).lists for profile in PAIRS]
    assert all(found == lists[0] for found in lists), "one start of DVC takes one set of lists"
    project.set(profiles=list(PAIRS), **{name: list(lists[0][name]) for name in LISTS})
    commit(project)
    listed = STARTED.findall(project.dvc("repro", "--dry", "--force"))
    assert len(set(listed)) == len(listed)
    once = ("points", "models", "corpus", "trajectories", "adapt", "gradable", "report")
    for profile in PAIRS:
        wanted = {f"{stage}@{profile}" for stage in once}
        wanted |= {f"distill@{profile}-{name}" for name in lists[0]["objectives"]}
        for benchmark in lists[0]["benchmarks"]:
            wanted |= {f"benchmark@{profile}-{benchmark}", f"vanilla@{profile}-{benchmark}"}
            wanted |= {f"evaluate@{profile}-{benchmark}-{method}" for method in lists[0]["methods"]}
        wanted |= {f"drafter@{profile}-{method}" for method in lists[0]["methods"]}
        assert {name for name in listed if name.split("@")[-1].split("-")[0] == profile} == wanted
