"""Choices of kernels that torch has made, found where a compiled model lies now.

Inductor measures reductions in several configurations, and keeps the fastest one's name beside the
kernel's source. A compiled model knows that place by the path it was compiled at (torch 2.14,
``CachingAutotuner.filename``): elsewhere the choice is made anew, by a measurement that may end
otherwise, and written to a path that is another user's or cannot be made, which ends EngineCore.
"""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
MOVED = "COG_TRITON_COMPILED_ELSEWHERE"
"""Variable of EngineCore and its workers: what they load was compiled at another path."""
_PARAMETERS = ["inductor_meta", "filename", "configs_hash"]


def install() -> None:
    """Have torch look below its cache directory of now; does nothing where nothing has moved.

    Raises no error: a torch that does this in another way chooses anew, which is a warning.
    """
    if not os.environ.get(MOVED):
        return
    try:
        from torch._inductor.runtime.autotune_cache import AutotuneCache
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        create: Any = AutotuneCache.create
        if (takes := list(inspect.signature(create).parameters)) != _PARAMETERS:
            raise AttributeError(f"AutotuneCache.create takes {takes}")
    except (ImportError, AttributeError, ValueError) as error:
        _log.warning("torch chooses among a sealed engine's kernels anew: %s", error)
        return

    def created(inductor_meta: Any, filename: str, configs_hash: str) -> Any:
        return create(inductor_meta, here(filename, cache_dir()), configs_hash)

    AutotuneCache.create = staticmethod(created)


def here(filename: str, root: str) -> str:
    """The path below `root` of a kernel's source: its last directory, and its name."""
    if filename.startswith(root + os.sep):
        return filename
    return str(Path(root, *Path(filename).parts[-2:]))
