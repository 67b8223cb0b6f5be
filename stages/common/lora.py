"""LoRA adapters of drafters. (A stand-in until they are there.)"""

from pathlib import Path

from torch import nn


def attached(drafter: nn.Module) -> bool:
    """Whether a drafter has an adapter."""
    return hasattr(drafter, "peft_config")


def trains(name: str) -> bool:
    """Whether a parameter of this name is trained in a drafter with an adapter."""
    return ".lora_" in name


def saved(folder: Path) -> bool:
    """Whether a drafter's folder has an adapter."""
    return (folder / "adapter_config.json").exists()


def save(folder: Path, drafter: nn.Module) -> None:
    raise NotImplementedError(f"{folder}: adapters")


def load(drafter: nn.Module, folder: Path) -> None:
    raise NotImplementedError(f"{folder}: adapters")
