"""Servers of the GPU tests: ``cog-triton serve`` of vLLM, or of its double in a rehearsal."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import vllm_engines
from stack import REPOSITORY, Stack, wait_until
from vllm_engines import double_environment

from cog_triton.engines import tensor_contract
from cog_triton.engines.request import EngineRequest
from cog_triton.system import reaper

WORK = REPOSITORY / ".work" / "gpu"
"""Models, and what vLLM compiles, for later runs, too."""
START_S = 400
PATIENCE_S = 180.0
_GB = 1_000_000_000
# A program that uses NVLink multicast can put the GPUs of a host out of service, for others, too.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled when it is used first
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    **NO_MULTICAST,
}
"""Of every process that the GPU tests start."""
_COMMON = {"max_model_len": 4096, "max_num_seqs": 512}
# vLLM chooses FlashInfer, which is compiled when it is used first.
_ATTENTION = {"attention_backend": "FLASH_ATTN"}


@dataclass(frozen=True)
class Card:
    """This machine's GPUs: how many, and the name, memory in bytes and SM number of the first.

    Without memory it is the double of vLLM that serves, in a rehearsal.
    """

    count: int
    name: str = "double"
    memory: int = 0
    sm: int = 90

    @property
    def rehearsal(self) -> bool:
        return not self.memory

    def arguments(self, weights_gb: float = 0.5, **more: Any) -> dict[str, Any]:
        """Engine arguments for a model whose weights take so much on each GPU.

        A server takes a sixteenth of the card for its KV cache, and what vLLM needs besides, so
        that several have room on one card of 80 GB.
        """
        if self.rehearsal:
            return {**_COMMON, **more}
        cache = self.memory // 16
        share = (weights_gb * _GB + cache + 3 * _GB) / self.memory
        used = {"gpu_memory_utilization": math.ceil(100 * share) / 100}
        return {**_COMMON, **_ATTENTION, **used, "kv_cache_memory_bytes": cache, **more}


def found_card() -> Card | None:
    """The machine's GPUs as nvidia-smi lists them; None if there are none."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run([*query, "--id=0"], capture_output=True, text=True, timeout=60)
        all_of_them = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, timeout=60)
    except OSError:
        return None
    match = re.fullmatch(r"(.+), (\d+) MiB, (\d+)\.(\d)\s*", done.stdout)
    if done.returncode or match is None:
        return None
    count = len(all_of_them.stdout.splitlines())
    return Card(count, match[1], int(match[2]) << 20, int(match[3] + match[4]))


