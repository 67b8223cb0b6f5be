"""`dvc repro` killed while it trains, and started again: the same drafter as without the interruption."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.common.store import drafter_folder, sha256_folder
from tests.pipeline.project import REAL, STARTED, Project, dvc_command

pytestmark = pytest.mark.slow

STEPS = 80
STAGE = "adapt@smoke"
FIRST_STEP = re.compile(rf"adapt: .*?(\d+)/{STEPS}")


def killed_while_training(project: Project, command: list[str]) -> Path:
    """The saved state that a run leaves which is killed, with all it started, once there is one."""
    process = subprocess.Popen(
        command,
        cwd=project.root,
        env=project.env(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        state = wait_for_state(project.root / "data" / "scratch", process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert state.exists()
    return state


def wait_for_state(scratch: Path, process: subprocess.Popen[bytes]) -> Path:
    """The saved state of the training in progress."""
    until = time.monotonic() + 600
    while time.monotonic() < until:
        if found := list(scratch.glob("*/state.pt")):
            return found[0]
        assert process.poll() is None, "training ended before it could be killed"
        time.sleep(0.02)
    raise AssertionError("no state was saved")


def test_a_killed_run_goes_on(smoke, tmp_path):
    project = smoke.project.copy(tmp_path / "killed", programs=REAL)
    project.set(**{"smoke.adapt.training.steps": STEPS})
    folder = project.root / drafter_folder("smoke", "adapt")

    state = killed_while_training(project, dvc_command("repro", STAGE))
    assert not folder.exists(), "killed too late to show anything"

    warm = Project(project.root, smoke.project.programs)
    output = warm.dvc("repro", STAGE)
    assert STARTED.findall(output) == [STAGE]
    first = FIRST_STEP.search(output)
    assert first is not None, output
    assert int(first[1]) > 0, "started over instead of going on"
    assert not state.exists()
    resumed = sha256_folder(folder)

    shutil.rmtree(folder)
    output = warm.run("python", "-m", "stages.adapt", "smoke")
    first = FIRST_STEP.search(output)
    assert first is not None, output
    assert int(first[1]) == 0
    assert sha256_folder(folder) == resumed


def test_a_killed_distillation_goes_on(smoke, tmp_path):
    """The stage by itself: what dvc does around it is seen above."""
    project = smoke.project.copy(tmp_path / "killed")
    project.set(**{"smoke.distill.training.steps": STEPS, "smoke.distill.training.evaluate_every": STEPS})
    words = ("-m", "stages.distill", "smoke", "trie_streak")
    folder = project.root / drafter_folder("smoke", "trie_streak")
    project.run("python", *words)
    whole = sha256_folder(folder)

    state = killed_while_training(project, [sys.executable, *words])

    shutil.rmtree(folder)
    output = project.run("python", *words)
    first = re.search(rf"trie_streak: .*?(\d+)/{STEPS}", output)
    assert first is not None, output
    assert int(first[1]) > 0, "started over instead of going on"
    assert sha256_folder(folder) == whole
    assert not state.exists()
