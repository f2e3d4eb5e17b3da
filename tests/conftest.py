"""What all tests need of the process that they run in."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import patience
import pytest
from hypothesis import settings

# Examples of a property, unless it says how many times as many; --hypothesis-profile nightly.
settings.register_profile("quick", max_examples=20, deadline=None)
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
