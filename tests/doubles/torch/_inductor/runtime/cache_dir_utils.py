"""Double of torch/_inductor/runtime/cache_dir_utils.py."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> str:
    directory = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    return str(directory)
