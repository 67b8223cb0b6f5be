"""What the hub and the network refuse, as one line that says what to do."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from stages.common import hub
from stages.common.hub import RepoType

TRANSPORT: type[Exception] = HfHubHTTPError.__mro__[
    1
]  # every error of the HTTP client, whichever the hub's library has
UNKNOWN = 401  # the hub's answer to a wrong token and, without one, to a name that it does not show


def page(repo: str, repo_type: RepoType) -> str:
    """The repository's page."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    return f"{endpoint}/{'datasets/' if repo_type == 'dataset' else ''}{repo}"


@contextmanager
def explained(repo: str, revision: str, repo_type: RepoType) -> Iterator[None]:
    """Turn what huggingface_hub raises inside into a ValueError of one line."""
    try:
        yield
    except (OSError, HFValidationError, EntryNotFoundError, TRANSPORT) as error:
        raise ValueError(_said(error, repo, revision, repo_type)) from None


def _said(error: Exception, repo: str, revision: str, repo_type: RepoType) -> str:
    """The order is that of the classes: a gated repository is also one not found, both are answers of HTTP."""
    where, token = page(repo, repo_type), get_token()
    if isinstance(error, HFValidationError):
        return f"{repo!r} names no repository of the hub; write owner/name"
    if isinstance(error, GatedRepoError):
        if token:
            return f"{repo} is gated, and your token's account has no access: ask for it at {where}, then run again"
        return f"{repo} is gated: accept its terms at {where}, then set HF_TOKEN to a token of that account"
    if isinstance(error, RepositoryNotFoundError) or (_status(error) == UNKNOWN and not token):
        seen = "that your token may see" if token else "that is public (set HF_TOKEN if it is private)"
        return f"no {repo_type} {repo} at {where} {seen}; correct `repo`"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no commit {revision}; correct `revision` ({where}/commits/main lists them)"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{repo} at {revision}: offline, and the cache {hub.cache_folder()} lacks it; unset HF_HUB_OFFLINE"
    if isinstance(error, LocalEntryNotFoundError):
        return _no_network(repo, where, error.__cause__ or error)
    if isinstance(error, HfHubHTTPError):
        return _answered(error, repo, where)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{repo}: the disk of {hub.cache_folder()} is full; make room there, or set HF_HOME to a larger disk"
    if isinstance(error, TRANSPORT | ConnectionError | TimeoutError):
        return _no_network(repo, where, error)
    return f"{repo} at {revision}: {_line(error)}"


def _status(error: Exception) -> int:
    """Of an answer of the hub; 0 for what is none."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else 0


def _answered(error: HfHubHTTPError, repo: str, where: str) -> str:
    status = _status(error)
    if status == UNKNOWN:
        return f"{repo}: the hub refuses your token; set HF_TOKEN to a valid one, or unset it for public repositories"
    again = "wait and run again" if status == 429 or status >= 500 else f"look at {where}"
    return f"{repo}: the hub answers {status}; {again}"


def _no_network(repo: str, where: str, error: BaseException) -> str:
    return (
        f"{repo}: no way to {where} ({type(error).__name__}: {_line(error)}); check network and proxy, or set "
        "HF_HUB_OFFLINE=1 if the cache is complete"
    )


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no further word"])[0].rstrip(".")
