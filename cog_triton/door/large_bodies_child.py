"""Child process of the front door that parses large bodies: `ipc.child` around a call."""

from __future__ import annotations

import json
import sys

from cog_triton.door.message import Refused
from cog_triton.errors import CogTritonError
from cog_triton.ipc import child
from cog_triton.ipc.messages import decode_call, encode_result

RETURNED = b"R"
RAISED = b"E"


def call(request: memoryview) -> tuple[bytes, bytes]:
    """The result of a call, or the error it raised, and the HTTP status that it is refused with."""
    function, arguments = decode_call(bytes(request))
    try:
        return RETURNED, encode_result(function, function(*arguments))
    except Refused as error:
        raised = [error.status, str(error.error)]
    except CogTritonError as error:
        raised = [None, str(error)]
    except Exception as error:  # noqa: BLE001 - raised in the front door
        raised = [None, f"{type(error).__name__}: {error}"]
    return RAISED, json.dumps(raised).encode()


if __name__ == "__main__":
    child.serve(int(sys.argv[1]), call)
