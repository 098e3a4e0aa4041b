"""A small Hub on 127.0.0.1 for huggingface_hub's own client.

Serves repositories from memory as the Hub's API does: revisions, trees, files with ETag, size and
ranges; and the ways in which it refuses or breaks off.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

LARGE = 1000  # files from this size on are stored as LFS


@dataclass
class Repo:
    files: dict[str, bytes]
    gated: bool = False
    commit: str = "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    repos: dict[str, Repo] = field(default_factory=dict)
    # file -> after how many bytes each of the next transfers of it breaks off
    break_off: dict[str, list[int]] = field(default_factory=dict)
    stall: dict[str, int] = field(default_factory=dict)  # file -> after how many bytes it waits, once
    status: int = 0  # answer everything with this status
    ignore_ranges: bool = False
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # (method, path, range)
    url: str = ""

    def add(self, name: str, files: dict[str, bytes], **settings: Any) -> Repo:
        self.repos[name] = Repo(files, **settings)
        return self.repos[name]

    def transfers(self, file: str) -> list[str]:
        """The ranges asked for of a file ('' for the whole), in order."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(f"/{file}")]

    def fetched(self) -> set[str]:
        """Names of all files of which bytes were asked for."""
        found = [
            re.search(r"/resolve/[^/]+/(.+)", path) for method, path, _ in self.requests if method == "GET"
        ]
        return {match[1] for match in found if match}


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if self.hub.status:
            return self._send(self.hub.status, b"", {})
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+))?(?:/.*)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        repo = self.hub.repos.get(match[1]) if match else None
        if repo is None:
            return self._refuse(401, "RepoNotFound")
        if file:
            return self._file(repo, file[2], file[3], body)
        if api and api[3] not in (None, "main", repo.commit):
            return self._refuse(404, "RevisionNotFound")
        return self._json(_tree(repo) if api and api[2] == "tree" else _info(match[1] if match else "", repo))

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: Repo, revision: str, name: str, body: bool) -> None:
        if repo.gated and self.headers.get("Authorization") != "Bearer hf_good":
            return self._refuse(403, "GatedRepo")
        if revision not in ("main", repo.commit):
            return self._refuse(404, "RevisionNotFound")
        if name not in repo.files:
            return self._refuse(404, "EntryNotFound")
        content = repo.files[name]
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{_etag(content)}"'}
        if len(content) >= LARGE:
            headers |= {"X-Linked-Etag": f'"{_etag(content)}"', "X-Linked-Size": str(len(content))}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span and body and not self.hub.ignore_ranges:
            start, end = int(span[1]), min(int(span[2] or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            return self._send(206, content[start:end], headers, self._limit(name))
        if body and name in self.hub.stall:
            return self._stall(content, headers, self.hub.stall.pop(name))
        return self._send(200, content, headers, self._limit(name) if body else None)

    def _stall(self, content: bytes, headers: dict[str, str], nbytes: int) -> None:
        """Send a part, then nothing until the other side has gone."""
        self._head(200, headers, len(content))
        self.wfile.write(content[:nbytes])
        self.wfile.flush()
        self.rfile.read(1)
        self.close_connection = True

    def _limit(self, name: str) -> int | None:
        limits = self.hub.break_off.get(name)
        return limits.pop(0) if limits else None

    def _send(self, status: int, content: bytes, headers: dict[str, str], limit: int | None = None) -> None:
        self._head(status, headers, len(content))
        if self.command == "GET":
            self.wfile.write(content if limit is None else content[:limit])
        if limit is not None:
            self.close_connection = True

    def _head(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()


def _etag(content: bytes) -> str:
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _lfs(content: bytes) -> dict[str, Any]:
    sha256 = hashlib.sha256(content).hexdigest()
    return {"sha256": sha256, "oid": sha256, "size": len(content), "pointerSize": 130}


def _info(name: str, repo: Repo) -> dict[str, Any]:
    siblings = []
    for file, content in repo.files.items():
        entry = {"rfilename": file, "size": len(content), "blobId": _etag(content)}
        siblings.append({**entry, "lfs": _lfs(content)} if len(content) >= LARGE else entry)
    return {"id": name, "modelId": name, "sha": repo.commit, "tags": [], "siblings": siblings}


def _tree(repo: Repo) -> list[dict[str, Any]]:
    rows = []
    for file, content in repo.files.items():
        row = {"type": "file", "path": file, "size": len(content), "oid": _etag(content)}
        rows.append({**row, "lfs": _lfs(content)} if len(content) >= LARGE else row)
    return rows


@contextmanager
def serve() -> Iterator[FakeHub]:
    """A running Hub without repositories."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Point huggingface_hub, as it is already imported, at a Hub and an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("mlxserve.models.transfer.PAUSE_S", 0.01)
