"""Directories of a server: that of Cog's predictions, its own and left empty; work directories."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from stack import REPOSITORY, Stack, pid_of, predict, text_of, wait_until

# All servers of the machine share /tmp/coglet, in which these tests count.
pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("coglet_directory")]

PLACE = Path("/tmp/coglet")
OTHER_USER = str(REPOSITORY / "tests" / "other_user.py")
SOMEONE, NOBODY = 12345, 65534
ME = os.geteuid()
TWO_USERS = pytest.mark.skipif(ME != 0, reason="only root can be two users")


@pytest.fixture
def place() -> Iterator[Path]:
    """Cog's directory, made by this user, as a server without namespaces leaves it."""
    with suppress(FileExistsError):
        (PLACE / "predictions").mkdir(parents=True)
    yield PLACE
    with suppress(OSError):
        (PLACE / "predictions").rmdir()
        PLACE.rmdir()


@pytest.fixture
def their_dir() -> Iterator[Path]:
    """A directory of another user."""
    with tempfile.TemporaryDirectory() as directory:
        os.chown(directory, SOMEONE if ME == 0 else ME, -1)
        yield Path(directory)


def mock_of(user: int, work_dir: Path, *options: str, **environment: str) -> Stack:
    """A mock server of `user`, whom the options of other_user.py may take namespaces from."""
    stack = Stack(work_dir, None, HOME=str(work_dir), COG_LOG_LEVEL="info", **environment)
    mock = [*stack.command, "--engine", "mock", "--tps", "200"]
    stack.command = [sys.executable, OTHER_USER, *options, str(user), *mock]
    return stack


def directories(stack: Stack) -> list[str]:
    """Names of all that predictions have left where the server's Cog sees it."""
    seen = Path(f"/proc/{pid_of(stack, 'coglet.http_server')}/root{PLACE}/predictions")
    return sorted(path.name for path in seen.iterdir())


def ended(stack: Stack) -> tuple[int, str]:
    """Exit code and output of a server that is to end by itself, at once."""
    try:
        stack.start()
        return stack.finish(seconds=60)
    finally:
        stack.close()


def use(stack: Stack) -> None:
    """Predictions that succeed, fail, are refused, left and cancelled."""
    with ThreadPoolExecutor(8) as pool:
        for answer in pool.map(lambda _: stack.predict(max_tokens=3), range(32)):
            assert text_of(answer)
    assert "E1005" in str(stack.predict(seed=10**30)["error"])
    assert "E1001" in str(stack.predict("")["error"])
    assert predict(stack.url, prompt="a", max_tokens="b")["http_status"] == 422
    for _ in range(3):
        with stack.stream("leave", max_tokens=1000) as events:
            next(events)
    for number in range(3):
        body = {"id": f"own-{number}", "input": {"prompt": "cancel", "max_tokens": 8000}}
        headers = {"Prefer": "respond-async"}
        assert httpx.post(f"{stack.url}/predictions", json=body, headers=headers).is_success
        assert httpx.post(f"{stack.url}/predictions/own-{number}/cancel").is_success


@TWO_USERS
def test_two_users_serve_and_nothing_is_left(place: Path, tmp_path: Path, their_dir: Path) -> None:
    kubernetes = {"KUBERNETES_SERVICE_HOST": "127.0.0.1"}
    before = {path.name for path in (place / "predictions").glob("*")}
    with mock_of(ME, tmp_path / "a").served() as mine:
        with mock_of(SOMEONE, their_dir / "b", **kubernetes).served() as theirs:
            use(theirs)
            use(mine)
            for stack in (mine, theirs):
                wait_until(lambda stack=stack: directories(stack) == [])
            assert theirs.finish(signal.SIGINT)[0] == 0
            failures = [line for line in theirs.output.splitlines() if "/var/run/cog" in line]
            assert len(failures) == 1, failures
        use(mine)
        assert mine.finish(signal.SIGINT)[0] == 0
    made = {path.name for path in (place / "predictions").glob("*")} - before
    assert not {name for name in made if name.startswith("own-")}


def test_a_directory_that_servers_share_is_left_empty(place: Path, tmp_path: Path) -> None:
    with mock_of(ME, tmp_path / "a", "--no-namespaces").served() as stack:
        namespace = Path(f"/proc/{pid_of(stack, 'coglet.http_server')}/ns/mnt").readlink()
        assert namespace == Path("/proc/self/ns/mnt").readlink()
        use(stack)
        wait_until(lambda: not [name for name in directories(stack) if name.startswith("own-")])
        with stack.stream("x", max_tokens=8000) as events:
            running = next(events)[1]["id"]
            assert running in directories(stack)
        wait_until(lambda: running not in directories(stack))
        assert stack.finish(signal.SIGINT)[0] == 0


