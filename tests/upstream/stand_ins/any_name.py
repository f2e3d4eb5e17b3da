"""Names of compiled modules that Python code mentions and, up to the compile, does not use."""

from __future__ import annotations

import types
from typing import Any


class AnyName(type):
    """Type of classes that have every attribute asked for, each a class of its own.

    They can be inherited from, compared, hashed, made and combined in annotations. What is made of
    them has no attributes: nothing pretends to compute.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{cls.__qualname__}.{name}")
        made = any_name(f"{cls.__qualname__}.{name}", cls.__module__)
        setattr(cls, name, made)
        return made

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def any_name(name: str, module: str) -> AnyName:
    """A class called `name` that has every attribute."""
    body = {"__module__": module, "__qualname__": name, "__init__": _made_of_anything}
    return AnyName(name.rpartition(".")[2], (), body)


def _made_of_anything(self: Any, *_: Any, **__: Any) -> None:
    """Take and drop the arguments."""


class AnyModule(types.ModuleType):
    """A module, and package, that has every name."""

    __version__ = "99"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__}.{name}")
        made = any_name(name, self.__name__)
        setattr(self, name, made)
        return made
