"""Start-up of an image's entry point: seconds to READY and to the first token."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from client import Client
from results import Phase
from servers import running

if TYPE_CHECKING:
    from verify_image import ImageDriver

_NO_BYTECODE = {"PYTHONPYCACHEPREFIX": "/tmp/none", "PYTHONDONTWRITEBYTECODE": "1"}


def measure(driver: ImageDriver, phase: Phase) -> None:
    """Start the small model with empty caches, with what that left, and without bytecode."""
    shared = driver.root / "start-cache"
    shutil.rmtree(shared, ignore_errors=True)
    image = replace(driver.image, shared=shared)
    for name, environment in (("first", {}), ("again", {}), ("without bytecode", _NO_BYTECODE)):
        if time.monotonic() > driver.until:
            break
        place = f"start-{name.replace(' ', '-')}"
        values = {**driver.environment, **environment}
        server = image.ours(place, driver.small, driver.logs, **values)
        with running(server):
            began = time.monotonic()
            with Client(server).stream("Once upon a time", max_tokens=4) as events:
                next(data for event, data in events if event == "output")
            first_token_s = round(server.start_s + time.monotonic() - began, 2)
            told = {"ready_s": server.start_s, "first_token_s": first_token_s}
            phase.put(name, {**told, **server.start_times()})
        phase.check(f"{name}: it answers", True)
