"""Code: the files that each program of the pipeline is made of, with their hashes.

    python -m stages.code

Reads   kernels/, stages/
Writes  data/code/<program>.json

DVC does not follow imports, so every other stage depends on the file of its program: an edit reruns what can reach
it, and nothing else. A new module needs no entry in dvc.yaml.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

from stages.code.imports import ROOT
from stages.code.programs import programs

FOLDER = Path("data", "code")


@cache
def digest(file: Path) -> str:
    """A file is in dozens of programs."""
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()


def main() -> None:
    for name, files in programs().items():
        hashes = {file.as_posix(): digest(file) for file in files}
        path = FOLDER / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
