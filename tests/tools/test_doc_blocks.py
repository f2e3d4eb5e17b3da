"""Command blocks on the pages: each is run, or marked with the reason why it is not.

The mark is a comment on the line before the block, which no reader sees:

``<!-- not run: needs a GPU -->``
    The reason is for whoever reads the source.
``<!-- run -->``
    The block is a script of bash, which ends at the first command that fails. Of a `console` block
    the lines after ``$`` are, and what it shows is compared with what they print, loosely: JSON's
    keys, and the first two words of other lines, are there; numbers do not count. ``cog-triton
    serve`` and ``make serve`` go on when the server is ready, and it is ended after the block.
``<!-- run: exit 1 -->``
    The last command ends with that code.
``<!-- run: mock -->``, ``<!-- run: demo -->``
    Against a server of the mock engine, or of the demo model, which is there.
``<!-- run: registry -->``
    With a registry on localhost:5001.
``<!-- file: serve.yaml -->``
    Before a block of any kind: it is written to that file, for the blocks below it.

The blocks of a page share a directory, with ``engine.tar`` (the demo engine), ``engine``, it
unpacked, ``adapters/sql`` for the mock, and a copy of ``configs``, ``deploy`` and ``builder``. The
page's ports are replaced by free ones, and the hub is out of reach.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import local_registry
import pytest
from lora_adapters import adapter
from stack import REPOSITORY, Stack, processes_of

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
SECONDS = 300
"""Time that a block may take, on a machine with other work to do."""
PORTS = ("PORT", "TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT", "OPENAI_PORT")
"""Settings of a server that its clients read, too."""
_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
_MARK = re.compile(r"^ *<!-- (not run|run|file)(?:: (.+))? -->$")
_PORT = re.compile(r"(?<=localhost:|127\.0\.0\.1:)(5000|5001|8000|8001|8002|8080)\b")
_BASH = """
cog-triton() {
  if [[ $1 != serve ]]; then command cog-triton "$@"; else serve_until_ready cog-triton "$@"; fi
}
make() {
  set -- --no-print-directory -C "$REPOSITORY" "$@"
  if [[ $4 != serve ]]; then command make "$@"; else serve_until_ready make "$@"; fi
}
serve_until_ready() {
  : >server.log
  command "$@" >server.log 2>&1 &
  until grep -q 'Ready in' server.log; do
    kill -0 $! || { cat server.log; return 1; }
    sleep 0.1
  done
  cat server.log
}
set -eo pipefail
"""


@dataclass(frozen=True)
class Block:
    """A block of a page: its mark, and what is in it."""

    line: int
    kind: str
    text: str
    mark: str
    """``run``, ``not run`` or ``file``; empty if there is none."""
    said: tuple[str, ...]
    """What the mark has after its colon."""

    def commands(self) -> list[tuple[str, list[str]]]:
        """Commands, with the lines that the block shows of what they print."""
        if self.kind != "console":
            return [(self.text, [])]
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif found and not found[-1][1] and _goes_on(found[-1][0]):
                found[-1] = (f"{found[-1][0]}\n{line}", [])
            else:
                assert found, f"line {self.line}: output before any command"
                found[-1][1].append(line)
        return found


def _goes_on(command: str) -> bool:
    """Whether the command ends on a later line."""
    try:
        shlex.split(command)
    except ValueError:
        return True
    return command.endswith("\\")


def blocks(page: str) -> Iterator[Block]:
    """Blocks of a page: all of commands, and those that are files."""
    for found in _BLOCK.finditer(page):
        before = page[: found.start()].splitlines()
        mark = _MARK.match(before[-1]) if before else None
        if found["kind"] not in ("sh", "console") and (mark is None or mark[1] != "file"):
            continue
        indent = len(found["indent"])
        text = "".join(line[indent:] or "\n" for line in found["text"].splitlines(keepends=True))
        kind, said = (mark[1], mark[2] or "") if mark else ("", "")
        words = tuple(word.strip() for word in said.split(",")) if kind == "run" else (said,)
        yield Block(len(before) + 1, found["kind"], text, kind, words)


def is_shown(line: str, printed: str) -> bool:
    """Whether a line that a page shows is in what was printed: JSON's keys, or its beginning."""
    keys = re.findall(r'"(\w+)" ?:', line)
    if keys:
        return all(f'"{key}"' in printed for key in keys)
    plain, everything = (re.sub(r"\d+", "0", text).split() for text in (line, printed))
    words = list(takewhile(lambda word: "..." not in word, plain))[:2]
    return " ".join(words) in " ".join(everything)


