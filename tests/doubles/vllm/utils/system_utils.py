"""Double of vllm/utils/system_utils.py."""

import multiprocessing
import os
from typing import Any


def get_mp_context() -> Any:
    return multiprocessing.get_context(os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork"))
