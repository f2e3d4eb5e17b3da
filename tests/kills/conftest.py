from collections.abc import Callable

import clean_environment
import pytest
from engine_fixtures import (
    MockText,
    engine_dir,
    engine_tar,
    make_stack,
    mock_text,
    new_stack,
    stack,
)

__all__ = ["engine_dir", "engine_tar", "make_stack", "mock_text", "new_stack", "stack"]
clean_environment.clean()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what kills or stops a server's processes: `pytest -m kills` runs these."""
    for item in items:
        if item.path.parent.name == "kills":
            item.add_marker("kills")


@pytest.fixture(scope="session")
def says(mock_text: MockText) -> Callable[[int], str]:
    """What the mock says in so many tokens, without a character that is not complete."""
    return lambda count: mock_text(count).rstrip("\N{REPLACEMENT CHARACTER}")