@TWO_USERS
@pytest.mark.parametrize(
    ("way", "user", "refused", "reason"),
    [
        ("serve", SOMEONE, "--no-namespaces", "unshare: Operation not permitted"),
        ("serve", SOMEONE, "--no-mounts", "mount: Operation not permitted"),
        ("serve", NOBODY, "", "all others would have our uid"),
        ("ranks", SOMEONE, "", "neither builds nor MPI_HOSTS"),
        ("image", SOMEONE, "--no-namespaces", "unshare: Operation not permitted"),
        ("builder", SOMEONE, "", "neither builds nor MPI_HOSTS"),
    ],
)
def test_without_namespaces_another_users_directory_is_refused_at_once(
    place: Path, their_dir: Path, way: str, user: int, refused: str, reason: str
) -> None:
    os.chown(their_dir, user, -1)
    options = [refused] if refused else []
    stack = mock_of(user, their_dir / "b", *options)
    stack.environment["COG_PREDICT_TYPE_STUB"] = "predict.py:Predictor"
    if way == "ranks":
        stack.environment["MPI_HOSTS"] = "localhost,localhost"
    elif way in ("image", "builder"):
        door = [sys.executable, "-m", "cog_triton.door", *["--cog-only"] * (way == "builder")]
        stack.command = [sys.executable, OTHER_USER, *options, str(user), *door]
        stack.cwd = REPOSITORY / "mock_cog_triton"
    code, output = ended(stack)
    assert code == 1
    assert "E2106" in output
    assert f"{PLACE} belongs to the user root (0)" in output
    assert "user namespaces" in output
    assert reason in output
    assert not (their_dir / "b" / "run").exists()


def test_a_read_only_machine_without_namespaces_is_refused_at_once(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("no mount namespaces")
    stack = mock_of(ME, tmp_path / "a", "--no-namespaces")
    kept = tempfile.mkdtemp(dir="/var/tmp")
    mounted = Path(kept, "checkout")  # which may lie in /tmp
    mounted.mkdir()
    hide = (
        f'mount --bind "{REPOSITORY}" "{mounted}" && mount -t tmpfs none /tmp'
        f' && mkdir -p "{REPOSITORY}" && mount --bind "{mounted}" "{REPOSITORY}"'
        f' && mount -o remount,ro /tmp && exec "$@"'
    )
    try:
        stack.environment |= {"COG_TRITON_WORK_DIR": kept, "TMPDIR": kept}
        stack.command = ["unshare", "-m", "sh", "-c", hide, "sh", *stack.command]
        code, output = ended(stack)
    finally:
        shutil.rmtree(kept)
    assert code == 1
    assert "E2106" in output
    assert "/tmp cannot be written, and no setting moves what Cog writes there" in output


def test_a_work_directory_may_have_any_name(tmp_path: Path) -> None:
    name = 'it\'s "a" $(false) `false`; & | < > * ? ~ # \\ \n'.ljust(200, "x")
    (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / name, target_is_directory=True)
    with mock_of(ME, tmp_path / "link").served() as stack:
        assert text_of(stack.predict(max_tokens=3))
        assert stack.finish(signal.SIGINT)[0] == 0
    assert (tmp_path / name / "run").is_dir()
    assert not [path for path in Path("/dev/shm").iterdir() if name in os.path.realpath(path)]


def test_a_second_first_prediction_is_the_front_doors_too(mock: Stack) -> None:
    """As after a slow one: its id is another one, which the worker knows, too."""
    text = Path(f"/proc/{pid_of(mock, 'coglet.http_server')}/environ").read_text()
    environment = dict(item.partition("=")[::2] for item in text.split("\0"))
    check = Path(environment["COG_TRITON_DRAIN_FILE"]).name
    for name, output in ((check, "ready"), (f"{check}.1", "ready"), (f"{check}1", None)):
        url = f"http://127.0.0.1:{environment['PORT']}/predictions/{name}"
        answer = httpx.put(url, json={"input": {"prompt": "a", "max_tokens": 1}}).json()
        assert answer["status"] == "succeeded"
        assert ("".join(answer["output"]) == "ready") is (output == "ready")


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped", "a/b", "..", "", "a" * 201])
def test_an_id_names_no_directory_elsewhere(mock: Stack, name: str) -> None:
    body = {"input": {"prompt": "a", "max_tokens": 1}}
    encoded = name.replace("/", "%2F")
    answers = [httpx.post(f"{mock.url}/predictions", json={"id": name, **body})]
    if name not in ("", ".."):
        answers.append(httpx.put(f"{mock.url}/predictions/{encoded}", json=body))
    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert "E1005" in answer.json()["error"]


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with mock_of(ME, tmp_path_factory.mktemp("mock")).served() as stack:
        yield stack
