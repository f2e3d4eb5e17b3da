"""Double of vllm/compilation/decorators.py, and of what a start leaves in its caches.

The layout, the hash and the order are vLLM's: a compiled model by its hash, a pickle for each rank,
which is loaded if it is there, and Triton's kernels, by absolute paths. Each compilation is a line
of the journal; what takes vLLM seconds takes none.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import pickle
import platform
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import vllm
from cog_triton.system.gpus import gpu_names

logger = logging.getLogger(__name__)
_IGNORED = ("CACHE_ROOT", "FORCE_AOT_LOAD", "ENABLE_STARTUP_PLAN", "NO_USAGE_STATS")
_IGNORED += ("WORKER_MULTIPROC_METHOD", "DOUBLE_")
# Arguments that vLLM computes no hash of.
_PLACES = ("gpu_memory_utilization", "tokenizer", "served_model_name", "seed")
_KERNELS = ("fused_kernel", "rope_kernel")


def compile_engine(vllm_config: Any) -> None:
    """What the first forward pass of each rank does: load what is there, else compile."""
    if not (root := os.environ.get("VLLM_CACHE_ROOT")):
        return
    arguments = vllm_config.engine_args
    ranks = (arguments.tensor_parallel_size or 1) * (arguments.pipeline_parallel_size or 1)
    hash_key = _hash(arguments)
    cache_dir = Path(root, "torch_compile_cache", "torch_aot_compile", hash_key)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_dir / "inductor_cache")
    (cache_dir / "inductor_cache").mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        path = cache_dir / f"rank_{rank}_0" / "model"
        if _try_load_aot_compiled_fn(hash_key, str(path)) is None:
            _journal("aot", f"{hash_key}/rank_{rank}_0")
            _wait()
            path.parent.mkdir(exist_ok=True)
            made = {**_system(), "hash": hash_key, "rank": rank, **_reduction()}
            _replace(path, pickle.dumps(made))
    for name in _KERNELS:
        _kernel(name)
    for library in sorted(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.so")):
        ctypes.CDLL(str(library))  # Triton's C launchers, which no group names
        _journal("read", str(library))
    _remember(Path(root), hash_key)


def _try_load_aot_compiled_fn(model: Any, aot_compilation_path: str) -> Any:
    """Unpickle what is there; all checks come after that, as in vLLM."""
    try:
        with Path(aot_compilation_path).open("rb") as f:
            loaded = pickle.load(f)
        for name, value in {**_system(), "hash": model}.items():
            if loaded[name] != value:
                raise RuntimeError(f"{name} is {value}, the artifact has {loaded[name]}")
        if "source" in loaded:
            _tune(loaded["source"])
    except Exception as e:
        if os.environ.get("VLLM_FORCE_AOT_LOAD") == "1":
            raise
        if Path(aot_compilation_path).exists():
            logger.warning(
                "Compiling model again due to a load failure from %s, reason: %s",
                aot_compilation_path,
                str(e),
            )
        return None
    logger.info("Directly load AOT compilation from path %s", aot_compilation_path)
    return loaded


def _reduction() -> dict[str, str]:
    """A kernel of several configurations, if it is asked for: its path, as torch keeps it."""
    if os.environ.get("VLLM_DOUBLE_REDUCES") != "1":
        return {}
    source = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "ab", "cab.py")
    _replace(source, b"# a kernel")
    _tune(str(source))
    return {"source": str(source)}


def _tune(filename: str) -> None:
    """The fastest of a kernel's configurations: as it was found, or found by measurement."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache  # images have no double of it

    cache = AutotuneCache.create({}, filename, "")
    if cache is not None and cache.read_best({}, [32, 64]) is None:
        _journal("tuned", filename)
        cache.save(64, 1)


def _hash(arguments: Any) -> str:
    """In vLLM the variables, the configuration, the GPU's name and the model's class."""
    given = {f.name: getattr(arguments, f.name) for f in fields(arguments)}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("VLLM_") and not name.startswith(tuple(f"VLLM_{i}" for i in _IGNORED))
    }
    factors = [
        sorted(environment.items()),
        sorted((name, repr(value)) for name, value in given.items() if name not in _PLACES),
        json.loads((Path(arguments.model) / "config.json").read_text()),
        sorted(set(gpu_names())),
        vllm.__version__,
    ]
    return hashlib.sha256(str(factors).encode()).hexdigest()


def _system() -> dict[str, Any]:
    return {"python": platform.python_version(), "gpu": sorted(set(gpu_names()))}


def _kernel(name: str) -> None:
    """Triton's cache: a group of files, each by its absolute path."""
    root = Path(os.environ["TRITON_CACHE_DIR"])
    directory = root / hashlib.sha256(name.encode()).hexdigest()[:52].upper()
    group = directory / f"__grp__{name}.json"
    try:
        children = json.loads(group.read_text())["child_paths"].values()
    except (OSError, ValueError, KeyError):
        children = []
    if children and all(Path(child).exists() for child in children):
        for child in children:
            _journal("read", child)
        return
    _journal("kernel", name)
    directory.mkdir(parents=True, exist_ok=True)
    files = {f"{name}.cubin": b"\x7fELF " + name.encode(), f"{name}.json": b"{}"}
    for file, content in files.items():
        _replace(directory / file, content)
    paths = {file: str(directory / file) for file in files}
    _replace(group, json.dumps({"child_paths": paths}).encode())
    (directory / "lock").touch()


def _remember(root: Path, hash_key: str) -> None:
    """The start-up plan, where it is asked for, and what is known of the model's class."""
    model = root / "modelinfos" / "vllm-model_executor-models-llama-LlamaForCausalLM.json"
    _replace(model, json.dumps({"hash": "0", "modelinfo": {}}).encode())
    if os.environ.get("VLLM_ENABLE_STARTUP_PLAN") == "1":
        fingerprint = hash_key[:16]
        plan = root / "startup_plan" / f"startup_plan_{fingerprint}.json"
        value = {"schema": 1, "fingerprint": fingerprint, "kv_cache_memory_bytes": 1 << 30}
        if not plan.exists():
            _journal("measured", fingerprint)
            _replace(plan, json.dumps({**value, "free_memory_baseline": 1 << 31}).encode())


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    fresh.write_bytes(content)
    fresh.replace(path)


def _wait() -> None:
    hold = os.environ.get("VLLM_DOUBLE_COMPILING")
    while hold and Path(hold).exists():
        time.sleep(0.01)


def _journal(what: str, name: str) -> None:
    if path := os.environ.get("VLLM_DOUBLE_JOURNAL"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"call": "compile", "what": what, "name": name}) + "\n")
