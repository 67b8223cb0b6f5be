"""What an edit reruns, row by row: what it changes by itself, and that nothing else can follow from that.

The stages are stood in for (stand_in.py): which of them run is a matter of dvc.yaml and its hashes alone.
"""

import pytest

from tests.pipeline.project import RESTORED, STARTED, Effect, Project

NOTHING: set[str] = set()
REPORT = {"report@smoke"}
BENCHMARKS = ("gsm_symbolic", "humaneval")
METHODS = ("specdiff2", "specdiff2_tree", "eagle2")
VANILLA = {f"vanilla@smoke-{benchmark}" for benchmark in BENCHMARKS}
DRAFTERS = {f"drafter@smoke-{method}" for method in METHODS}
ADAPT, DISTILL = {"adapt@smoke"}, {"distill@smoke-streak", "distill@smoke-trie_streak"}
POINTS, GRADABLE = {"points@smoke"}, {"gradable@smoke"}  # they look at the lists of benchmarks
FEATURES, EAGLE = {"features@smoke-verifier"}, {"baselines@smoke-eagle"}
TRAINED = ADAPT | DISTILL | EAGLE


def cells(*methods: str) -> set[str]:
    return {f"evaluate@smoke-{benchmark}-{method}" for benchmark in BENCHMARKS for method in methods}


def effect_of_params(project: Project, **values) -> Effect:
    with project.edited("params.yaml", **values):
        return project.effect()


def effect_of_code(project: Project, file: str) -> Effect:
    """Once `code` has looked at the edit, as `dvc repro` lets it do first."""
    hashes = project.root / "data" / "code"
    before = {path: path.read_bytes() for path in hashes.rglob("*.json")}
    try:
        with project.edited(file):
            project.run("python", "-m", "stages.code")
            return project.effect(apart_from={"code"})
    finally:
        for path, text in before.items():
            path.write_bytes(text)


def test_a_finished_run_has_nothing_to_do(finished):
    """Not even after Python has compiled the code that lies in the folders of the stages."""
    for stage in ("adapt", "report"):
        folder = finished.root / "stages" / stage / "__pycache__"
        folder.mkdir(exist_ok=True)
        (folder / "compiled.cpython-311.pyc").write_bytes(b"compiled")
    assert finished.effect().changed == NOTHING


def test_a_colour_reruns_the_report(finished):
    effect = effect_of_params(finished, **{"report.colours.methods.vanilla": "#000000"})
    assert effect == (REPORT, REPORT)


def test_a_value_of_a_method_reruns_its_cells(finished):
    effect = effect_of_params(finished, **{"smoke.evaluate.specdiff2.gamma": 3})
    assert effect == (cells("specdiff2"), cells("specdiff2") | REPORT)


def test_another_drafter_for_a_method_retrains_nothing(finished):
    effect = effect_of_params(finished, **{"smoke.evaluate.specdiff2.drafter": "trie_streak"})
    assert effect.reach == {"drafter@smoke-specdiff2"} | cells("specdiff2") | REPORT


def test_another_layer_to_keep_asks_the_verifier_again(finished):
    effect = effect_of_params(finished, **{"smoke.trajectories.keep_layers": [0, 1, 2]})
    trajectories = {"trajectories@smoke"}
    assert effect == (trajectories, trajectories | FEATURES | TRAINED | DRAFTERS | cells(*METHODS) | REPORT)


def test_a_training_value_keeps_the_unaligned_drafter(finished):
    effect = effect_of_params(finished, **{"smoke.distill.training.lr": 0.002})
    assert effect == (DISTILL, DISTILL | DRAFTERS | cells(*METHODS) | REPORT)


def test_what_is_held_out_is_held_out_of_all_training(finished):
    effect = effect_of_params(finished, **{"smoke.validation.share": 0.2})
    assert effect == (TRAINED, TRAINED | DRAFTERS | cells(*METHODS) | REPORT)


