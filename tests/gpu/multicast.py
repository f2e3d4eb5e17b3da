"""NVLink multicast: kept off in everything that runs on several GPUs, and shown to be."""

from __future__ import annotations

from pathlib import Path

from servers import Server

# A program that uses it can put the GPUs of a host out of service, which others may share.
OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}
_ENGINES = ("vLLM worker", "vLLM EngineCore", "our host of AsyncLLM", "vLLM DP coordinator")


def left_on(server: Server) -> list[str]:
    """Processes of `server`'s engines whose environment does not have it off."""
    found = []
    for pid, role in server.processes().items():
        if role in _ENGINES:
            try:
                content = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
            except OSError:
                continue
            given = dict(pair.split("=", 1) for pair in content.split("\0") if "=" in pair)
            wrong = [name for name, value in OFF.items() if given.get(name) != value]
            found += [f"{role} {pid}: {', '.join(wrong)}"] if wrong else []
    return found
