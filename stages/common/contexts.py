"""Keys and values that the verifier cached while it wrote the trajectories: what a drafter that reads them trains on.

    contexts/index.json                 layers, and the file that holds each text
    contexts/<number>.safetensors       float16 [L, 2, H, T, D] by text id: L layers, key and value, T cached tokens

A text of n tokens has T = n - 1: its last token was never read. A text is read when it is asked for, so a corpus may be
larger than memory.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages.common import store

INDEX = "index.json"


def write_shard(path: Path, contexts: Mapping[str, Tensor]) -> None:
    """One file of contexts by text id, whole or absent. Raises ValueError on what float16 cannot hold."""
    halves = {name: kv.to(torch.float16).contiguous() for name, kv in contexts.items()}
    if beyond := [name for name, kv in halves.items() if not bool(torch.isfinite(kv).all())]:
        raise ValueError(
            f"{path}: the verifier's keys or values of text {beyond[0]!r} are beyond float16; keep no layers "
            "(trajectories.keep_layers: []) and let the drafter read its own prefix (adapt.prefix: own)"
        )
    with store.replacing(path) as partial:
        save_file(halves, partial)


def holds(path: Path, ids: Sequence[str]) -> bool:
    """Whether a file is whole and has the contexts of just these texts."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys()) == set(ids)
    except (OSError, SafetensorError):
        return False


def write_index(folder: Path, layers: Sequence[int], files: Mapping[str, str]) -> None:
    """files: the name of the file that holds each text's context, by text id."""
    store.write_json(folder / INDEX, {"layers": list(layers), "files": dict(files)})


class Contexts:
    """Reads one text's context at a time, cut to the layers asked for."""

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        index = store.read_json(folder / INDEX)
        missing = sorted(set(layers) - set(index["layers"]))
        if missing:
            raise ValueError(
                f"params.yaml: adapt.layers: the trajectories kept the verifier's cache of layers {index['layers']}, "
                f"not of {missing}; add them to trajectories.keep_layers"
            )
        self.folder = folder
        self._files: dict[str, str] = index["files"]
        self._rows = [index["layers"].index(layer) for layer in layers]

    def __getitem__(self, text_id: str) -> Tensor:
        """float16 [L, 2, H, T, D]."""
        if text_id not in self._files:
            raise ValueError(f"{self.folder / INDEX}: nothing is kept of text {text_id!r}; run dvc repro trajectories")
        path = self.folder / self._files[text_id]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(text_id)[self._rows]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: damaged or half-written ({error}); run dvc repro trajectories") from None
