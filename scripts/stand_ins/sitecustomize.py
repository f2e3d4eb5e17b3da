"""Empty stand-ins for all modules but Python's own, so that a script comes as far as its parser.

Python imports this at start-up if its directory is on PYTHONPATH; `scripts/read-options` says in
STAND_INS, as JSON, what it knows of them. A stand-in can be imported, called, subscripted and
inherited from. Where it would have to be something, as a default or a choice, it raises instead.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

_KNOWN = json.loads(os.environ["STAND_INS"])
_VALUES: dict[str, Any] = _KNOWN["values"]
_MODULES: dict[str, str] = _KNOWN["modules"]
_REAL = re.compile("|".join([*sys.stdlib_module_names, *_KNOWN["real"], "_sysconfigdata.*"]))
# Opened now: the shim's guard lets no script open such a file.
_USED = Path(_KNOWN["used"]).open("a", encoding="utf-8")  # noqa: SIM115


class StandInError(RuntimeError):
    """The script needs to know what something is that only has a stand-in."""


def _attribute(owner: str, name: str) -> Any:
    full = f"{owner}.{name}"
    if full in _VALUES:
        _USED.write(full + "\n")
        _USED.flush()
        return _VALUES[full]
    if name == "__version__":
        return "0"
    if name == "__qualname__":
        raise StandInError(f"{owner} converts an option: it has to be known")
    if name.startswith("__"):
        raise AttributeError(full)
    return StandIn(full)


class StandIn:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return _attribute(self._name, name)

    def __call__(self, *args: Any, **kwargs: Any) -> StandIn:
        given = (*args, *kwargs.values())
        if any(isinstance(value, argparse._ActionsContainer) for value in given):
            raise StandInError(f"{self._name} may add options: its module has to be known")
        return StandIn(f"{self._name}()")

    def __getitem__(self, key: Any) -> StandIn:
        return StandIn(f"{self._name}[]")

    def __iter__(self) -> Iterator[StandIn]:
        return iter([StandIn(f"{self._name}[]")])

    def __len__(self) -> int:
        return 1

    def __or__(self, other: Any) -> StandIn:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def _refuse(self, *_: Any) -> NoReturn:
        raise StandInError(f"{self._name} decides about options: its value has to be known")

    __bool__ = __contains__ = __float__ = __format__ = __index__ = __int__ = _refuse
    __repr__ = __str__ = _refuse


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _attribute(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _MODULES:
            _USED.write(fullname + "\n")
            _USED.flush()
            file = _MODULES[fullname]
            places = [str(Path(file).parent)] if Path(file).name == "__init__.py" else None
            return importlib.util.spec_from_file_location(
                fullname, file, submodule_search_locations=places
            )
        top = fullname.partition(".")[0]
        # A script's neighbours are read with it.
        beside = Path(sys.path[0], top)
        if _REAL.fullmatch(top) or beside.is_dir() or beside.with_suffix(".py").is_file():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
