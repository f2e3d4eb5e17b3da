"""Builds at once in one work directory: they wait where they must, and else run beside another."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from sample_builds import BUILD, CONVERT, build_engine, config_of

from cog_triton.builder.script_options import MODEL
from cog_triton.builder.workspace import Workspace
from cog_triton.errors import InvalidArgument

# The convert step says that it runs, and waits for the test to let it go on.
HELD = """
import pathlib, time
pathlib.Path("../../../running").touch()
while not pathlib.Path("../../../go").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    family = tmp_path / "examples" / "fake"
    family.mkdir(parents=True)
    (family / "convert.py").write_text(HELD + CONVERT.replace("MODEL", repr(MODEL)))
    (family / "build.py").write_text(BUILD)
    return family.parent


class Builds:
    """Builds in threads; the convert step of the first one is held until `release`."""

    def __init__(self, root: Path, examples: Path) -> None:
        self.root, self.examples = root, examples
        self.workspace = Workspace(root / "work")
        self.threads = ThreadPoolExecutor(2)

    def start(self, name: str, until: str, **changes: object) -> Future[list[str]]:
        """Start a build, and return once it has printed a line that begins with `until`."""
        seen, lines = threading.Event(), list[str]()

        def echo(line: str) -> None:
            lines.append(line)
            if line.startswith(until):
                seen.set()

        def build() -> list[str]:
            config, output = config_of(self.root, **changes), self.root / name
            build_engine(config, self.workspace, output, self.examples, echo)
            return lines

        future = self.threads.submit(build)
        future.add_done_callback(lambda _: seen.set())
        assert seen.wait(60), lines
        return future

    def release(self) -> None:
        (self.root / "go").touch()

    @property
    def runs(self) -> str:
        return (self.root / "runs").read_text()


@pytest.fixture
def builds(tmp_path: Path, examples: Path):
    made = Builds(tmp_path, examples)
    yield made
    made.release()
    made.threads.shutdown()


def test_second_build_of_a_config_waits_and_goes_on(builds: Builds) -> None:
    first = builds.start("one.tar", "[model]")
    while not (builds.root / "running").exists():
        assert not first.done()
    second = builds.start("two.tar", "[convert]")
    assert not second.done()
    with pytest.raises(InvalidArgument, match="a build is running"):
        builds.workspace.clean()
    builds.release()
    first.result(60)
    said = second.result(60)
    assert said[0].startswith("[check]")
    wait = "[convert] another build is running the same step: waiting for its output"
    assert wait in said
    assert "[convert] already done by another build" in said
    assert builds.runs == "convert build "
    assert (builds.root / "one.tar").read_bytes() == (builds.root / "two.tar").read_bytes()


def test_builds_of_two_configs_run_their_common_step_once(builds: Builds) -> None:
    more = {"script": "build.py", "output_dir": "engine", "args": {"more": None}}
    first = builds.start("one.tar", "[model]")
    while not (builds.root / "running").exists():
        assert not first.done()
    second = builds.start("two.tar", "[convert]", build=more)
    assert not second.done()
    builds.release()
    first.result(60)
    said = second.result(60)
    assert "[convert] already done by another build" in said
    assert sorted(builds.runs.split()) == ["build", "build", "convert"]
