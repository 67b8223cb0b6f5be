"""Which folder a drafter's name means, pinned by its hash, and the numbers a sweep may read off it."""

from pathlib import Path
from typing import Any

from stages.common import store, studies, sweeps
from stages.common.params import ParamError, keys_at
from stages.evaluate.parts import WINDOW, method_module

START = "adapt"  # what every distillation starts from
SIZE = "size."
LISTS = ("objectives", "soft_objectives", "baselines", "sizes")  # of params.yaml: what is trained


def listed() -> list[str]:
    """What params.yaml has trained. Others may lie on disk, left by an earlier run and kept up to date by none."""
    return [START, *(SIZE * (names == "sizes") + name for names in LISTS for name in keys_at(names))]


def pin(profile: str, name: str, method: str, key: str, known: list[str]) -> dict[str, Any]:
    """The drafter's name, folder and hash. ParamError names the key: not among the known, or of another kind."""
    folder = folder_of(profile, name, key)
    if name.partition("@")[0] not in known:
        lists = " or ".join(f"`{names}`" for names in LISTS)
        raise ParamError(f"params.yaml: {key}: {name!r} is not trained any more; add it to {lists}, or name another")
    card = store.read_json(folder / "drafter.json")
    wanted = getattr(method_module(method), "KIND", WINDOW)
    if card["kind"] != wanted:
        raise ParamError(
            f"params.yaml: {key}: {name!r} is of kind {card['kind']!r}; {method} wants one of kind {wanted!r}"
        )
    return {"name": name, "folder": folder.as_posix(), "sha256": store.sha256_folder(folder)}


def folder_of(profile: str, name: str, key: str) -> Path:
    """Where a drafter of this name lies."""
    if name.startswith(SIZE):
        return _existing(studies.size_folder(profile, name.removeprefix(SIZE)), name, key, "add it to `sizes`")
    training, step = _steps(name, key)
    if step is None:
        return _existing(store.drafter_folder(profile, name), name, key, "train it, or name another")
    kept = store.checkpoints_folder(profile, training)
    if not kept.exists():
        known = _names(kept.parent)
        raise ParamError(f"params.yaml: {key}: no checkpoints of {training!r}; there are those of {known}")
    if step == 0:
        return _existing(store.drafter_folder(profile, START), name, key, "run dvc repro adapt")
    folder, steps = store.checkpoint_folder(profile, training, step), sorted(map(_number, kept.glob("step_*")))
    if not folder.exists():
        raise ParamError(
            f"params.yaml: {key}: {training!r} kept no checkpoint of step {step}; it kept 0, "
            f"{', '.join(map(str, steps))} ({profile}.distill.training.evaluate_every)"
        )
    return folder


def number(x: str, pinned: dict[str, Any] | None, key: str) -> int:
    """`drafter.steps` (of distillation; adapt has none) or `drafter.layers` of a pinned drafter."""
    if pinned is None:
        raise ParamError(f"params.yaml: {key}: {x} of a method without a drafter")
    card = store.read_json(Path(pinned["folder"]) / "drafter.json")
    if x == "drafter.layers":
        if "layers" not in card:
            raise ParamError(f"params.yaml: {key}: {pinned['name']!r} is not cut from the verifier's layers")
        return len(card["layers"])
    _, step = sweeps.steps_of(pinned["name"])
    if step is not None:
        return step
    return 0 if pinned["name"] == START else int(card["provenance"]["steps"])


def _steps(name: str, key: str) -> tuple[str, int | None]:
    try:
        return sweeps.steps_of(name)
    except ParamError as error:
        raise ParamError(f"params.yaml: {key}: {error}") from None


def _existing(folder: Path, name: str, key: str, remedy: str) -> Path:
    if not folder.exists():
        raise ParamError(f"params.yaml: {key}: no drafter {name!r}; there are {_names(folder.parent)}; {remedy}")
    return folder


def _names(folder: Path) -> str:
    return (", ".join(sorted(path.name for path in folder.iterdir())) if folder.exists() else "") or "none"


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))
