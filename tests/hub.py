"""Stand-ins for the Hugging Face hub: a cache laid out like its own, and a small server that answers as it does."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS = (".safetensors", ".parquet", ".model", ".bin")  # stored by SHA-256, the rest by Git's hash


def etag(name: str, content: bytes) -> str:
    """What the hub calls the contents of a file, and names its blob by."""
    if name.endswith(LFS):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def lay_out(
    hf_home: Path, repo: str, revision: str, files: Mapping[str, bytes | Path], repo_type: str = "model"
) -> Path:
    """Put files into the cache below `hf_home` as huggingface_hub would; returns the snapshot's folder.

    Values are contents, or files to take them from.
    """
    folder = hf_home / "hub" / f"{repo_type}s--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(revision)
    (folder / "blobs").mkdir(exist_ok=True)
    for name, value in files.items():
        content = value.read_bytes() if isinstance(value, Path) else value
        blob, pointer = folder / "blobs" / etag(name, content), snapshot / name
        blob.write_bytes(content)
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.unlink(missing_ok=True)
        pointer.symlink_to(Path(*[".."] * (name.count("/") + 2)) / "blobs" / blob.name)
    return snapshot


def use_cache(monkeypatch: pytest.MonkeyPatch, hf_home: Path, *, offline: bool = True) -> None:
    """Point everything that reads the environment at this cache."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(hf_home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if offline else "0")


class Hub(ThreadingHTTPServer):
    """Repositories by "models/owner/name" or "datasets/owner/name", each one commit; `asked` lists the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self.broken = 0  # a status that every request gets

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path))
        if self.server.broken:
            self._refuse(self.server.broken, "")
        elif path.startswith("/api/"):
            kind, owner, name, _, revision = path.removeprefix("/api/").split("/")
            self._list(f"{kind}/{owner}/{name}", revision)
        else:
            parts = path.strip("/").split("/")
            kind = parts.pop(0) if parts[0] == "datasets" else "models"
            owner, name, _, revision, *file = parts
            self._file(f"{kind}/{owner}/{name}", revision, "/".join(file))

    def _list(self, repo: str, revision: str) -> None:
        if repo not in self.server.repos or self.headers.get("Authorization") == "Bearer hf_wrong":
            return self._refuse(401, "" if self.headers.get("Authorization") else "RepoNotFound")
        if revision != COMMIT:
            return self._refuse(404, "RevisionNotFound")
        siblings = []
        for name, content in self.server.repos[repo].items():
            file = {"rfilename": name, "size": len(content), "blobId": etag(name, content)}
            if name.endswith(LFS):
                file["lfs"] = {"size": len(content), "sha256": etag(name, content), "pointerSize": 134}
            siblings.append(file)
        about = {"id": repo.partition("/")[2], "sha": revision, "siblings": siblings, "tags": [], "private": False}
        self._send(json.dumps(about).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str) -> None:
        if repo not in self.server.repos:
            return self._refuse(401, "RepoNotFound")
        if repo in self.server.gated and self.headers.get("Authorization") != "Bearer hf_member":
            return self._refuse(403 if self.headers.get("Authorization") else 401, "GatedRepo")
        if revision != COMMIT:
            return self._refuse(404, "RevisionNotFound")
        if name not in self.server.repos[repo]:
            return self._refuse(404, "EntryNotFound")
        content = self.server.repos[repo][name]
        tags = {"ETag": f'"{etag(name, content)}"', "X-Repo-Commit": revision}
        self._send(content, tags | {"X-Linked-Size": str(len(content)), "X-Linked-ETag": tags["ETag"]})

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"", {"X-Error-Code": code} if code else {}, status)

    def _send(self, content: bytes, headers: Mapping[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextmanager
def serve(monkeypatch: pytest.MonkeyPatch, hf_home: Path) -> Iterator[Hub]:
    """A hub on this machine, with an empty cache below `hf_home`."""
    use_cache(monkeypatch, hf_home, offline=False)
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN_PATH", str(hf_home / "no-token"))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()
