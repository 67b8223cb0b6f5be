"""Results go from machine to machine through a DVC remote on S3: pushed once, pulled elsewhere, and nothing runs again.

The remote is moto's server in this process; the stages are stood in for (stand_in.py), the graph is the real one.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.project import RESTORED, STARTED, Project, commit

boto3 = pytest.importorskip("boto3", reason="needs the extra s3")
server = pytest.importorskip("moto.server", reason="needs the extra dev")
pytest.importorskip("dvc_s3", reason="needs the extra s3")

BUCKET = "drafters"
KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture
def endpoint(monkeypatch, tmp_path) -> Iterator[str]:
    """The address of a server with one empty bucket; this machine's own credentials stay out."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    url = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket=BUCKET)
    yield url
    moto.stop()


def files(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


@pytest.mark.large
def test_a_fresh_clone_pulls_what_another_machine_pushed_and_runs_nothing(finished, endpoint, tmp_path):
    here = finished.copy(tmp_path / "here")
    here.dvc("remote", "add", "--default", "store", f"s3://{BUCKET}/runs")
    here.dvc("remote", "modify", "store", "endpointurl", endpoint)
    here.run("git", "add", "--force", "reports/smoke")  # small and not in the cache; those of other profiles are in Git
    commit(here)
    here.dvc("push")

    here.run("git", "clone", "-q", str(here.root), str(tmp_path / "there"))
    there = Project(tmp_path / "there", finished.programs)
    there.notes.mkdir()
    assert not (there.root / "data").exists()
    assert not (there.root / ".dvc" / "cache").exists()
    missing = there.effect().changed
    assert "adapt@smoke" in missing, "without the remote there would be work to do"
    there.dvc("pull")
    assert files(there.root / "data") == files(here.root / "data")
    assert there.effect().changed == set()
    said = there.dvc("repro")
    assert not STARTED.findall(said)
    assert not RESTORED.findall(said)

    # One stage's results are enough for who wants to look at them alone.
    shutil.rmtree(there.root / "data")
    shutil.rmtree(there.root / ".dvc" / "cache")
    there.dvc("pull", "adapt@smoke")
    assert {path.parts[0] for path in map(Path, files(there.root / "data" / "smoke"))} == {"drafters", "curves"}
