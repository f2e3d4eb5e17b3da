"""Pulls of engines from a registry that does what it should not."""

from __future__ import annotations

import base64
import io
import json
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from registry_double import Fault, RegistryDouble, Seen, digest_of, running
from sample_engines import contents, with_manifest

from cog_triton.artifact import engine_manifest
from cog_triton.download import partial_file
from cog_triton.download.retry import RetryPolicy
from cog_triton.errors import CogTritonError, EngineCorrupt, InvalidArgument, ModelUnavailable
from cog_triton.oci import credentials, image_manifest
from cog_triton.oci.credentials import Credentials
from cog_triton.oci.engine_pull import Puller
from cog_triton.oci.reference import Reference

FAST = RetryPolicy(max_failures=3, max_failures_at_start=3, initial_s=0.001, max_s=0.01)
SECRET = "hunter2"
pytestmark = pytest.mark.usefixtures("home")


def tar(files: dict[str, bytes], **header: Any) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as file:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for key, value in header.items():
                setattr(member, key, value)
            file.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def put(double: RegistryDouble, engine: Path, name: str = "v1") -> str:
    files = engine_manifest.files_of(engine)
    return double.tag(
        name, [double.add(tar({file: path.read_bytes()})) for file, path in files.items()]
    )


def reference(double: RegistryDouble, rest: str = ":v1") -> Reference:
    return Reference.parse(f"oci://{double.address}/me/llm{rest}")


def puller(work: Path, lines: list[str] | None = None) -> Puller:
    echo = (lines if lines is not None else []).append
    return Puller(work, echo, threading.Event(), retry=FAST)


def leftovers(work: Path) -> list[str]:
    """What is neither a whole layer, nor an engine, nor finished pieces of a layer."""
    layers = [path for path in (work / "oci").glob("*/*") if len(path.name) != 64]
    halves = [
        path for path in (work / "oci/layers").glob("*") if not (path / "index.json").exists()
    ]
    engines = (work / "engines").glob(".*")
    return [path.name for path in (*layers, *halves, *engines) if ".partial" not in path.name]


def refused(
    double: RegistryDouble, work: Path, kind: type[CogTritonError], rest: str = ":v1"
) -> str:
    with pytest.raises(kind) as caught:
        puller(work).pull(reference(double, rest))
    assert not list((work / "engines").glob("oci-*"))
    assert leftovers(work) == []
    return str(caught.value)


def test_a_tag_is_resolved_said_and_pulled_once(
    double: RegistryDouble, engine: Path, tmp_path: Path
) -> None:
    digest = put(double, engine)
    lines: list[str] = []
    found = puller(tmp_path / "work", lines).pull(reference(double))
    assert contents(found) == contents(engine)
    assert any(f":v1 is {digest}" in line for line in lines)
    before = len(double.asked("/blobs/"))
    assert puller(tmp_path / "work").pull(reference(double)) == found
    assert len(double.asked("/blobs/")) == before
    asked = len(double.seen)
    assert puller(tmp_path / "work").pull(reference(double, f"@{digest}")) == found
    assert len(double.seen) == asked
    assert leftovers(tmp_path / "work") == []


def test_engines_share_layers_on_the_disk(
    double: RegistryDouble, engine: Path, tmp_path: Path
) -> None:
    put(double, engine)
    first = puller(tmp_path / "work").pull(reference(double))
    (engine / "tokenizer.json").write_text('{"another": 1}')
    (engine / "cog-triton.json").unlink()
    put(double, with_manifest(engine))
    blobs = len({seen.path for seen in double.asked("/blobs/")})
    second = puller(tmp_path / "work").pull(reference(double))
    assert contents(second) == contents(engine)
    assert len({seen.path for seen in double.asked("/blobs/")}) == blobs + 2
    name = "rank0.engine"
    assert (first / name).stat().st_ino == (second / name).stat().st_ino


def test_cut_and_refused_blobs_are_resumed(
    double: RegistryDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_file, "PIECE", 64 << 10)
    layer = double.add(tar({"model.json": b"{}", "weights": bytes(range(256)) * 4096}))
    double.tag("v1", [layer])
    failed: set[str] = set()

    def plan(seen: Seen) -> Fault | None:
        turn = len(double.asked("/blobs/"))
        if "/blobs/" not in seen.path or f"{seen.span}" in failed or turn == 1:
            return None
        failed.add(f"{seen.span}")
        wait = {"Retry-After": "0"}
        return (Fault(cut_after=1000), Fault(429, wait), Fault(503))[turn % 3]

    double.plan = plan
    found = puller(tmp_path / "work").pull(reference(double))
    assert (found / "weights").read_bytes() == bytes(range(256)) * 4096
    assert len(failed) > 10
    starts = [int(seen.span.split("=")[1].split("-")[0]) for seen in double.seen if seen.span]
    assert any(start % (64 << 10) == 1000 for start in starts)  # a cut piece went on where it ended


