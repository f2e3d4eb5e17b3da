"""Uploads to a real HTTP server that accepts, refuses, fails and disconnects."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from http_replies import reply, serving

from cog_triton.builder.upload import check, put
from cog_triton.errors import BuildStepFailed, InvalidArgument
from cog_triton.system.ports import free_ports

CONTENT = bytes(range(256)) * 12_000  # 3 MB, so more than one read


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    path = tmp_path / "engine.tar"
    path.write_bytes(CONTENT)
    return path


class Store:
    """Answers with `statuses` one after another, the last one for ever; 0 hangs up."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.seen: list[tuple[str, str | None, bytes]] = []

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        self.seen.append((request.path, request.headers["Transfer-Encoding"], body))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status:
            reply(request, status)
        request.close_connection = True


def uploaded(store: Callable[[BaseHTTPRequestHandler], None], tar: Path) -> list[str]:
    lines: list[str] = []
    with serving(store) as url:
        put(tar, f"{url}/e.tar?signature=secret", lines.append, pauses_s=(0, 0))
    assert not any("secret" in line for line in lines)
    return lines


@pytest.mark.parametrize("status", [200, 204])
def test_upload_sends_the_file_with_its_length(tar: Path, status: int) -> None:
    store = Store(status)
    lines = uploaded(store, tar)
    assert store.seen == [("/e.tar?signature=secret", None, CONTENT)]
    assert lines[-1] == "[upload] 100% of 3 MB"


@pytest.mark.parametrize("trouble", [503, 429, 0])
def test_transient_errors_are_retried_from_the_start(tar: Path, trouble: int) -> None:
    store = Store(trouble, trouble, 200)
    lines = uploaded(store, tar)
    assert [body for _, _, body in store.seen] == [CONTENT] * 3
    assert len([line for line in lines if "again in 0 s" in line]) == 2


@pytest.mark.parametrize("status", [301, 403])
def test_refusals_are_not_retried(tar: Path, status: int) -> None:
    store = Store(status)
    with pytest.raises(InvalidArgument, match=f"upload_url='.*/e.tar': HTTP {status}"):
        uploaded(store, tar)
    assert len(store.seen) == 1


def test_error_after_the_last_retry(tar: Path) -> None:
    store = Store(503)
    with pytest.raises(BuildStepFailed, match=r"/e.tar failed 3 times: HTTP 503"):
        uploaded(store, tar)
    assert len(store.seen) == 3


def test_unreachable_server_is_an_error(tar: Path) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}/e.tar?secret"
    with pytest.raises(BuildStepFailed, match="refused") as caught:
        put(tar, url, lambda _: None, pauses_s=())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["e.tar", "ftp://h/e", "https:///e", "http://[::1/"])
def test_invalid_upload_url_is_refused_before_the_build(url: str) -> None:
    with pytest.raises(InvalidArgument, match="upload_url"):
        check(url)
    check("https://host/e.tar?signature=x")
