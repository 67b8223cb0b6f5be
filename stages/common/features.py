"""The verifier's hidden states, for drafters that read them: tapped from passes, kept like cached rows, stored.

    features/verifier/index.json            layers, and the file that holds each text
    features/verifier/<number>.safetensors  float16 [T, C] by text id: T tokens, C the layers' widths side by side

Layer i's feature is what decoder layer i hands on; FINAL is what the head reads, behind the last norm. Row t is the
state at token t, so it speaks for token t + 1.

Letters: T tokens, C columns (layers x width).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages.common import store

FINAL = -1
INDEX = "index.json"
VERIFIER = "verifier"  # the one model whose states are kept


def features_folder(profile: str) -> Path:
    """The hidden states of a profile's trajectories."""
    return store.DATA / profile / "features" / VERIFIER


class Taps:
    """Listens to some layers of a decoder body and keeps the rows that its cache keeps.

    The rows of every pass since the last `keep` or `drop` are in flight, in order; `keep` says which of them stay.
    device: where they are kept, if layers are on several.
    """

    def __init__(self, body: Any, layers: Sequence[int], device: torch.device | None = None) -> None:
        total = len(body.layers) if layers else 0
        if wrong := [layer for layer in layers if not FINAL <= layer < total]:
            raise ValueError(f"no layers {wrong}: there are 0 to {total - 1}, and {FINAL} behind the last norm")
        self._in_flight: list[list[Tensor]] = [[] for _ in layers]
        self._kept: list[Tensor] = []
        self._device = device
        modules = [body.norm if layer == FINAL else body.layers[layer] for layer in layers]
        self._hooks = [module.register_forward_hook(self._listener(column)) for column, module in enumerate(modules)]

    def _listener(self, column: int) -> Any:
        def listen(_module: Any, _inputs: Any, output: Any) -> None:
            hidden_BND = output[0] if isinstance(output, tuple) else output
            assert hidden_BND.shape[0] == 1, "taps follow one text"
            self._in_flight[column].append(hidden_BND[0] if self._device is None else hidden_BND[0].to(self._device))

        return listen

    def keep(self, rows: Sequence[int] | None = None) -> None:
        """These rows of what is in flight stay, in this order; None: all of them."""
        if self._hooks:
            rows_XC = torch.cat([torch.cat(found) for found in self._in_flight], -1)
            self._kept.append(rows_XC if rows is None else rows_XC[list(rows)])
        self.drop()

    def drop(self) -> None:
        """Forget what is in flight."""
        for found in self._in_flight:
            found.clear()

    def rows(self) -> Tensor:
        """[T, C] of the tokens kept so far; of no columns if nothing is tapped."""
        if len(self._kept) > 1:
            self._kept = [torch.cat(self._kept)]
        return self._kept[0] if self._kept else torch.empty(0, 0)

    def close(self) -> None:
        """Stop listening."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def write_shard(path: Path, features: Mapping[str, Tensor]) -> None:
    """One file of features by text id, whole or absent. Raises ValueError on what float16 cannot hold."""
    halves = {name: rows.to(torch.float16).contiguous() for name, rows in features.items()}
    if beyond := [name for name, rows in halves.items() if not bool(torch.isfinite(rows).all())]:
        raise ValueError(
            f"{path}: the verifier's hidden states of text {beyond[0]!r} are beyond float16; name other layers in "
            "<profile>.features.layers"
        )
    with store.replacing(path) as partial:
        save_file(halves, partial)


def write_index(folder: Path, layers: Sequence[int], files: Mapping[str, str]) -> None:
    """files: the name of the file that holds each text's features, by text id."""
    store.write_json(folder / INDEX, {"layers": list(layers), "files": dict(files)})


class Features:
    """Reads one text's features at a time, cut to the layers asked for, in their order."""

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        index = store.read_json(folder / INDEX)
        if missing := sorted(set(layers) - set(index["layers"])):
            raise ValueError(
                f"{folder}: has the hidden states of layers {index['layers']}, not of {missing}; add them to "
                "<profile>.features.layers in params.yaml"
            )
        self.folder = folder
        self._files: dict[str, str] = index["files"]
        self._stored = len(index["layers"])
        self._columns = [index["layers"].index(layer) for layer in layers]

    def __getitem__(self, text_id: str) -> Tensor:
        """float16 [T, C]."""
        if text_id not in self._files:
            raise ValueError(f"{self.folder / INDEX}: nothing is kept of text {text_id!r}; run dvc repro features")
        path = self.folder / self._files[text_id]
        try:
            with safe_open(path, framework="pt") as file:
                rows_TC = file.get_tensor(text_id)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: damaged or half-written ({error}); run dvc repro features") from None
        return rows_TC.unflatten(1, (self._stored, -1))[:, self._columns].flatten(1)
