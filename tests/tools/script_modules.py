"""Modules for tests of scripts that are beside one another and in no package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@contextmanager
def imported(places: Sequence[str], names: Sequence[str]) -> Iterator[SimpleNamespace]:
    """Modules of these names, from folders of the repository, the last of which is searched first.

    What was imported from these folders is forgotten at the end: others have the same names.
    """
    before = set(sys.modules)
    folders = [ROOT / place for place in places]
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(str(folder))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).parent in folders:
            del sys.modules[name]