def test_a_value_of_a_baseline_trains_it_alone(finished):
    effect = effect_of_params(finished, **{"smoke.baselines.eagle.training.lr": 0.5})
    assert effect == (EAGLE, EAGLE | DRAFTERS | cells(*METHODS) | REPORT)


def test_other_features_are_read_again_and_train_the_baselines(finished):
    effect = effect_of_params(finished, **{"smoke.features.shard_size": 5})
    assert effect == (FEATURES, FEATURES | EAGLE | DRAFTERS | cells(*METHODS) | REPORT)


def test_the_seed_keeps_the_verifier_alone(finished):
    effect = effect_of_params(finished, seed=1)
    prompts = {"corpus@smoke", *(f"benchmark@smoke-{benchmark}" for benchmark in BENCHMARKS)}
    drawn = prompts | {"trajectories@smoke"} | TRAINED | VANILLA | cells(*METHODS) | REPORT
    assert effect == (drawn, drawn | FEATURES | DRAFTERS | GRADABLE)


def test_the_objectives_keep_the_trajectories(finished):
    """adapt takes its loss from the same file, and baselines may, so they are trained again too."""
    effect = effect_of_code(finished, "kernels/objectives.py")
    assert effect == (TRAINED, TRAINED | DRAFTERS | cells(*METHODS) | REPORT)


def test_the_acceptance_rule_reruns_every_cell_and_no_training(finished):
    effect = effect_of_code(finished, "kernels/accept.py")
    assert effect == (VANILLA | cells(*METHODS), VANILLA | cells(*METHODS) | REPORT)


def test_the_code_of_a_method_reruns_its_cells(finished):
    effect = effect_of_code(finished, "stages/evaluate/methods/specdiff2_tree.py")
    assert effect.reach == cells("specdiff2_tree") | REPORT


def test_a_new_benchmark_leaves_the_training_alone(finished):
    effect = effect_of_params(finished, benchmarks=[*BENCHMARKS, "mt_bench"])
    new = {"benchmark@smoke-mt_bench", "vanilla@smoke-mt_bench"}
    new |= {f"evaluate@smoke-mt_bench-{method}" for method in METHODS}
    new |= POINTS | GRADABLE
    assert effect == (new | REPORT, new | REPORT)


def test_values_of_another_profile_rerun_nothing(finished):
    values = {"cpu.evaluate.specdiff2.gamma": 3, "cpu.adapt.training.lr": 0.5, "cpu.trajectories.max_new_tokens": 7}
    assert effect_of_params(finished, **values).changed == NOTHING


@pytest.mark.slow
def test_a_retrained_drafter_reruns_the_cells_of_its_methods(finished, tmp_path):
    """What really runs: every manifest is looked at again, and only those that came out different go on."""
    project = finished.copy(tmp_path / "copy")
    project.set(**{"smoke.distill.trie_streak.drafts": 8})
    ran = STARTED.findall(project.dvc("repro"))
    assert len(set(ran)) == len(ran)
    assert set(ran) == {"distill@smoke-trie_streak"} | DRAFTERS | cells("specdiff2_tree") | REPORT


@pytest.mark.slow
def test_a_value_and_back_is_restored(finished, tmp_path):
    """Measured seconds differ from run to run: the same bytes mean that nothing was measured again.

    The report lives in Git and not in DVC's cache, so it alone is drawn again, unless its deps are what they were.
    """
    project = finished.copy(tmp_path / "copy")
    measured = project.root / "data" / "smoke" / "cells" / "humaneval" / "specdiff2.parquet"
    before = measured.read_bytes()
    with project.edited("params.yaml", **{"smoke.evaluate.specdiff2.gamma": 3}):
        assert set(STARTED.findall(project.dvc("repro"))) == cells("specdiff2") | REPORT
        assert measured.read_bytes() != before
    output = project.dvc("repro")
    assert set(STARTED.findall(output)) <= REPORT
    assert set(RESTORED.findall(output)) - REPORT == cells("specdiff2")
    assert measured.read_bytes() == before