def test_a_wrong_digest_leaves_nothing(
    double: RegistryDouble, engine: Path, tmp_path: Path
) -> None:
    put(double, engine)
    good = dict(double.blobs)
    name = max(double.blobs, key=lambda key: len(double.blobs[key]))
    double.blobs[name] = bytes(len(double.blobs[name]))
    said = refused(double, tmp_path / "work", ModelUnavailable)
    assert name.removeprefix("sha256:") in said
    assert not list(tmp_path.rglob(f"*{name.removeprefix('sha256:')}*"))
    double.blobs = good
    assert contents(puller(tmp_path / "work").pull(reference(double))) == contents(engine)


def test_a_blob_of_another_size_or_a_manifest_of_another_digest_is_refused(
    double: RegistryDouble, tmp_path: Path
) -> None:
    layer = double.add(tar({"model.json": b"{}"}))
    double.tag("v1", [{**layer, "size": layer["size"] - 512}])
    said = refused(double, tmp_path / "work", ModelUnavailable)
    assert f"has {layer['size']} bytes, not {layer['size'] - 512}" in said
    digest = double.tag("v1", [layer])
    double.manifests[digest] = double.manifests["v1"] + b" "
    said = refused(double, tmp_path / "work", ModelUnavailable, f"@{digest}")
    assert f"not {digest}" in said


def many(count: int) -> list[dict[str, Any]]:
    digests = [digest_of(str(number).encode()) for number in range(count)]
    return [{"mediaType": image_manifest.TAR, "digest": one, "size": 10240} for one in digests]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": many(image_manifest.MAX_LAYERS + 1)}, "at most 1024 items"),
        ({"layers": []}, "at least 1 item"),
        ({"layers": [{**many(1)[0], "size": -1}]}, "layers.0.size"),
        ({"layers": [{**many(1)[0], "digest": "sha256:../../etc"}]}, "layers.0.digest"),
        ({"layers": [{**many(1)[0], "mediaType": "application/x-other"}]}, "application/x-other"),
        ({"layers": many(1) * 2}, "one layer twice"),
        ({"schemaVersion": 1}, "schemaVersion"),
        ({"manifests": [{"digest": digest_of(b"1"), "platform": {"os": "linux"}}]},
         f"{digest_of(b'1')} (linux/?)"),
        ({"filler": "x" * image_manifest.MAX_MANIFEST}, "over 4194304 bytes"),
        *((body, "its manifest") for body in (b"", b"<html>", b"[" * 100_000, b"null")),
    ],
)  # fmt: skip
def test_a_manifest_that_breaks_a_rule_is_refused(
    changes: dict[str, Any] | bytes, said: str, double: RegistryDouble, tmp_path: Path
) -> None:
    if isinstance(changes, bytes):
        double.manifests["v1"] = changes
    else:
        double.tag("v1", **{"layers": many(1), **changes})
    assert said in refused(double, tmp_path / "work", EngineCorrupt)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([tar({"../evil": b"x"})], "leaves the engine directory"),
        ([tar({"a": b""}, type=tarfile.SYMTYPE, linkname="b")], "is a link"),
        ([tar({".wh.config.json": b""})], "deletes a file"),
        ([b"no tar" * 1000], "not a whole, readable tar"),
        ([tar({"a": b"1"}), tar({"a": b"2"})], "in two of its layers"),
        ([tar({"a": b"1"}), tar({"a/b": b"2"})], "a file and a directory"),
        ([tar({"a/b": b"1"}), tar({"a": b"2"})], "a file and a directory"),
    ],
)  # fmt: skip
def test_unsafe_layers_are_refused(
    layers: list[bytes], said: str, double: RegistryDouble, tmp_path: Path
) -> None:
    double.tag("v1", [double.add(layer) for layer in layers])
    assert said in refused(double, tmp_path / "work", EngineCorrupt)
    assert not list(tmp_path.rglob("evil"))


def test_other_files_than_the_manifest_says_are_refused(
    double: RegistryDouble, engine: Path, tmp_path: Path
) -> None:
    (engine / "rank0.engine").write_bytes(b"another")
    put(double, engine)
    assert "rank0.engine has 7 bytes" in refused(double, tmp_path / "work", EngineCorrupt)


def logged_in(home: Path, double: RegistryDouble, user: str = "me") -> None:
    (home / ".docker").mkdir(parents=True)
    auth = base64.b64encode(f"{user}:{SECRET}".encode()).decode()
    config = {"auths": {double.address: {"auth": auth}}}
    (home / ".docker/config.json").write_text(json.dumps(config))


BASIC = f"Basic {base64.b64encode(f'me:{SECRET}'.encode()).decode()}"


