"""Calls of functions in a child process: arguments and results cross as annotations tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cog_triton.errors import CogTritonError, from_text
from cog_triton.ipc import child
from cog_triton.ipc.child import PythonChild
from cog_triton.ipc.framing import MAX_FRAME
from cog_triton.ipc.messages import decode_call, decode_result, encode_call, encode_result

_RETURNED, _RAISED = b"R", b"E"


def call(where: PythonChild, function: Callable[..., Any], *arguments: object) -> Any:
    """The result of a module's function there; raises the coded error that it raises.

    OSError if the child has ended, does not answer in time or answers what can be no result;
    RuntimeError for another error of the function's.
    """
    where.send(encode_call(function, arguments))
    kind, data = where.receive(MAX_FRAME - 1)
    if kind == _RAISED:
        text = str(data, "utf-8", "replace")
        raise from_text(text) or RuntimeError(text)
    return decode_result(function, data)


def serve(descriptor: int) -> None:
    """Carry out calls in the child, until the parent hangs up."""
    child.serve(descriptor, _called)


def _called(request: memoryview) -> tuple[bytes, bytes]:
    function, arguments = decode_call(request)
    try:
        return _RETURNED, encode_result(function, function(*arguments))
    except CogTritonError as error:
        raised = str(error)
    except Exception as error:  # noqa: BLE001 - raised in the parent
        raised = f"{type(error).__name__}: {error}"
    return _RAISED, raised.encode("utf-8", "replace")
