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
# Others have no GPU; that of chat templates has no environment either.
_ENGINES = (
    "container", "vLLM worker", "vLLM EngineCore", "vLLM DP coordinator", "vLLM API server",
    "vllm serve", "our host of AsyncLLM",
)  # fmt: skip


def left_on(server: Server) -> list[str]:
    """Processes of `server` that do not have it off, or that none of them can be asked.

    A process that has a title of its own, as vLLM's have, has written that over its environment;
    what started it has the same one.
    """
    wrong, asked = [], 0
    for pid, role in server.processes().items():
        if role not in _ENGINES:
            continue
        if given := _told(pid) if role == "container" else _environment(pid):
            asked += 1
            # A title covers variables, from the first on: what is left of them must be right.
            over = set() if role == "container" or not _titled(pid) else OFF.keys() - given.keys()
            names = [name for name in OFF if name not in over and given.get(name) != OFF[name]]
            wrong += [f"{role} {pid}: {', '.join(names)}"] if names else []
    return wrong if asked else ["no process says"]


def _environment(pid: int) -> dict[str, str]:
    return _pairs(_read(pid, "environ"))


def _titled(pid: int) -> bool:
    return any(word.startswith("VLLM::") for word in _read(pid, "cmdline"))


def _told(pid: int) -> dict[str, str]:
    """What a container's command line gives to all in it; its own environment is another."""
    words = [word for word in _read(pid, "cmdline") if word.startswith("--env=")]
    return _pairs([word.removeprefix("--env=") for word in words])


def _pairs(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if "=" in word)


def _read(pid: int, name: str) -> list[str]:
    try:
        content = Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return []
    return content.decode("utf-8", "replace").split("\0")