class Shell:
    """Runs the blocks of a page in a directory, with ports that are free."""

    def __init__(self, directory: Path, servers: dict[str, Stack], registry: str) -> None:
        self.directory = directory
        self._servers = servers
        self._registry = registry

    def run(self, block: Block) -> None:
        """Run a block, and compare what it prints with what it shows."""
        own = Stack(self.directory.with_name(f"{self.directory.name}-{block.line}"), None)
        server = next((self._servers[word] for word in block.said if word in self._servers), own)
        commands = block.commands()
        script = [_BASH]
        for number, (command, _) in enumerate(commands):
            waited_for = re.sub(r"(serve\b.*) &$", r"\1", command, flags=re.MULTILINE)
            script += [f"echo '=={number}=='", waited_for]
        text = self._with_ports("\n".join(script), server)
        ports = {port: server.environment[port] for port in PORTS}
        environment = {**own.environment, **ports, "REPOSITORY": str(REPOSITORY)}
        environment["HF_HUB_OFFLINE"] = "1"
        try:
            code, printed = self._bash(text, environment)
        finally:
            self._end(own)
        expected = next((int(word[5:]) for word in block.said if word.startswith("exit ")), 0)
        assert code == expected, f"line {block.line}: exit code {code}\n{printed}"
        for number, (_, shown) in enumerate(commands):
            part = printed.partition(f"=={number}==\n")[2].partition(f"=={number + 1}==\n")[0]
            lacking = [line for line in shown if not is_shown(line, part)]
            assert not lacking, f"line {block.line}: {lacking} not in\n{part}"

    def _bash(self, script: str, environment: dict[str, str]) -> tuple[int, str]:
        log = self.directory / ".printed"
        with log.open("wb") as output:
            started = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = started.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
                pytest.fail(f"not done within {SECONDS} s:\n{log.read_text()}")
        return code, log.read_text("utf-8", errors="replace")

    def _with_ports(self, text: str, server: Stack) -> str:
        ports = {
            "5000": server.port,
            "8000": server.http,
            "8001": server.grpc,
            "8002": server.metrics,
            "8080": server.openai,
            "5001": self._registry,
        }
        return _PORT.sub(lambda port: str(ports[port[0]]), text)

    def _end(self, own: Stack) -> None:
        if processes_of(own.work_dir):
            own.close()
        shutil.rmtree(own.work_dir, ignore_errors=True)


@pytest.fixture(scope="session")
def mock_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server of the mock engine."""
    fast = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "1000"}
    running = Stack(tmp_path_factory.mktemp("mock"), None, **fast)
    with running.served():
        yield running


@pytest.fixture
def shell(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shell]:
    """A shell for the page of the test, with what its marks name."""
    page: Path = request.getfixturevalue("page")
    said = {word for block in blocks(page.read_text("utf-8")) for word in block.said}
    directory = tmp_path / "page"
    directory.mkdir()
    for name in ("configs", "deploy", "builder"):
        shutil.copytree(REPOSITORY / name, directory / name)
    typed = "\n".join(command for block in to_run(page) for command, _ in block.commands())
    if re.search(r"(?<![\w/-])engine(\.tar)?(?![\w-])", typed):
        (directory / "engine.tar").symlink_to(request.getfixturevalue("engine_tar"))
        (directory / "engine").symlink_to(request.getfixturevalue("engine_dir"))
    if "build configs/" in typed:  # spares the steps that the tests' own build has done
        (directory / ".work").mkdir()
        done: Path = request.getfixturevalue("engine_tar")
        (directory / ".work" / "build").symlink_to(done.with_name("build"))
    if "adapters" in typed:
        adapter(directory / "adapters" / "sql", rank=2)
    with ExitStack() as opened:
        servers = {
            word: request.getfixturevalue(fixture)
            for word, fixture in (("mock", "mock_stack"), ("demo", "stack"))
            if word in said
        }
        registry = ""
        if "registry" in said:
            started = opened.enter_context(
                local_registry.running(tmp_path_factory.mktemp("registry"))
            )
            registry = started.address.rpartition(":")[2]
        yield Shell(directory, servers, registry)


def to_run(page: Path) -> list[Block]:
    """Blocks of a page that are run."""
    return [block for block in blocks(page.read_text("utf-8")) if block.mark == "run"]


def name(page: Path) -> str:
    """A page's name."""
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_has_a_mark_with_its_reason(page: Path) -> None:
    lacking = []
    for block in blocks(page.read_text("utf-8")):
        reason = block.mark == "run" or bool(block.said[0])
        if not block.mark or not reason or (block.mark == "run" and not set(block.said) <= known()):
            lacking.append(f"line {block.line}: {block.text.splitlines()[0]}")
    assert lacking == []


def known() -> set[str]:
    """Words of a mark of a block that is run."""
    return {"", "mock", "demo", "registry", *(f"exit {code}" for code in range(1, 4))}


@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)], ids=name)
def test_blocks_do_what_they_show(page: Path, shell: Shell) -> None:
    for block in blocks(page.read_text("utf-8")):
        if block.mark == "file":
            path = shell.directory / block.said[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, "utf-8")
        elif block.mark == "run":
            shell.run(block)


@pytest.mark.parametrize(
    ("line", "printed", "shown"),
    [
        ('{"id":"x","status":"ok"}', '{"status": "no", "id": 1}', True),
        ('{"id":"x","state":"ok"}', '{"status": "no", "id": 1}', False),
        ("[push] sent 153 MB of 153 MB", "[push] sent 151 MB of 3 MB", True),
        ("ran .../uv venv", "runs /bin/uv venv", False),
    ],
)
def test_output_is_compared_loosely(line: str, printed: str, shown: bool) -> None:
    assert is_shown(line, printed) is shown


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("$ true\n$ echo 12 words here\n34 words", None),
        ("$ echo one\ntwo", "not in"),
        ("$ false\n$ true", "exit code 1"),
    ],
)
def test_a_block_fails_with_its_commands_and_its_output(
    text: str, failure: str | None, tmp_path: Path
) -> None:
    (tmp_path / "page").mkdir()
    shell = Shell(tmp_path / "page", {}, "")
    block = Block(1, "console", text, "run", ("",))
    if failure is None:
        shell.run(block)
    else:
        with pytest.raises(AssertionError, match=failure):
            shell.run(block)
