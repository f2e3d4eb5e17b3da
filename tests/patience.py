"""How long tests wait for what does come: on a busy machine it is late, and late is not wrong."""

from __future__ import annotations

import httpx

HTTP_S = 60.0


def make_httpx_patient() -> None:
    """Give each request `HTTP_S`, unless it says how long: httpx gives 5 s.

    All functions and clients of httpx have one object as their default.
    """
    for default in (httpx.get, httpx.Client.__init__, httpx.AsyncClient.__init__):
        timeout = (default.__kwdefaults__ or {})["timeout"]
        timeout.connect = timeout.read = timeout.write = timeout.pool = HTTP_S
