"""Which command runs which tests: `make test` has all but those marked `full` or `nightly`."""

from typing import Any

import pytest


def full(*values: object) -> Any:
    """A case that `make test-all` runs, beside others of `make test`."""
    return pytest.param(*values, marks=pytest.mark.full)
