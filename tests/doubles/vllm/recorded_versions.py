"""Marks on what only one of the recorded versions has; vLLM has no such module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import vllm

IS_0_26 = vllm.__version__.startswith("0.26.")
Class = TypeVar("Class", bound=type)


def only(has_them: bool, *names: str) -> Callable[[Class], Class]:
    """Leave these fields out of a class that is about to become a dataclass."""

    def decorate(cls: Class) -> Class:
        for name in () if has_them else names:
            cls.__annotations__.pop(name)
            if name in cls.__dict__:
                delattr(cls, name)
        return cls

    return decorate


def since_0_33(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Leave these parameters out of a function of 0.26."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not IS_0_26:
            return function
        signature = inspect.signature(function)
        left = [value for name, value in signature.parameters.items() if name not in names]
        signature = signature.replace(parameters=left)

        @functools.wraps(function)
        def old(*args: Any, **keywords: Any) -> Any:
            signature.bind(*args, **keywords)
            return function(*args, **keywords)

        old.__signature__ = signature  # type: ignore[attr-defined]
        return old

    return decorate
