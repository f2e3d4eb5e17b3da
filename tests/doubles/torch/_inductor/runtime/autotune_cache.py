"""Double of torch/_inductor/runtime/autotune_cache.py: which of several kernels was the fastest.

That is kept beside the kernel's source, by the path it had when it was compiled, and as in torch
only a file that is missing is none: one that may not be read raises.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class AutotuneCache:
    """The choice of one kernel."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @staticmethod
    def create(
        inductor_meta: dict[str, Any], filename: str, configs_hash: str
    ) -> AutotuneCache | None:
        return AutotuneCache(Path(filename).with_suffix(".best_config"))

    def read_best(self, inductor_meta: dict[str, Any], configs: list[Any]) -> Any:
        try:
            return json.loads(self._path.read_text())
        except FileNotFoundError:
            return None

    def save(self, config: Any, time_taken_ns: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(config))
