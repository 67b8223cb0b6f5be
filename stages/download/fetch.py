"""Files of a hub repository at one commit, into the hub's own cache: checked before, downloaded, hashed once.

    manifest = fetch("Qwen/Qwen2.5-14B-Instruct", revision="<commit>", files=None)

What can go wrong is asked ahead of the first large byte: the repository, the commit, the names, access to a gated
repository and room on the disk. Every file's SHA-256 goes into the manifest: read from the file once, compared with
what the hub says it holds and with what params pin; a note in data/scratch saves a second reading while size and time
of the file stay. Without network (HF_HUB_OFFLINE=1) a complete cache will do.
"""

import difflib
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stages.common import hub, store
from stages.common.hub import RepoType
from stages.common.params import ParamError
from stages.download.hub_errors import explained, page

COMMIT = re.compile(r"[0-9a-f]{40}")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
INDEX = "model.safetensors.index.json"
BESIDE = re.compile(  # what transformers reads beside the weights
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|merges\.txt|vocab\.txt|[\w.]*\.model|chat_template\.jinja|additional_chat_templates/[^/]+\.jinja"
)
CHUNK = 1 << 22


class Remote(NamedTuple):
    """What the hub says of a file: bytes, and its SHA-256 (large files) or its Git hash."""

    size: int
    sha256: str | None
    git: str | None


def fetch(
    repo: str, *, revision: str, files: Mapping[str, str] | Sequence[str] | None, repo_type: RepoType = "model"
) -> dict[str, Any]:
    """The manifest (stages/common/hub.py) of files that are now in the cache.

    files: names, by name the SHA-256 they must have, or None for all that transformers loads of a model. ParamError for
    a revision that is no commit; ValueError, one line, for whatever keeps a file from being there.
    """
    check_commit(repo, revision, repo_type)
    pins = dict(files) if isinstance(files, Mapping) else {}
    names = None if files is None else sorted(files)
    for name in names or ():
        if name.endswith((*PICKLES, ".py")):
            raise ParamError(
                f"{repo}: files: {name} can run code when it is loaded; name safetensors, or write files: null"
            )
    note = _note(repo, revision, repo_type)
    facts = _read_note(note, repo, revision, repo_type, names)
    if facts is None:
        there = listing(repo, revision=revision, repo_type=repo_type)
        chosen = needed(there, repo=repo) if names is None else names
        _refuse_unknown(chosen, there, repo=repo, revision=revision)
        for name in chosen:
            _compare(f"{repo}: {name}", "the hub holds", there[name].sha256, "params.yaml pins", pins.get(name))
        if not offline():
            _download(repo, revision, repo_type, chosen, there)
        facts = {name: _verified(repo, revision, repo_type, name, there[name]) for name in chosen}
        known = store.read_json(note) if note.is_file() else {"all": None, "files": {}}
        complete = sorted(facts) if names is None else known["all"]
        store.write_json(note, {"all": complete, "files": known["files"] | facts})
    for name, pinned in pins.items():
        _compare(f"{repo}: {name}", "its sha256 is", facts[name]["sha256"], "params.yaml pins", pinned)
    plain = {name: {"sha256": fact["sha256"], "size": fact["size"]} for name, fact in sorted(facts.items())}
    return {"repo": repo, "repo_type": repo_type, "revision": revision, "files": plain}


def check_commit(repo: str, revision: str, repo_type: RepoType) -> None:
    """ParamError unless the revision is a whole commit: a branch or tag may hold something else tomorrow."""
    if not COMMIT.fullmatch(revision):
        raise ParamError(
            f"params.yaml: {repo}: revision {revision!r} is no commit of 40 hexadecimal digits; take it from "
            f"{page(repo, repo_type)}/commits/main (copy the full hash), or from "
            f"`git ls-remote {page(repo, repo_type)} HEAD`"
        )


def offline() -> bool:
    """Whether the environment forbids the network, as huggingface_hub reads it."""
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return said.upper() in ("1", "ON", "YES", "TRUE")


def listing(repo: str, *, revision: str, repo_type: RepoType) -> dict[str, Remote]:
    """All files of a repository at a commit; offline those of the cache, which may be fewer."""
    check_commit(repo, revision, repo_type)
    if offline():
        return _listing_of_cache(repo, revision, repo_type)
    from huggingface_hub import HfApi

    with explained(repo, revision, repo_type):
        api = HfApi(endpoint=_endpoint())
        info = api.repo_info(repo, revision=revision, repo_type=repo_type, files_metadata=True, timeout=60)
    found = {}
    for file in getattr(info, "siblings", None) or []:
        sha256 = file.lfs["sha256"] if file.lfs else None
        found[file.rfilename] = Remote(file.size or 0, sha256, None if sha256 else file.blob_id)
    return found


def needed(names: Iterable[str], *, repo: str) -> list[str]:
    """What transformers loads of a model: safetensors and what stands beside them; no pickles, no code."""
    top = sorted(names)
    weights = [name for name in top if WEIGHTS.fullmatch(name)]
    if "model.safetensors" in weights:
        weights = ["model.safetensors"]
    if not weights:
        pickles = [name for name in top if name.endswith(PICKLES)]
        raise ValueError(
            f"{repo}: no model.safetensors at this commit (weights there: {', '.join(pickles[:3]) or 'none'}); pickles "
            "are not loaded, pin a commit that has safetensors (often the hub's pull request that converts them)"
        )
    if "config.json" not in top:
        raise ValueError(f"{repo}: no config.json at this commit; name a repository that transformers loads")
    index = [INDEX] if INDEX in top and len(weights) > 1 else []
    return sorted([*weights, *index, *(name for name in top if BESIDE.fullmatch(name))])


