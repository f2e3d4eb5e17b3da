"""References of registries, and the credentials that docker and podman keep."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import InvalidArgument, ModelUnavailable
from cog_triton.oci import credentials
from cog_triton.oci.credentials import Credentials
from cog_triton.oci.reference import Reference

DIGEST = f"sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("text", "url", "tag", "digest"),
    [
        ("ghcr.io/me/llm:v1", "https://ghcr.io/v2/me/llm", "v1", None),
        ("oci://ghcr.io/me/llm", "https://ghcr.io/v2/me/llm", "latest", None),
        (f"oci://ghcr.io/llm@{DIGEST}", "https://ghcr.io/v2/llm", None, DIGEST),
        (f"ghcr.io/llm:v1@{DIGEST}", "https://ghcr.io/v2/llm", "v1", DIGEST),
        ("docker.io/me/llm", "https://registry-1.docker.io/v2/me/llm", "latest", None),
        ("registry.lan:5000/a/b/c", "https://registry.lan:5000/v2/a/b/c", "latest", None),
        ("localhost:5000/llm", "http://localhost:5000/v2/llm", "latest", None),
        ("127.0.0.1:5000/llm", "http://127.0.0.1:5000/v2/llm", "latest", None),
        ("[::1]:5000/llm", "http://[::1]:5000/v2/llm", "latest", None),
        ("localhost.evil.example/llm", "https://localhost.evil.example/v2/llm", "latest", None),
    ],
)
def test_a_reference_is_taken_apart(text: str, url: str, tag: str, digest: str | None) -> None:
    found = Reference.parse(text)
    assert (found.url(plain_http=False), found.tag, found.digest) == (url, tag, digest)
    assert Reference.parse(str(found)) == found
    assert found.url(plain_http=True).startswith("http://")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "llm",
        "me/llm",
        "oci://",
        "oci://ghcr.io",
        "ghcr.io/Me/llm",
        "ghcr.io/me/../llm",
        "ghcr.io//llm",
        "ghcr.io/me/llm:",
        "ghcr.io/me/llm:v 1",
        "ghcr.io/me/llm@sha256:abc",
        "ghcr.io/me/llm@md5:abc",
        "user:hunter2@ghcr.io/me/llm",
        "oci://user:hunter2@ghcr.io/me/llm",
        "https://ghcr.io/me/llm",
        "ghcr.io/me/llm?token=hunter2",
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(ModelUnavailable, match="must be") as caught:
        Reference.parse(text)
    assert "hunter2" not in str(caught.value)


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def find(
    tmp_path: Path, config: dict[str, Any] | str, host: str = "ghcr.io", **variables: str
) -> Credentials | None:
    (tmp_path / ".docker").mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / ".docker/config.json").write_text(text)
    return credentials.find(host, "me/llm", {"HOME": str(tmp_path), **variables})


@pytest.mark.parametrize(
    ("key", "host"),
    [
        ("ghcr.io", "ghcr.io"),
        ("https://ghcr.io", "ghcr.io"),
        ("ghcr.io/me", "ghcr.io"),
        ("ghcr.io/me/llm", "ghcr.io"),
        ("https://index.docker.io/v1/", "docker.io"),
        ("docker.io", "docker.io"),
    ],
)
def test_credentials_are_found_by_their_key(key: str, host: str, tmp_path: Path) -> None:
    config = {"auths": {key: {"auth": encoded("me:pass:word")}, "other.io": {"auth": "x"}}}
    found = find(tmp_path, config, host)
    assert found == Credentials("me", "pass:word")
    assert "pass" not in repr(found)
    assert found.basic == f"Basic {encoded('me:pass:word')}"


def test_others_credentials_are_not_taken(tmp_path: Path) -> None:
    config = {"auths": {"ghcr.io.evil": {"auth": encoded("me:x")}, "ghcr.io/you": {"auth": "eA=="}}}
    assert find(tmp_path, config) is None


def test_an_identity_token_is_found(tmp_path: Path) -> None:
    found = find(tmp_path, {"auths": {"ghcr.io": {"auth": "", "identitytoken": "T"}}})
    assert found is not None
    assert found.identity_token == "T"


def test_podmans_own_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "auth.json"
    file.write_text(json.dumps({"auths": {"ghcr.io": {"auth": encoded("podman:x")}}}))
    found = find(tmp_path, {}, REGISTRY_AUTH_FILE=str(file))
    assert found == Credentials("podman", "x")


def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = tmp_path / "bin/docker-credential-it"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


@pytest.mark.parametrize("config", [{"credsStore": "it"}, {"credHelpers": {"ghcr.io": "it"}}])
@pytest.mark.parametrize(
    ("user", "found"),
    [("me", Credentials("me", "x")), ("<token>", Credentials(identity_token="x"))],
)
def test_a_helper_is_asked(
    user: str,
    found: Credentials,
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = json.dumps({"Username": user, "Secret": "x"})
    script = f'[ "$1 $(cat)" = "get ghcr.io" ] && echo \'{answer}\' || exit 1'
    helper(tmp_path, monkeypatch, script)
    assert find(tmp_path, config) == found
    assert find(tmp_path, config, "quay.io") is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"auths": h\u00fcnter2', "config.json: cannot be read as credentials"),
        ({"credsStore": "../evil"}, "is no name"),
        ({"credsStore": "absent"}, "docker-credential-absent, which is not in PATH"),
        ({"auths": {"ghcr.io": {"auth": "h\u00fcnter2"}}}, "auth is no base64"),
        ({"credsStore": "it"}, "docker-credential-it: its answer is not docker's"),
    ],
)
def test_a_broken_config_is_refused(
    config: dict[str, Any] | str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(tmp_path, monkeypatch, "echo hunter2")
    with pytest.raises(InvalidArgument) as caught:
        find(tmp_path, config)
    assert said in str(caught.value)
    assert "nter2" not in str(caught.value)
