"""What all tests need of the process that they run in."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Examples of a property, unless it says how many times as many; --hypothesis-profile nightly.
settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("nightly", max_examples=200, deadline=None)
settings.load_profile("quick")

# What a shell starts in the background ignores Ctrl-C, and what nohup starts a hang-up; and so
# would all that tests start.
for number, default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)


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
