"""Run operations on the GPU and print, as JSON, the SHA-256 of each result or its error.

    python workload.py GROUP,... [DIRECTORY OF vllm]

A group is "torch" or the name of one of vLLM's libraries.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch_operations
import vllm_operations


def main(groups: list[str], vllm: str | None = None) -> None:
    """Print {"libraries": [paths loaded], "results": {group: {operation: digest or error}}}."""
    # What these warn of is not what is tested here.
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    if vllm:
        vllm_operations.load(Path(vllm))
    known = {"torch": torch_operations.OPERATIONS, **vllm_operations.OPERATIONS}
    results = {
        group: {name: attempt(operation) for name, operation in known[group].items()}
        for group in groups
    }
    print(json.dumps({"libraries": sorted(libraries()), "results": results}))


def attempt(operation: torch_operations.Operation) -> str:
    """The digest of what `operation` returns, bit for bit; "error: ..." if it fails."""
    try:
        digest = hashlib.sha256()
        for tensor in tensors(operation(torch_operations.Inputs(2026))):
            plain = tensor.detach().cpu().contiguous()
            digest.update(f"{plain.dtype} {tuple(plain.shape)} ".encode())
            digest.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
        torch.cuda.synchronize()
        return digest.hexdigest()
    # Whatever goes wrong is this operation's result.
    except Exception as error:  # noqa: BLE001
        return f"error: {type(error).__name__}: {str(error).splitlines()[0][:160]}"


def tensors(result: Any) -> Iterable[torch.Tensor]:
    """All tensors in what an operation returned."""
    if isinstance(result, torch.Tensor):
        yield result
    else:
        for part in result:
            yield from tensors(part)


def libraries() -> set[str]:
    """Paths of the shared objects in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if ".so" in line}


if __name__ == "__main__":
    main(sys.argv[1].split(","), *sys.argv[2:])
