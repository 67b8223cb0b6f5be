"""Resume state that is used on an exact match only.

DVC deletes a stage's outputs before it runs, so unfinished work lives in data/scratch/<fingerprint>/. The
fingerprint covers params, the digests of what the stage reads and the text of the code that does the work:
after any change the stage starts over instead of mixing two runs.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stages.common import store


def fingerprint(params: Any, deps: Mapping[str, str], code: Iterable[Path | str]) -> str:
    """Hex digest of params (dataclass or JSON value), digests by name, and the contents of code files."""
    value = {
        "params": _plain(params),
        "deps": dict(deps),
        "code": sorted((Path(file).name, store.sha256_file(Path(file))) for file in code),
    }
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def scratch_folder(mark: str) -> Path:
    """The folder of one fingerprint, made if it is not there."""
    folder = store.scratch_file(mark)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def discard(mark: str) -> None:
    """Remove the state once the output is in place."""
    shutil.rmtree(store.scratch_file(mark), ignore_errors=True)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
