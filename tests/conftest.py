"""What all tests need of the process that they run in."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest
from hypothesis import settings
from stack import STARTS

# Examples of a property, unless it says how many times as many; make test-all has
# --hypothesis-profile all.
settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("all", max_examples=100, deadline=None)
settings.register_profile("nightly", max_examples=200, deadline=None)
settings.load_profile("quick")

patience.make_httpx_patient()

# What a shell starts in the background ignores Ctrl-C, and what nohup starts a hang-up; and so
# would all that tests start.
for number, default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)


LONGEST_ID = 100
"""Characters of a text in a test's id."""


def pytest_make_parametrize_id(val: object) -> str | None:
    """Cut a long text, whose test would have an id of megabytes; pytest 9.2 does so itself."""
    if isinstance(val, str | bytes) and len(val) > LONGEST_ID:
        text = val if isinstance(val, str) else val.decode("latin-1")
        return f"{text[:LONGEST_ID].encode('unicode_escape').decode()}..."
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--taken-up", type=int, default=20, help="streams that are broken off")
    parser.addoption("--most-starts", type=int, help="fail if tests start more servers")


SMALL = frozenset({"leaks_fail_the_file_that_leaks"})
"""Fixtures of a module that start nothing."""
COMPUTING = frozenset({"unit", "process"})
"""Folders whose tests do not wait for servers."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group what one worker runs: a file, or a test that shares nothing and waits.

    The groups that wait are spread among those that compute.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
        own = [found[-1] for name, found in fixtures.items() if name not in SMALL]
        if mark := item.get_closest_marker("xdist_group"):
            name = mark.args[0]
        elif item.path.parent.name not in COMPUTING and all(one.scope != "module" for one in own):
            name = item.nodeid
        else:
            name = item.path.stem
            item.add_marker(pytest.mark.xdist_group(name))
        groups.setdefault(name, []).append(item)
    places: dict[bool, list[str]] = {True: [], False: []}
    for name, group in groups.items():
        places[group[0].path.parent.name not in COMPUTING].append(name)
    order = {
        name: (number + waits / 2) / len(names)
        for waits, names in places.items()
        for number, name in enumerate(names)
    }
    items[:] = [item for name in sorted(groups, key=order.__getitem__) for item in groups[name]]


def pytest_configure(config: pytest.Config) -> None:
    """Have all workers count the servers that they start in one file."""
    if not hasattr(config, "workerinput"):
        place = Path(tempfile.mkdtemp(prefix="cog-triton-tests-"))
        config.add_cleanup(lambda: shutil.rmtree(place))
        os.environ[STARTS] = str(place / "starts")


def starts() -> int:
    """How many servers the tests have started."""
    file = Path(os.environ[STARTS])
    return len(file.read_text().splitlines()) if file.exists() else 0


def pytest_sessionfinish(session: pytest.Session) -> None:
    most = session.config.getoption("most_starts")
    if most is not None and starts() > most and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    most = config.getoption("most_starts")
    terminalreporter.write_line(f"{starts()} servers were started")
    if most is not None and starts() > most:
        terminalreporter.write_line(
            f"more than {most}, the most in make test: have a test use a server of"
            " tests/engine_fixtures.py, or mark it `full`, for make test-all",
            red=True,
        )


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spare each collection below what the imports made: most of the objects that there are."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def leaks_fail_the_file_that_leaks() -> Iterator[None]:
    """Find what a file's tests left unclosed in that file, and not during any later test."""
    yield
    gc.collect()
