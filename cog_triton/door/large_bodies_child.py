"""Child process of the front door that parses large bodies: `ipc.child` around a call."""

from __future__ import annotations

import pickle
import sys

from cog_triton.ipc import child

RETURNED = b"R"
RAISED = b"E"


def call(request: memoryview) -> tuple[bytes, bytes]:
    """The result of a pickled function and its arguments, or what it raised."""
    function, arguments = pickle.loads(request)
    try:
        return RETURNED, pickle.dumps(function(*arguments), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - raised in the front door
        return RAISED, pickle.dumps(error)


if __name__ == "__main__":
    child.serve(int(sys.argv[1]), call)
