"""Models and data sets in the Hugging Face hub's own cache, found again without network.

A tracked folder of such a model holds `hub.json` alone: repository, commit, hash and size of every file. The weights
stay in the cache (HF_HUB_CACHE, else HF_HOME/hub), whose layout only huggingface_hub is asked about. Everybody who
opens a model folder asks `local_folder` first; what fetches is stages/download/fetch.py.

    {"repo": "Qwen/Qwen2.5-14B-Instruct", "repo_type": "model", "revision": "<commit>",
     "files": {"config.json": {"sha256": "..", "size": 663}, ..}}
"""

import os
from pathlib import Path
from typing import Any, Literal

from stages.common import store

MANIFEST = "hub.json"
RepoType = Literal["model", "dataset"]


def cache_folder() -> Path:
    """The hub's cache, by the environment of this moment."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expandvars(cache)).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def cached_file(repo: str, revision: str, name: str, repo_type: RepoType = "model") -> Path | None:
    """The file in the cache; None if it is not there, or its contents are not."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, cache_dir=cache_folder(), revision=revision, repo_type=repo_type)
    return Path(found) if isinstance(found, str) and os.path.isfile(found) else None


def local_folder(folder: Path) -> Path:
    """The folder to load a model from: `folder` itself, or the cache's where `folder` holds a manifest.

    ValueError if a file that the manifest names is not in the cache, or has another size.
    """
    if not (folder / MANIFEST).exists():
        return folder
    manifest = store.read_json(folder / MANIFEST)
    found = cached_files(manifest, remedy="run `dvc repro models` with --force, which fetches it again")
    name, path = next(iter(found.items()))
    return path.parents[name.count("/")]


def cached_files(manifest: dict[str, Any], *, remedy: str) -> dict[str, Path]:
    """Where the files of a manifest lie, by name; ValueError if one is missing or of another size."""
    repo, revision = manifest["repo"], manifest["revision"]
    found = {}
    for name, facts in manifest["files"].items():
        path = cached_file(repo, revision, name, manifest["repo_type"])
        if path is None:
            raise ValueError(f"{repo} at {revision}: {name} is not in the hub's cache {cache_folder()}; {remedy}")
        if (size := path.stat().st_size) != facts["size"]:
            raise ValueError(
                f"{repo} at {revision}: {path} has {size} bytes, not {facts['size']}; delete it and {remedy}"
            )
        found[name] = path
    return found
