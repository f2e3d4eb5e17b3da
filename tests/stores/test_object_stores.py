"""Downloads from S3, Google Cloud Storage and Azure, each as a server of this machine."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_replies import reply
from range_server import answering

from cog_triton.download import partial_file
from cog_triton.download.retry import RetryPolicy
from cog_triton.download.url_download import fetch, size
from cog_triton.errors import BuildCancelled, ModelUnavailable
from cog_triton.system.ports import free_ports

ROOT = Path(__file__).parents[2]
PIECE = 1 << 20
DATA = random.Random(0).randbytes(8 * PIECE + 77)
SUM = hashlib.sha256(DATA).hexdigest()
FAST = RetryPolicy(max_failures=3, max_failures_at_start=3, initial_s=0.01, max_s=0.1)
SECRET = "aHVudGVyMmh1bnRlcjJodW50ZXIy"
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own


@dataclass(frozen=True)
class Store:
    """A server that has DATA at `url`, and what replaces it there."""

    url: str
    put: Callable[[bytes], None]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_file, "PIECE", PIECE)


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")

    def put(data: bytes) -> None:
        client.put_object(Bucket="models", Key="dir/model.tar", Body=data, ACL="public-read")

    put(DATA)
    return Store("s3://models/dir/model.tar", put)


@pytest.fixture
def gs(s3: Store, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Google's XML interface, by which obstore reads, has the form of S3's."""
    monkeypatch.setenv("GOOGLE_BASE_URL", s3_server)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    return Store(s3.url.replace("s3://", "gs://"), s3.put)


@pytest.fixture
def az(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    from azure.storage.blob import BlobServiceClient

    here = ROOT / ".work/azurite/node_modules/.bin/azurite-blob"
    program = str(here) if here.exists() else shutil.which("azurite-blob")
    if program is None:
        pytest.skip("no azurite here: npm install --prefix .work/azurite azurite")
    port = free_ports(1)[0]
    options = ("--blobHost", "127.0.0.1", "--blobPort", str(port), "--skipApiVersionCheck")
    quiet = ("--silent", "--inMemoryPersistence", "--disableTelemetry")
    command = [program, *quiet, *options]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        parts = (
            ("DefaultEndpointsProtocol", "http"),
            ("AccountName", "devstoreaccount1"),
            ("AccountKey", AZURITE_KEY),
            ("BlobEndpoint", f"http://127.0.0.1:{port}/devstoreaccount1"),
        )
        connection = ";".join(f"{key}={value}" for key, value in parts)
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1")
        _wait(f"http://127.0.0.1:{port}", process)
        client = BlobServiceClient.from_connection_string(connection)
        client.create_container("models")
        blob = client.get_blob_client("models", "dir/model.tar")

        def put(data: bytes) -> None:
            blob.upload_blob(data, overwrite=True)

        put(DATA)
        yield Store("az://models/dir/model.tar", put)
    finally:
        process.terminate()
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None
        try:
            httpx.get(url)
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


@pytest.fixture(params=["s3", "gs", "az"])
def store(request: pytest.FixtureRequest) -> Store:
    found: Store = request.getfixturevalue(request.param)
    return found


def get(store: Store, target: Path, **options: Any) -> list[str]:
    lines: list[str] = []
    options = {"retry": FAST, "echo": lines.append, **options}
    assert fetch(store.url, target, **options) == target
    return lines


def test_an_object_comes_in_pieces_and_is_checked(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "model.tar"
    get(store, target, sha256=SUM)
    assert target.read_bytes() == DATA
    assert size(store.url) == len(DATA)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.tar"]


def at_the_third_piece(patch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Have `action` called once, when that piece is finished."""
    finish, left = partial_file.PartialFile.finish, [action]

    def finished(self: partial_file.PartialFile, number: int) -> None:
        finish(self, number)
        if number == 2 and left:
            left.pop()()

    patch.setattr(partial_file.PartialFile, "finish", finished)


def test_a_stopped_download_goes_on(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, stop = tmp_path / "model.tar", threading.Event()
    at_the_third_piece(monkeypatch, stop.set)
    with pytest.raises(BuildCancelled):
        get(store, target, connections=1, stop=stop)
    assert not target.exists()
    assert any("going on after" in line for line in get(store, target, sha256=SUM))
    assert target.read_bytes() == DATA


def test_a_changed_object_starts_over(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, other = tmp_path / "model.tar", DATA[::-1]
    at_the_third_piece(monkeypatch, lambda: store.put(other))
    lines = get(store, target, connections=1)
    assert any("has changed; starting over" in line for line in lines)
    assert target.read_bytes() == other


def test_what_is_not_there_is_said_at_once(store: Store, tmp_path: Path) -> None:
    for url in (f"{store.url}.not", store.url.replace("models", "no-such-bucket")):
        with pytest.raises(ModelUnavailable, match="no such object or bucket"):
            fetch(url, tmp_path / "x", retry=FAST, echo=lambda _: None)
    with pytest.raises(ModelUnavailable, match=r"is no object|no such object"):
        fetch(store.url.rpartition("/")[0], tmp_path / "x", retry=FAST, echo=lambda _: None)


def test_a_profile_of_aws_comes_by_boto3(
    s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ModelUnavailable, match=r"not authorised.*AWS_PROFILE"):
        get(s3, tmp_path / "y")
    text = f"[mine]\naws_access_key_id = AKIA\naws_secret_access_key = {SECRET}\n"
    (tmp_path / "credentials").write_text(text)
    monkeypatch.setenv("AWS_PROFILE", "mine")
    get(s3, tmp_path / "x", sha256=SUM)
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(ModelUnavailable, match=r"not authorised.*AWS_PROFILE"):
        get(s3, tmp_path / "y")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    get(s3, tmp_path / "public", sha256=SUM)
    monkeypatch.delenv("AWS_SKIP_SIGNATURE")
    for name in ("boto3", "obstore.auth.boto3"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModelUnavailable, match="AWS_PROFILE needs boto3: pip install boto3"):
        get(s3, tmp_path / "y")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (301, r"refused \(a redirect\); is AWS_REGION the bucket's"),
        (400, r"refused \(HTTP 400\)"),
        (403, r"not authorised .*AWS_PROFILE"),
        (429, r"HTTP 429 \(3 attempts without progress\)"),
        (503, r"HTTP 503 \(3 attempts without progress\)"),
    ],
)
def test_what_a_store_refuses(
    status: int, said: str, s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(lambda request: reply(request, status)) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(ModelUnavailable, match=said):
            get(s3, tmp_path / "x")