def _refuse_unknown(names: Sequence[str], there: Mapping[str, Remote], *, repo: str, revision: str) -> None:
    lost = [name for name in names if name not in there]
    if not lost:
        return
    if offline():
        raise ValueError(
            f"{repo} at {revision}: offline, and the cache {hub.cache_folder()} lacks {', '.join(lost[:3])}; unset "
            "HF_HUB_OFFLINE and run again"
        )
    near = difflib.get_close_matches(lost[0], there, n=5, cutoff=0.3) or sorted(there)[:5]
    raise ValueError(f"{repo} at {revision}: no file {lost[0]!r}; correct its name (there: {', '.join(near)})")


def _listing_of_cache(repo: str, revision: str, repo_type: RepoType) -> dict[str, Remote]:
    from huggingface_hub.file_download import repo_folder_name

    folder = hub.cache_folder() / repo_folder_name(repo_id=repo, repo_type=repo_type) / "snapshots" / revision
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            etag = Path(os.readlink(path)).name if path.is_symlink() else ""
            sha256, git = (etag if re.fullmatch(rf"[0-9a-f]{{{digits}}}", etag) else None for digits in (64, 40))
            found[path.relative_to(folder).as_posix()] = Remote(path.stat().st_size, sha256, git)
    if not found:
        raise ValueError(
            f"{repo} at {revision}: offline, and the cache {hub.cache_folder()} holds nothing of it; unset "
            "HF_HUB_OFFLINE and run again"
        )
    if INDEX in found and "model.safetensors" not in found:
        index = hub.cached_file(repo, revision, INDEX, repo_type)
        shards = set(store.read_json(index)["weight_map"].values()) if index else set()
        _refuse_unknown(sorted(shards), found, repo=repo, revision=revision)
    return found


def _download(repo: str, revision: str, repo_type: RepoType, names: Sequence[str], there: Mapping[str, Remote]) -> None:
    """What the cache lacks; access and room are asked for first."""
    missing = [name for name in names if hub.cached_file(repo, revision, name, repo_type) is None]
    if not missing:
        return
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_download, hf_hub_url

    _refuse_full_disk(repo, sum(there[name].size for name in missing))
    with explained(repo, revision, repo_type):
        url = hf_hub_url(repo, missing[0], repo_type=repo_type, revision=revision, endpoint=_endpoint())
        # the names in a gated repository are public, this is not
        get_hf_file_metadata(url, token=get_token(), timeout=60)
    for name in missing:
        with explained(repo, revision, repo_type):
            hf_hub_download(
                repo,
                name,
                repo_type=repo_type,
                revision=revision,
                cache_dir=hub.cache_folder(),
                endpoint=_endpoint(),
            )


def _refuse_full_disk(repo: str, size: int) -> None:
    cache = hub.cache_folder().absolute()
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if size > free:
        raise ValueError(
            f"{repo}: {_gigabytes(size)} to download, {_gigabytes(free)} free at {there}; make room there, or set "
            "HF_HOME to a folder of a larger disk"
        )


def _verified(repo: str, revision: str, repo_type: RepoType, name: str, remote: Remote) -> dict[str, Any]:
    """Hash, size and time of a cached file. ValueError if it is not what the hub holds."""
    path = hub.cached_file(repo, revision, name, repo_type)
    if path is None:
        raise ValueError(f"{repo} at {revision}: {name} vanished from the cache {hub.cache_folder()}; run again")
    status = path.stat()
    hashes = {"sha256": hashlib.sha256(), "git": hashlib.sha1(f"blob {status.st_size}\0".encode())}
    for part in _read(path, status.st_size):
        for digest in hashes.values():
            digest.update(part)
    sha256, git = (digest.hexdigest() for digest in hashes.values())
    if (remote.sha256 or sha256) != sha256 or (remote.git or git) != git:
        wrong = "its contents are not those that the hub holds"
        raise ValueError(f"{repo} at {revision}: {name}: {wrong}; delete {path.resolve()} and {path}, then run again")
    return {"sha256": sha256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _read(path: Path, size: int) -> Iterator[bytes]:
    from tqdm import tqdm

    quiet = True if size < 1 << 30 else None
    with path.open("rb") as file, tqdm(total=size, desc=path.name, unit="B", unit_scale=True, disable=quiet) as bar:
        while part := file.read(CHUNK):
            bar.update(len(part))
            yield part


def _note(repo: str, revision: str, repo_type: RepoType) -> Path:
    """What was verified of a commit before."""
    return store.scratch_file("hub", f"{repo_type}s--{repo.replace('/', '--')}", f"{revision}.json")


def _read_note(
    note: Path, repo: str, revision: str, repo_type: RepoType, names: Sequence[str] | None
) -> dict[str, dict[str, Any]] | None:
    """Facts of the wanted files; None unless all were verified before and have kept size and time."""
    if not note.is_file():
        return None
    known = store.read_json(note)
    names = known["all"] if names is None else names
    if names is None or not set(names) <= set(known["files"]):
        return None
    facts = {name: known["files"][name] for name in names}
    for name, fact in facts.items():
        path = hub.cached_file(repo, revision, name, repo_type)
        if path is None or (path.stat().st_size, path.stat().st_mtime_ns) != (fact["size"], fact["mtime_ns"]):
            return None
    return facts


def _compare(where: str, found_is: str, found: str | None, wanted_is: str, wanted: str | None) -> None:
    if found and wanted and found != wanted:
        raise ValueError(
            f"{where}: {found_is} {found}, {wanted_is} {wanted}; pin the new hash if the change is meant, else correct "
            "the revision"
        )


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