class Server(Stack):
    """A server of one engine directory, asked by each of its APIs; its model's name is "model"."""

    def __init__(
        self,
        work: Path,
        engine: Path,
        card: Card,
        *,
        caches: Path | None = WORK / "vllm-cache",
        **environment: str,
    ) -> None:
        """`caches` has what vLLM compiles for all engines; without it each server has its own."""
        values = {
            "SERVED_MODEL_NAME": "model",
            "TRITON_START_TIMEOUT": str(START_S),
            "TRITON_MAX_RESTARTS": "50",
            **ENVIRONMENT,
        }
        if card.rehearsal:
            values |= double_environment()
        elif caches:
            values["VLLM_CACHE_ROOT"] = str(caches)
        super().__init__(work, str(engine), **values, **environment)
        self.engine = engine
        self._http = httpx.Client(timeout=PATIENCE_S)

    def until_ready(self) -> None:
        """Wait for it; fails with the ends of all logs, of its engine, too."""
        assert self.process is not None
        try:
            wait_until(
                lambda: "Ready in" in self.output or self.process.poll() is not None, START_S
            )
            assert self.process.poll() is None
        except AssertionError as error:
            raise AssertionError(f"{self.work_dir.name} did not start\n{self.tail()}") from error

    def close(self) -> None:
        """See `Stack.close`, which does not see a process that has a title for its variables."""
        self._http.close()
        left = reaper.descendants(self.process.pid) if self.process else ()
        super().close()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def logs(self) -> str:
        """All of its logs, those of Triton and of its engines, too."""
        return "\n".join(path.read_text("utf-8", "replace") for path in self._log_files())

    def tail(self, size: int = 5000) -> str:
        """The ends of its logs."""
        texts = (path.read_text("utf-8", "replace")[-size:] for path in self._log_files())
        return "\n".join(texts)

    def _log_files(self) -> list[Path]:
        return [self.log, *sorted(self.work_dir.glob("run/*/*.log"))]

    def post(self, path: str, **values: Any) -> dict[str, Any]:
        """The answer of a path on the OpenAI API's port, with its HTTP `status`."""
        response = self._http.post(f"{self.own}/{path}", json=values)
        return {**response.json(), "status": response.status_code}

    def ask(self, path: str, **values: Any) -> dict[str, Any]:
        """The answer of /v1/`path`, greedy unless asked otherwise, with its HTTP `status`."""
        return self.post(f"v1/{path}", **{"model": "model", "temperature": 0, **values})

    def choice(self, path: str, **values: Any) -> dict[str, Any]:
        """The first choice; fails with all of the answer if there is none."""
        answer = self.ask(path, **values)
        assert answer["status"] == 200, answer
        found: dict[str, Any] = answer["choices"][0]
        return found

    def complete(self, prompt: str, max_tokens: int = 16, **values: Any) -> str:
        """The text of a completion."""
        return str(
            self.choice("completions", prompt=prompt, max_tokens=max_tokens, **values)["text"]
        )

    def chat(self, content: Any, **values: Any) -> dict[str, Any]:
        """The message that answers one of a user."""
        messages = [{"role": "user", "content": content}]
        found: dict[str, Any] = self.choice("chat/completions", messages=messages, **values)
        return dict(found["message"])

    def ask_events(self, path: str, **values: Any) -> list[dict[str, Any]]:
        """The events of a stream of /v1/`path`."""
        body = {"model": "model", "temperature": 0, "stream": True, **values}
        with self._http.stream("POST", f"{self.own}/v1/{path}", json=body) as response:
            return list(_data(response))

    def triton_text(self, **values: Any) -> dict[str, Any]:
        """An answer of Triton's model vllm_model."""
        url = f"{self.triton}/v2/models/vllm_model/generate"
        answer: dict[str, Any] = self._http.post(url, json=values).json()
        return answer

    def triton_events(self, request: EngineRequest) -> list[dict[str, Any]]:
        """All events of Triton's model tensorrt_llm."""
        url = f"{self.triton}/v2/models/tensorrt_llm/generate_stream"
        body = tensor_contract.encode_request(replace(request, exclude_input_in_output=True))
        with self._http.stream("POST", url, json=body) as response:
            return list(_data(response))

    def triton_ids(self, request: EngineRequest) -> list[int]:
        """All token ids of Triton's model tensorrt_llm."""
        found: list[int] = []
        for event in self.triton_events(request):
            assert "error" not in event, event
            ids = event["output_ids"]
            found += ids if isinstance(ids, list) else [ids]
        return found

    def metric_values(self) -> dict[str, float]:
        """Metrics by name, without labels: the last value of each."""
        text = self._http.get(f"{self.own}/metrics").text
        lines = re.findall(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in lines}

    def roles(self) -> dict[int, str]:
        """Command lines of all processes that it started; vLLM's have titles for names."""
        assert self.process is not None
        found = {}
        for pid in reaper.descendants(self.process.pid):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            found[pid] = line.replace(b"\0", b" ").decode("utf-8", "replace")
        return found

    def victims(self) -> list[int]:
        """Processes whose death takes an engine, the innermost that there are, the eldest first.

        A worker of several GPUs, else EngineCore, else the process that has the double.
        """
        roles = self.roles()
        for word in ("VLLM::Worker", "EngineCore", "vllm.core_process", "engine_process"):
            pids = [p for p, line in roles.items() if word in line and "reaper.py" not in line]
            if pids:
                return sorted(pids, key=_began_key)
        raise AssertionError(f"no engine among {sorted(set(roles.values()))}\n{self.tail()}")


@contextmanager
def served(server: Server) -> Iterator[Server]:
    """The server, ready and without NVLink multicast; closed in the end."""
    with server.served():
        assert left_on(server) == []
        yield server


def left_on(server: Server) -> list[str]:
    """Processes that may use NVLink multicast.

    A process with a title, as vLLM's have, has written that over the first of its variables: those
    that are left must be right.
    """
    wrong = []
    for pid, line in server.roles().items():
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        given = dict(word.split("=", 1) for word in words if "=" in word)
        titled = line.startswith("VLLM::")
        if not titled and "engine" not in line:
            continue  # chat templates have no environment, and no other process has a GPU
        names = [
            name
            for name, off in NO_MULTICAST.items()
            if given.get(name, off if titled else None) != off
        ]
        wrong += [f"{line[:60]} ({pid}): {', '.join(names)}"] if names else []
    return wrong


def of_bytes(directory: Path) -> Path:
    """A model for rehearsals: the double's grammars know bytes only."""
    return vllm_engines.vllm_engine(directory, max_model_len=2048, max_num_seqs=1024)


def drawn(card: Card) -> dict[str, str]:
    """Variables with which the double draws tokens as it is asked to, and takes its time."""
    given = {"VLLM_DOUBLE_SAMPLES": "1", "VLLM_DOUBLE_DELAY": "0.01"}
    return given if card.rehearsal else {}


def environment_of(card: Card) -> Mapping[str, str]:
    """For programs besides servers."""
    return {**os.environ, **ENVIRONMENT, **(double_environment() if card.rehearsal else {})}


def _began_key(pid: int) -> int:
    """Start of a process, in ticks since the machine's."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _data(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])
