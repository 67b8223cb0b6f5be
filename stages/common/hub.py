"""The hub's models and files. (A stand-in until the hub source is there.)"""

from pathlib import Path


def local_folder(folder: Path) -> Path:
    """Where to load a model folder from: the folder itself."""
    if (folder / "hub.json").exists():
        raise NotImplementedError(f"{folder}: models of the hub")
    return folder
