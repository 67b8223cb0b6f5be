"""Many processes train what one trains: curves, weights, and a state that any number of them goes on from."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stages.common import parallel, windows
from stages.common.lora import Lora
from stages.common.params import ParamError
from stages.common.training import alone
from tests.stages.crew import Job, settings, together, unequal_texts, work
from tests.stages.scripted import tiny_drafter
from tests.stages.test_distill_stage import DISTILL, PARAMS, TRAINING, tiny  # noqa: F401

MUON = {"optimizer": "muon"}
LORA = {"lora": Lora(rank=3, alpha=6.0, targets=("q_proj", "down_proj", "lm_head"), merge=False)}


def assert_same(found, wanted):
    """Curve and weights of two trainings, to rounding: losses to 1e-5, above 10 to the sixth digit of a float32."""
    assert len(found["rows"]) == len(wanted["rows"])
    for row, other in zip(found["rows"], wanted["rows"], strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-5), row["step"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-6, abs=1e-5), row["step"]
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, weight in found["weights"].items():
        torch.testing.assert_close(weight, wanted["weights"][name], rtol=0, atol=1e-4, msg=name)


def test_two_processes_train_what_one_does(tmp_path):
    """DDP, FSDP2 with activations computed again, LoRA: three texts a micro-batch, two for one process, one for the
    other. A run of two that was killed goes on as one process and, of one, as two."""
    one = {
        "adamw": work(Job(folder=tmp_path / "one")),
        "muon": work(Job(folder=tmp_path / "one muon", changed=MUON)),
        "lora": work(Job(folder=tmp_path / "one lora", changed=LORA)),
    }
    halves = [Job(folder=tmp_path / name, strategy="fsdp2", changed=MUON, stop=True) for name in ("by 2", "by 1")]
    assert work(halves[1]) == {}
    jobs = {
        "ddp": Job(folder=tmp_path / "ddp", strategy="ddp"),
        "fsdp2": Job(folder=tmp_path / "fsdp2", strategy="fsdp2", checkpoint_activations=True, changed=MUON),
        "lora": Job(folder=tmp_path / "lora", strategy="fsdp2", changed=LORA),
        "stopped": halves[0],
        "resumed": replace(halves[1], stop=False, strategy="ddp"),
    }
    two = dict(zip(jobs, together(2, list(jobs.values()), tmp_path / "found.pt"), strict=True))
    assert two["stopped"] == {}
    assert_same(two["ddp"], one["adamw"])
    assert_same(two["fsdp2"], one["muon"])
    assert_same(two["lora"], one["lora"])
    assert_same(two["resumed"], one["muon"])
    assert [folder.name for folder in (tmp_path / "by 2").iterdir()] == ["state_3"]
    assert_same(work(replace(halves[0], stop=False)), one["muon"])


@pytest.mark.large
def test_four_processes_go_on_from_two_and_one_from_four(tmp_path):
    changed = {"sequences": 5}
    wanted = work(Job(folder=tmp_path / "one", changed=changed))
    for size, then in ((2, 4), (4, 1)):
        job = Job(folder=tmp_path / f"{size}", strategy="fsdp2", changed=changed, stop=True)
        assert together(size, [job], tmp_path / "found.pt") == [{}]
        go_on = replace(job, stop=False)
        found = work(go_on) if then == 1 else together(then, [go_on], tmp_path / "found.pt")[0]
        assert_same(found, wanted)


def test_one_process_of_a_shared_training_is_the_training_alone(tmp_path):
    """Bit by bit, with activations computed again and killed on the way."""
    wanted = work(Job(folder=tmp_path / "alone"))
    job = Job(folder=tmp_path / "shared", strategy="fsdp2", checkpoint_activations=True, stop=True)
    assert work(job) == {}
    found = work(replace(job, stop=False))
    assert found["rows"] == wanted["rows"]
    assert all(torch.equal(found["weights"][name], weight) for name, weight in wanted["weights"].items())


def test_checkpointed_activations_are_computed_twice():
    """Otherwise equality above says nothing."""
    drafter = tiny_drafter()
    passes = []
    drafter.body.layers[1].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    drafter.mask_embedding.requires_grad_(True)
    parallel.checkpoint_activations(drafter)
    batch = windows.collate(unequal_texts(2), drafter, None, windows=2, window=3, full_mask_share=1.0, seed=0, step=1)
    windows.hidden(drafter, batch).sum().backward()
    assert len(passes) == 2
    with torch.no_grad():
        windows.hidden(drafter, batch)
    assert len(passes) == 3


def test_parts_of_a_micro_batch_are_the_texts_of_the_whole_one(monkeypatch):
    """A loss's divisor is the number of windows: each of a part's has a target, whatever the length of its text."""
    found, drafter = unequal_texts(7), tiny_drafter()
    draw = {"windows": 5, "window": 4, "full_mask_share": 0.3, "seed": 3, "step": 9}
    whole = windows.collate(found, drafter, None, **draw)
    seen = 0
    for rank in range(3):
        monkeypatch.setattr(parallel, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(parallel, "size", lambda: 3)
        own = parallel.part_of(7)
        part = windows.collate(found, drafter, None, **draw, part=own)
        assert torch.equal(part.targets_BWG, whole.targets_BWG[own])
        assert torch.equal(part.weights_BWG, whole.weights_BWG[own])
        assert torch.equal(part.layout.target_BWG, whole.layout.target_BWG[own])
        assert bool(part.layout.valid_BWG.any(-1).all())
        assert not bool(part.layout.valid_BWG.all()), "texts end within windows"
        seen += len(part.targets_BWG)
    assert seen == 7


def test_what_cannot_be_shared_is_refused(monkeypatch):
    monkeypatch.setattr(parallel, "size", lambda: 4)
    with pytest.raises(ParamError, match=r"4 processes share the 3 texts of a micro-batch; write 4 at least"):
        work(Job(folder=Path("unused"), strategy="ddp"))
    with pytest.raises(ParamError, match=r"4 processes were started, but the training section has no `parallel`"):
        work(Job(folder=Path("unused"), changed={"sequences": 4}))


def test_how_many_share_the_work_is_not_what_a_state_hangs_on():
    t = settings(Job(folder=Path("unused"), strategy="ddp"))
    more = replace(t, parallel=parallel.Parallel(processes=8, strategy="fsdp2", checkpoint_activations=True))
    assert alone(t) == alone(more) == settings(Job(folder=Path("unused")))


# The stage, started as a user starts it ---------------------------------------------------------------------


@pytest.fixture
def shared(tiny, tmp_path, monkeypatch):  # noqa: F811
    """A copy of the tiny profile whose distillation asks for two processes."""
    shutil.copytree(tiny, tmp_path / "shared")
    monkeypatch.chdir(tmp_path / "shared")
    ask(2)
    return tmp_path / "shared"


def ask(processes, **changed):
    t = TRAINING | {"steps": 4, "optimizer": "adamw"} | changed
    if processes:
        t |= {"parallel": {"processes": processes, "strategy": "fsdp2", "checkpoint_activations": True}}
    profile = PARAMS["tiny"] | {"distill": DISTILL | {"training": t}}
    Path("params.yaml").write_text(json.dumps(PARAMS | {"tiny": profile}))


def stage(*words):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]) + os.pathsep + os.environ.get("PYTHONPATH", "")}
    command = [sys.executable, "-m", "stages.distill", *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def drafter_of(name):
    from safetensors.torch import load_file

    return load_file(Path("data/tiny/drafters") / name / "model.safetensors")


@pytest.mark.large
def test_the_stage_starts_itself_in_two_processes(shared):
    process = stage("tiny", "streak")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out == ""
    assert err.count("streak: 100%") == 1, "one bar"
    assert "torch" not in err, err
    two, curve = drafter_of("streak"), Path("data/tiny/curves/streak.csv").read_text()
    assert not list(Path("data/scratch").iterdir())
    ask(0)
    process = stage("tiny", "streak")
    assert process.wait(timeout=300) == 0
    one = drafter_of("streak")
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=1e-4, msg=name)
    assert len(curve.splitlines()) == len(Path("data/tiny/curves/streak.csv").read_text().splitlines())


@pytest.mark.large
def test_a_mistake_is_said_once_and_the_status_passed_on(shared):
    ask(2, full_mask_share=0.5)
    process = stage("tiny", "streak")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert out == ""
    assert err == "error: params.yaml: distill.training.full_mask_share must be 1: acceptance is of whole windows\n"


def children_of(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [int(child) for child in found]


def lives(pid):
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # empty of one that has ended and was not waited for
    except OSError:
        return False


def gone(pids, *, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(lives(pid) for pid in pids):
            return True
        time.sleep(0.2)
    return False


@pytest.mark.large
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_ended_it_leaves_no_process_and_goes_on(shared, end):
    ask(2, steps=400, checkpoint_every=2, evaluate_every=400)
    process = stage("tiny", "streak")
    until = time.monotonic() + 300
    while not list(Path("data/scratch").glob("*/state_*")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.1)
    children = children_of(process.pid)
    assert len(children) >= 2
    process.send_signal(end)
    _, err = process.communicate(timeout=120)
    assert process.returncode == (130 if end == signal.SIGINT else -end)
    if end == signal.SIGINT:
        assert err.splitlines().count("interrupted") <= 2, err
    assert gone(children)
    assert list(Path("data/scratch").glob("*/state_*"))
