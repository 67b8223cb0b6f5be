"""A throwaway copy of the working tree, as its own Git and DVC repository."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import networkx
from dvc.repo import Repo
from ruamel.yaml import YAML

from stages.code.imports import ROOT

REAL = Path(sys.executable).parent
HOOK = Path(__file__).parent / "hook"
STARTED = re.compile(r"^Running stage '(.+)':", re.MULTILINE)
RESTORED = re.compile(r"^Stage '(.+)' is cached - skipping run", re.MULTILINE)


class Effect(NamedTuple):
    changed: set[str]  # stages whose own command, params, code or files differ from those of the last run
    reach: set[str]  # those and everything downstream: `dvc repro` runs no other stage


@dataclass(frozen=True)
class Project:
    root: Path
    programs: Path = REAL  # where the stages' `python` is

    @property
    def notes(self) -> Path:
        """What the processes of a run read and imported; see hook/sitecustomize.py."""
        return self.root / ".notes"

    def env(self) -> dict[str, str]:
        """Settings of the machine and the user stay out, and the interpreter of the tests runs the stages."""
        mine = {
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(HOOK),
            "PIPELINE_NOTES": str(self.notes),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TQDM_MININTERVAL": "0.1",
            "NO_COLOR": "1",
        }
        return os.environ | isolated(self.root) | mine

    def run(self, *words: str) -> str:
        """Standard output and error together; fails with them."""
        done = subprocess.run(words, cwd=self.root, env=self.env(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def dvc(self, *words: str) -> str:
        return self.run(*dvc_command(*words))

    def effect(self, *, apart_from: Collection[str] = ()) -> "Effect":
        """What an edit did, by `dvc status` and the graph; nothing runs. Some stages may be left out of account."""
        with Repo(str(self.root)) as repo:
            graph = repo.index.graph  # an edge leads from a stage to what it needs
            by_name = {name_of(stage.addressing): stage for stage in graph}
            changed = {name_of(name) for name in repo.status()} - set(apart_from)
            after = {above for name in changed for above in networkx.ancestors(graph, by_name[name])}
        return Effect(changed, changed | {name_of(stage.addressing) for stage in after})

    def params(self) -> dict[str, Any]:
        return YAML(typ="safe").load(self.root / "params.yaml")

    def set(self, **values: Any) -> None:
        """Write values into params.yaml by dotted key; a value's kind must stay what it was."""
        set_params(self.root / "params.yaml", values)

    def prune(self, **kept: Collection[str]) -> None:
        """Leave out all but these of a section of params.yaml, by dotted key: DVC reads the file for every stage."""
        yaml, path = YAML(), self.root / "params.yaml"
        document = yaml.load(path)
        for key, names in kept.items():
            node, above = document, None
            for part in filter(None, key.split(".")):
                node, above = node[part], node
            for name in [name for name in node if name not in names]:
                del node[name]
            if not node and above is not None:
                above[key.split(".")[-1]] = {}  # else the comments of what is gone are written, as no YAML
        yaml.dump(document, path)

    def keep(self, *profiles: str) -> None:
        """Leave other profiles out of params.yaml."""
        document = self.params()
        others = {name for name, node in document.items() if isinstance(node, dict) and "models" in node}
        self.prune(**{"": set(document) - (others - set(profiles))})

    @contextmanager
    def edited(self, file: str, text: str = "\n# edited\n", **values: Any) -> Iterator[None]:
        """params.yaml with other values, or a file with text put at its end; as it was afterwards."""
        path = self.root / file
        before = path.read_bytes()
        try:
            if values:
                set_params(path, values)
            else:
                path.write_bytes(before + text.encode())
            yield
        finally:
            path.write_bytes(before)

    def copy(self, root: Path, *, programs: Path | None = None) -> "Project":
        shutil.copytree(self.root, root, symlinks=True)
        return Project(root, programs or self.programs)


def name_of(addressing: str) -> str:
    """A stage's name; DVC puts the way to dvc.yaml before it where that is not the current folder."""
    return addressing.split(":")[-1]


def dvc_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "dvc", *words]


def isolated(root: Path) -> dict[str, str]:
    """DVC and Git without the configuration and caches of this machine."""
    aside = root.with_name(f"{root.name}.aside")
    return {
        "DVC_NO_ANALYTICS": "1",
        "DVC_SITE_CACHE_DIR": str(aside / "site"),
        "DVC_GLOBAL_CONFIG_DIR": str(aside / "global"),
        "DVC_SYSTEM_CONFIG_DIR": str(aside / "system"),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        **{f"GIT_{who}_{what}": "tests@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }


def clone(root: Path, *, programs: Path = REAL) -> Project:
    """Tracked files as they stand and untracked ones that Git does not ignore, in a repository of their own."""
    project = Project(root, programs)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if name != "dvc.lock" and (ROOT / name).is_file():  # the real profiles': DVC reads and writes it at every stage
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    project.notes.mkdir()
    (root / ".git" / "info").mkdir(parents=True)
    (root / ".git" / "info" / "exclude").write_text("/.notes/\n")
    project.run("git", "init", "-q")
    return project


def commit(project: Project) -> None:
    project.run("git", "add", "-A")
    project.run("git", "commit", "-q", "-m", "as in the working tree")


def set_params(path: Path, values: Mapping[str, Any]) -> None:
    yaml = YAML()
    document = yaml.load(path)
    for key, value in values.items():
        *above, last = key.split(".")
        node = document
        for name in above:
            node = node[name]
        assert last in node, f"{key} is not in params.yaml"
        node[last] = value
    yaml.dump(document, path)
