"""What `python` is in the tests of reruns: it writes a stage's outputs at once, from what the stage declares.

    python stand_in.py <graph.json> -m <module> <words>

The outputs are a digest of deps, params and words; those of a cell differ from run to run, as measured seconds do. The
stages `code` and `drafter`, which decide what follows from an edit and from a retrained drafter, are the real ones.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML


def digest(path: Path) -> str:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)


def value(document: Any, name: str) -> Any:
    for key in name.split("."):
        document = document[key]
    return document


def write(path: Path, text: str) -> None:
    file = path if path.suffix else path / "content"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def main(graph: str, words: list[str]) -> None:
    stage = json.loads(Path(graph).read_text())[" ".join(words)]
    document = YAML(typ="safe").load(Path("params.yaml"))
    values = {name: value(document, name) for name in stage["params"]}
    parts = [*words, json.dumps(values), *(digest(Path(dep)) for dep in stage["deps"])]
    if words[0] == "stages.evaluate":
        parts.append(str(time.time_ns()))
    text = hashlib.sha256("".join(parts).encode()).hexdigest()
    for out in stage["outs"]:
        write(Path(out), text)


if __name__ == "__main__":
    if sys.argv[3] in ("stages.code", "stages.drafter"):
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    main(sys.argv[1], sys.argv[3:])
