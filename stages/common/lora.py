"""Low-rank adapters of a drafter: none yet."""

from pathlib import Path

from torch import nn


def attached(drafter: nn.Module) -> bool:
    return hasattr(drafter, "peft_config")


def merge(drafter: nn.Module) -> None:
    assert not attached(drafter)


def saved(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def save(folder: Path, drafter: nn.Module) -> None:
    raise NotImplementedError


def load(drafter: nn.Module, folder: Path) -> None:
    raise NotImplementedError
