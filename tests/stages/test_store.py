"""Files are whole or absent, and a damaged one is named with its remedy."""

import json
import os
import subprocess
import sys

import pytest
import torch

from stages.common import provenance, scratch, store, studies

ROW = {
    "id": "a",
    "split": "test",
    "turns": ["hello"],
    "reference": None,
    "category": "x",
    "prompt_sha256": "0" * 64,
}


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return store.prompts_file("cpu", "humaneval")


def test_round_trip_with_provenance(path):
    store.write_parquet(path, [ROW], store.PROMPTS, {"b": 1, "a": [2]})
    assert store.read_parquet(path, store.PROMPTS) == [ROW]
    assert store.read_provenance(path) == {"a": [2], "b": 1}
    first = path.read_bytes()
    store.write_parquet(path, [ROW], store.PROMPTS, {"a": [2], "b": 1})
    assert path.read_bytes() == first
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("cut", [1, 4, 100, None])
def test_truncated_file_is_named(path, cut):
    store.write_parquet(path, [ROW] * 50, store.PROMPTS, {})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - cut] if cut else b"")
    with pytest.raises(ValueError, match=r"humaneval\.parquet: damaged.*dvc repro"):
        store.read_parquet(path, store.PROMPTS)
    with pytest.raises(ValueError, match="dvc repro"):
        store.read_provenance(path)


def test_missing_file_and_wrong_schema(path):
    with pytest.raises(ValueError, match="not found; run dvc repro trajectories"):
        store.read_parquet(store.trajectories_file("cpu"), store.TRAJECTORIES)
    store.write_parquet(path, [ROW], store.PROMPTS, {})
    with pytest.raises(ValueError, match=r"columns do not match.*output_ids"):
        store.read_parquet(path, store.TRAJECTORIES)


@pytest.mark.parametrize("change", [{"extra": 1}, {"id": None}])
def test_rows_must_fit_the_schema(path, change):
    with pytest.raises(AssertionError):
        store.write_parquet(path, [ROW | change], store.PROMPTS, {})
    assert not path.exists()


def test_an_error_while_writing_keeps_the_old_file(path):
    store.write_parquet(path, [ROW], store.PROMPTS, {})
    before = path.read_bytes()
    with pytest.raises((ValueError, TypeError)):
        store.write_parquet(path, [ROW | {"turns": [3]}], store.PROMPTS, {})
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_killed_writer_leaves_no_file(tmp_path):
    code = """
import os, pathlib, sys
from stages.common import store
def die(*_): os._exit(9)
store._sync = die
store.write_text(pathlib.Path(sys.argv[1]), "half")
"""
    target = tmp_path / "x.json"
    done = subprocess.run([sys.executable, "-c", code, str(target)], cwd=os.getcwd(), check=False)
    assert done.returncode == 9
    assert not target.exists()
    store.write_json(target, {"whole": True})
    assert store.read_json(target) == {"whole": True}
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_json_errors_name_the_file(tmp_path):
    target = tmp_path / "x.json"
    with pytest.raises(ValueError, match=r"x\.json: not found"):
        store.read_json(target)
    target.write_text("{")
    with pytest.raises(ValueError, match=r"x\.json: not readable"):
        store.read_json(target)
    with pytest.raises(ValueError, match="JSON"):
        store.write_json(target, float("nan"))


def test_replace_folder_is_all_or_nothing(tmp_path):
    folder = tmp_path / "model"
    with store.replace_folder(folder) as partial:
        (partial / "a").write_text("1")
    digest = store.sha256_folder(folder)

    def fail() -> None:
        with store.replace_folder(folder) as partial:
            (partial / "a").write_text("2")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        fail()
    assert store.sha256_folder(folder) == digest
    with store.replace_folder(folder) as partial:
        (partial / "b").write_text("1")
    assert store.sha256_folder(folder) != digest
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_sha256_folder_sees_names_and_contents(tmp_path):
    digests = set()
    for name, text in (("a", "1"), ("b", "1"), ("a", "2")):
        folder = tmp_path / f"{name}{text}"
        folder.mkdir()
        (folder / name).write_text(text)
        digests.add(store.sha256_folder(folder))
    assert len(digests) == 3


def test_every_path_names_the_stage_that_makes_it():
    for path, stage in (
        (store.verifier_folder("p"), "models"),
        (store.corpus_file("p"), "corpus"),
        (store.prompts_file("p", "mt_bench"), "benchmark"),
        (store.drafter_folder("p", "adapt"), "adapt"),
        (store.drafter_folder("p", "streak"), "distill baselines"),
        (studies.size_folder("p", "small"), "sizes"),
        (studies.grid_file("p", "window"), "grid"),
        (studies.points_file("p"), "points"),
        (studies.sweep_folder("p", "window") / "gamma-2.parquet", "sweep"),
        (studies.graded_folder("p", "sums") / "one.parquet", "score"),
        (store.curves_file("p", "adapt"), "adapt"),
        (store.checkpoint_folder("p", "streak", 5), "distill"),
        (store.manifest_file("p", "specdiff2"), "drafter"),
        (store.cell_file("p", "b", "m"), "evaluate"),
    ):
        assert store.stage_of(path) == stage


def test_stamp_is_plain_and_repeatable():
    stamp = provenance.stamp(device="cpu", dtype=torch.float32)
    assert stamp == provenance.stamp(device="cpu", dtype="float32")
    assert list(stamp) == ["device", "cores", "threads", "dtype", "torch", "transformers", "python"]
    assert json.loads(json.dumps(stamp)) == stamp
    assert stamp["dtype"] == "float32"
    assert stamp["threads"] == torch.get_num_threads()
    assert provenance.peak_rss_mb() > 50


def test_command_has_no_path(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/somebody/repo/stages/evaluate/__main__.py", "cpu", "a", "b"])
    assert provenance.command() == "python -m stages.evaluate cpu a b"


def test_fingerprint_sees_params_deps_and_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "code.py"
    code.write_text("1")
    marks = [
        scratch.fingerprint({"a": 1}, {"d": "x"}, [code]),
        scratch.fingerprint({"a": 2}, {"d": "x"}, [code]),
        scratch.fingerprint({"a": 1}, {"d": "y"}, [code]),
    ]
    code.write_text("2")
    marks.append(scratch.fingerprint({"a": 1}, {"d": "x"}, [code]))
    assert len(set(marks)) == 4
    folder = scratch.scratch_folder(marks[0])
    (folder / "state").write_text("1")
    assert scratch.scratch_folder(marks[0]) == folder
    scratch.discard(marks[0])
    assert not folder.exists()