class TokenService:
    """Plan of a registry with a token service, whose tokens last for so many requests."""

    def __init__(self, double: RegistryDouble, lasts: int = 1000) -> None:
        self.double, self.lasts = double, lasts
        self.given = 0
        self.used = 0

    def __call__(self, seen: Seen) -> Fault | None:
        if seen.path.startswith("/token"):
            if seen.authorization != BASIC:
                return Fault(401)
            self.given, self.used = self.given + 1, 0
            return Fault(200, {}, json.dumps({"token": f"{SECRET}-{self.given}"}).encode())
        if seen.authorization == f"Bearer {SECRET}-{self.given}" and self.used < self.lasts:
            self.used += 1
            return None
        realm = f'Bearer realm="http://{self.double.address}/token",service="it",scope="pull"'
        return Fault(401, {"WWW-Authenticate": realm}, b'{"errors": [{"code": "UNAUTHORIZED"}]}')


def test_tokens_are_fetched_and_renewed(
    double: RegistryDouble, engine: Path, tmp_path: Path, home: Path
) -> None:
    put(double, engine)
    logged_in(home, double)
    double.plan = service = TokenService(double, lasts=4)
    found = puller(tmp_path / "work").pull(reference(double))
    assert contents(found) == contents(engine)
    assert service.given > 2
    asked = double.asked("GET /token")
    assert asked[0].path == "/token?service=it&scope=pull"


def test_a_refused_password_is_not_shown(
    double: RegistryDouble, tmp_path: Path, home: Path
) -> None:
    logged_in(home, double, "another")
    double.plan = TokenService(double)
    said = refused(double, tmp_path / "work", ModelUnavailable)
    assert "token service 127.0.0.1 answers HTTP 401" in said
    assert SECRET not in said


def test_basic_credentials_do_not_follow_a_redirect(
    double: RegistryDouble, engine: Path, tmp_path: Path, home: Path
) -> None:
    put(double, engine)
    logged_in(home, double)
    with running(RegistryDouble()) as elsewhere:
        elsewhere.blobs = double.blobs
        other = elsewhere.address

        def plan(seen: Seen) -> Fault | None:
            if seen.authorization != BASIC:
                return Fault(401, {"WWW-Authenticate": 'Basic realm="it"'})
            if "/blobs/" in seen.path:
                return Fault(307, {"Location": f"http://{other}{seen.path}"})
            return None

        double.plan = plan
        found = puller(tmp_path / "work").pull(reference(double))
        assert contents(found) == contents(engine)
        assert elsewhere.seen
        assert {seen.authorization for seen in elsewhere.seen} == {None}

        # A challenge of the other host is not answered either.
        (engine / "rank0.engine").write_bytes(b"new")
        (engine / "cog-triton.json").unlink()
        put(double, with_manifest(engine))
        elsewhere.plan = lambda _: Fault(401, {"WWW-Authenticate": 'Basic realm="mine"'})
        with pytest.raises(ModelUnavailable):
            puller(tmp_path / "work").pull(reference(double))
        assert {seen.authorization for seen in elsewhere.seen} == {None}


DENIED = b'{"errors": [{"code": "DENIED", "message": "a\\u001b[31mb"}]}'
BASIC_ONLY = {"WWW-Authenticate": 'Basic realm="it"'}
BY_FTP = {"WWW-Authenticate": 'Bearer realm="ftp://127.0.0.1/token"'}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(401, BASIC_ONLY), "no credentials for it are here; log in with docker login 127.0"),
        (Fault(401, BY_FTP), "not reached by https"),
        (Fault(403, {}, DENIED), "DENIED a\\x1b[31mb: "),
        (Fault(404, {}, DENIED), "no such repository"),
        (Fault(429, {"Retry-After": "0"}), "3 attempts"),
    ],
)
def test_refusals_say_what_to_do(
    fault: Fault, said: str, double: RegistryDouble, tmp_path: Path, home: Path
) -> None:
    if fault.headers is BY_FTP:
        logged_in(home, double)
    double.plan = lambda _: fault
    assert said in refused(double, tmp_path / "work", ModelUnavailable)


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
        "oci://",
        "ghcr.io/Me/llm",
        "ghcr.io/me/../llm",
        "ghcr.io/me/llm:v 1",
        "ghcr.io/me/llm@sha256:abc",
        "user:hunter2@ghcr.io/me/llm",
        "oci://user:hunter2@ghcr.io/me/llm",
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
        ("ghcr.io/me", "ghcr.io"),
        ("https://ghcr.io", "ghcr.io"),
        ("ghcr.io/me/llm", "ghcr.io"),
        ("https://index.docker.io/v1/", "docker.io"),
    ],
)
def test_credentials_are_found_by_their_key(key: str, host: str, tmp_path: Path) -> None:
    config = {"auths": {key: {"auth": encoded("me:pass:word")}, "other.io": {"auth": "x"}}}
    found = find(tmp_path, config, host)
    assert found == Credentials("me", "pass:word")
    assert "pass" not in repr(found)
    assert found.basic == f"Basic {encoded('me:pass:word')}"


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
