"""Stand-in of the Hugging Face hub's HTTP API: as much as huggingface_hub uses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from http_replies import reply
from huggingface_hub import constants
from range_server import Content, FileServer, Plan, answering

ID = "org/tiny"
MAIN = "a" * 40
OLD = "b" * 40


class Hub:
    """One model at two commits. Files of more than `limit` bytes are kept on another host, as LFS.

    `requests` holds method and path of each request to the hub, `cdn` those for large files.
    """

    def __init__(self, files: dict[str, bytes], limit: int = 1000) -> None:
        self.files = {MAIN: files, OLD: {**files, "old.txt": b"old"}}
        self.revisions = {"main": MAIN, "v1": OLD, MAIN: MAIN, OLD: OLD}
        self.limit = limit
        self.token: str | None = None
        self.gated = False
        self.status: int | None = None
        self.plan: Plan | None = None
        self.requests: list[str] = []
        self.cdn: list[FileServer] = []
        self.cdn_tokens: list[str | None] = []
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a GET or HEAD."""
        path = unquote(urlsplit(request.path).path)
        if path.startswith("/cdn/"):
            self._cdn(request, path.rpartition("/")[2])
            return
        self.requests.append(f"{request.command} {path}")
        if self.status is not None:
            reply(request, self.status, b"{}")
            return
        model = f"/api/models/{ID}"
        if path == model or path.startswith(f"{model}/revision/"):
            self._info(request, path.removeprefix(model).removeprefix("/revision/") or "main")
        elif path.startswith(f"{model}/tree/"):
            self._tree(request, path.removeprefix(f"{model}/tree/"))
        elif path.startswith(f"/{ID}/resolve/"):
            revision, _, name = path.removeprefix(f"/{ID}/resolve/").partition("/")
            self._file(request, revision, name)
        else:
            _refuse(request, 404, "RepoNotFound")

    def _info(self, request: BaseHTTPRequestHandler, revision: str) -> None:
        if self.token is not None and not self.gated and not self._allowed(request):
            _refuse(request, 401, "RepoNotFound")  # as for any repository that is not public
            return
        commit = self.revisions.get(revision)
        if commit is None:
            _refuse(request, 404, "RevisionNotFound")
            return
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "blobId": _oid(data),
                **self._lfs(data, "sha256"),
            }
            for name, data in self.files[commit].items()
        ]
        self._json(request, {"id": ID, "modelId": ID, "sha": commit, "siblings": siblings})

    def _tree(self, request: BaseHTTPRequestHandler, commit: str) -> None:
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
            | self._lfs(data, "oid")
            for name, data in self.files[commit].items()
        ]
        self._json(request, tree)

    def _file(self, request: BaseHTTPRequestHandler, revision: str, name: str) -> None:
        if self.token is not None and not self._allowed(request):
            _refuse(request, 403 if self.gated else 401, "GatedRepo" if self.gated else "")
            return
        data = self.files[self.revisions[revision]][name]
        headers = {"X-Repo-Commit": self.revisions[revision], "ETag": f'"{_oid(data)}"'}
        if len(data) > self.limit:
            sha256 = hashlib.sha256(data).hexdigest()
            other = self.url.replace("127.0.0.1", "localhost")
            headers |= {"X-Linked-ETag": f'"{sha256}"', "X-Linked-Size": str(len(data))}
            headers |= {"Location": f"{other}/cdn/{sha256}?X-Signature=hunter2"}
            reply(request, 302, **headers)
        else:
            reply(request, 200, data, **headers)

    def _cdn(self, request: BaseHTTPRequestHandler, sha256: str) -> None:
        self.cdn_tokens.append(request.headers["Authorization"])
        known = [server for server in self.cdn if server.url == sha256]
        if not known:
            every = [data for files in self.files.values() for data in files.values()]
            data = next(data for data in every if hashlib.sha256(data).hexdigest() == sha256)
            known = [FileServer(Content.of(data), self.plan)]
            known[0].url = sha256
            self.cdn += known
        known[0].answer(request)

    @staticmethod
    def _json(request: BaseHTTPRequestHandler, body: Any) -> None:
        kind = {"Content-Type": "application/json"}
        reply(request, 200, json.dumps(body).encode(), **kind)

    def _allowed(self, request: BaseHTTPRequestHandler) -> bool:
        return request.headers["Authorization"] == f"Bearer {self.token}"

    def _lfs(self, data: bytes, key: str) -> dict[str, Any]:
        if len(data) <= self.limit:
            return {}
        sha256 = hashlib.sha256(data).hexdigest()
        return {"lfs": {key: sha256, "size": len(data), "pointerSize": 130}}


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _refuse(request: BaseHTTPRequestHandler, status: int, code: str) -> None:
    """A hub that talks too much: the token must not come back out of its errors."""
    said = {"X-Error-Message": f"you sent {request.headers['Authorization']}"}
    reply(request, status, b"{}", **({"X-Error-Code": code} if code else {}), **said)


def ask_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path | None = None) -> None:
    """Have the library ask the hub at `url`, as HF_ENDPOINT does when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    if cache is not None:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))


@contextmanager
def serving_hub(files: dict[str, bytes]) -> Iterator[Hub]:
    """A `Hub` for as long as the context lasts."""
    hub = Hub(files)
    with answering(hub.answer) as url:
        hub.url = url
        yield hub
