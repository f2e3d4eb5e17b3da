"""Where each second of a start goes: ours and ``vllm serve``, with empty caches and with full ones.

And ours of a sealed engine, which is built, and then started over empty caches.

Marks are lines of the servers' logs, stamped when they appear, since vLLM's own have whole seconds.
The large model's weights are a sparse file of zeros: reading that is reading the page cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import models
import prompts
from arguments import REPOSITORY
from endpoints import Endpoint
from killed_worker import Stream, run
from results import Phase
from sealed import Sealed, gpu_double
from servers import NotStarted, Server, ours, stopped_at_the_end, vllm_serve

if TYPE_CHECKING:
    from verify import Driver

BUDGETS, LEAST = {"start": 280}, {"start": 30}
_ARGUMENTS = {
    "max_num_seqs": 256,
    "max_model_len": 8192,
    "gpu_memory_utilization": 0.6,
    "attention_backend": "FLASH_ATTN",
}
# Seconds of a start with empty caches and of one with full ones, with its end (gpu-3 and before).
_PARTS = {
    "ours": (105, 55),
    "peer": (100, 48),
    "ours-small": (75, 45),
    "peer-small": (70, 40),
    "deterministic-small": (75,),
}
_SEALED = {"sealed-small": 150, "predicted-small": 150, "sealed": 300}
"""Seconds of a build, its proof, and a start of what it made."""
MARKS = {
    "process": r"engine process 1 starts",
    "imported": r"vLLM \S+ is imported",
    "configured": r"vLLM is configured",
    "core": r"Initializing a V1 LLM engine",
    "loaded": r"Model loading took",
    "compiled": r"Directly load AOT|torch\.compile took",
    "memory": r"GPU KV cache size",
    "captured": r"Graph capturing finished",
    "engine": r"init engine \(",
}
_TOLD = r"(EngineCore: imported in .*|[^\n]*tartup plan [^\n]*|read ahead: .*|Graph capturing .*)"
_POLL_S = 0.02
_STREAMS, _TEXTS, _INPUT, _TOKENS = 64, 16, 32, 256
_PATIENCE_S = 60.0
_LOGS = ("serve.log", "work/run/*/*.log")


class Marks(threading.Thread):
    """Seconds from a server's launch to the first line of each kind in its logs."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server, self._ended = server, threading.Event()
        self.seen: dict[str, float] = {}
        self.text = ""

    def run(self) -> None:
        read: dict[Path, int] = {}
        while not self._ended.wait(_POLL_S):
            self._look(read)
        self._look(read)

    def _look(self, read: dict[Path, int]) -> None:
        now = round(time.monotonic() - self._server.began, 2)
        place = self._server.log.parent
        for path in [path for pattern in _LOGS for path in place.glob(pattern)]:
            with path.open("rb") as file:
                file.seek(read.get(path, 0))
                lines = file.read().rpartition(b"\n")[0]
            read[path] = read.get(path, 0) + len(lines)
            text = lines.decode("utf-8", "replace")
            self.text += text
            for name, pattern in MARKS.items():
                if name not in self.seen and re.search(pattern, text):
                    self.seen[name] = now

    def end(self) -> None:
        """Look once more, and no longer."""
        self._ended.set()
        self.join()


class Starts:
    """The phase ``start`` of a `Driver`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def phases(self) -> dict[str, Callable[[Phase], None]]:
        """What each phase runs."""
        return {"start": self.start}

    def start(self, phase: Phase) -> None:
        """Start each server twice, over the same caches, which are empty the first time."""
        phase.put("layers", self._layers)
        for part in self._driver.options.parts or (*_PARTS, *_SEALED):
            if part in _SEALED:
                self._seal(phase, part)
            if part not in _PARTS:
                continue
            caches = self._driver.root / "start-caches" / part
            shutil.rmtree(caches, ignore_errors=True)
            for state, seconds in zip(("empty", "full"), _PARTS[part], strict=False):
                left = self._driver.until - time.monotonic()
                if left < seconds and not self._driver.rehearsal:
                    phase.add("not run", f"{part}, {state}: {left:.0f} s are left of {seconds}")
                    break
                try:
                    phase.add("starts", self._started(part, state, caches))
                except NotStarted as error:
                    phase.check(f"{part}, {state}: it starts", False, error)
                    break
        self._compare(phase)

    @property
    def _layers(self) -> int:
        return self._driver.options.layers or (1 if self._driver.rehearsal else 32)

    def _model(self, part: str) -> Path:
        driver, name = self._driver, "start-small" if part.endswith("small") else "start-8b"
        arguments = {**_ARGUMENTS, **driver.extra}
        place = driver.root / "models" / name
        if part.endswith("small"):
            return models.small(place, arguments)
        shape = {**models.SHAPE, "num_hidden_layers": self._layers}
        made = models.large(place, driver.small, arguments, shape)
        if not driver.rehearsal:
            models.zeros(made, shape)
            (made / "model.json").write_text(json.dumps(arguments), "utf-8")
        return made

    def _seal(self, phase: Phase, part: str) -> None:
        """Build a sealed engine, and start it where nothing was compiled."""
        left = self._driver.until - time.monotonic()
        if left < _SEALED[part] and not self._driver.rehearsal:
            phase.add("not run", f"{part}: {left:.0f} s are left of {_SEALED[part]}")
            return
        place = self._driver.root / "start-caches" / part
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        seen = gpu_double(place / "double") if self._driver.rehearsal else {}
        values = {**self._values(place / "build"), **seen}
        values["COG_TRITON_WORK_DIR"] = str(place / "build")
        sealed = Sealed(self._model(part), place, values)
        build = sealed.predict if part.startswith("predicted") else sealed.build
        began = time.monotonic()
        tar = build()
        took = round(time.monotonic() - began, 1)
        if not phase.check(f"{part}: it is built", tar is not None, sealed.told[-1500:]):
            return
        phase.add("seals", {"part": part, "build": took, **sealed.contents()})
        print(f"  {part}: built in {took} s, {sealed.contents()}", flush=True)
        pinned = {**seen, "SEAL_SHA256": sealed.digest()}
        pinned.pop("LD_LIBRARY_PATH", None)
        try:
            found = self._started(part, "empty", place / "home", tar, **pinned)
        except NotStarted as error:
            phase.check(f"{part}: it starts", False, error)
            return
        made = sorted(_files(place / "home") - sealed.files())
        phase.add("starts", {**found, "files made": len(made)})
        phase.check(f"{part}: nothing is compiled", not made, made)

    def _values(self, home: Path) -> dict[str, str]:
        """The environment of a process whose home is `home`."""
        driver = self._driver
        values = {key: it for key, it in driver.environment.items() if key != "VLLM_CACHE_ROOT"}
        values |= {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), values.get("PYTHONPATH"))))
        }
        home.mkdir(parents=True, exist_ok=True)
        return {**values, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}

    def _server(
        self, part: str, state: str, caches: Path, engine: Path | None = None, **pinned: str
    ) -> Server:
        """A server whose home is in `caches`; of the start before, compilers' caches stay.

        They stay at their path: Triton's groups of files are known by it.
        """
        driver, name = self._driver, f"start-{part}"
        place = driver.logs / name
        values = {**self._values(caches), **pinned}
        model = engine or self._model(part)
        kept, before = place / "work" / "compiler-caches", driver.logs / f"{name}-before"
        shutil.rmtree(before, ignore_errors=True)
        if place.is_dir():
            place.rename(before)
        if state == "full" and (old := before / "work" / "compiler-caches").is_dir():
            kept.parent.mkdir(parents=True)
            old.rename(kept)
        if part.startswith("peer") and not driver.rehearsal:
            return vllm_serve(name, model, driver.logs, driver.python, rust=True, **values)
        own = None if driver.rehearsal else driver.options.engine_python
        told = part.startswith("deterministic")
        values["LOG_LEVEL"] = "debug"  # the first start of an engine is below INFO
        # Without a cache of all servers.
        return ours(name, model, driver.logs, own, deterministic=told, **values)

    def _started(
        self, part: str, state: str, caches: Path, engine: Path | None = None, **pinned: str
    ) -> dict[str, Any]:
        server = self._server(part, state, caches, engine, **pinned)
        work = server.log.parent / "work" / "compiler-caches"
        marks = Marks(server)
        before = _files(caches, work)
        with stopped_at_the_end(server):
            server.launch()
            marks.start()
            try:
                server.wait()
                ready = round(time.monotonic() - server.began, 2)
                text = _ask(server)
                first = round(time.monotonic() - server.began, 2)
                after = self._after(server, part)
            finally:
                marks.end()
        row = {
            "part": part,
            "caches": state,
            "marks": {**marks.seen, "ready": ready, "answer": first},
            "files made": len(_files(caches, work) - before),
            "told": re.findall(_TOLD, marks.text)[:8],
            "vllm": server.start_times(),
            "text": text,
            **after,
        }
        print(f"  {part}, {state}: {row['marks']}, files made: {row['files made']}", flush=True)
        return row

    def _after(self, server: Server, part: str) -> dict[str, Any]:
        """Greedy texts, each alone, of the model whose weights are real; tok/s of 64 streams."""
        endpoint = Endpoint("/v1", server.openai)  # type: ignore[attr-defined]
        texts = prompts.make(self._model(part), _STREAMS, _INPUT, seed=32)
        alone = texts[:_TEXTS] if part.endswith("small") else []
        said = [asyncio.run(run(endpoint, [one], _TOKENS, _PATIENCE_S))[0].text for one in alone]
        streams: list[Stream] = []
        rates = []
        for _ in range(2):  # the first one warms it up
            began = time.monotonic()
            streams = asyncio.run(run(endpoint, texts, _TOKENS, _PATIENCE_S))
            spent = time.monotonic() - began
            rates.append(round(sum(one.ended == "whole" for one in streams) * _TOKENS / spent))
        same = sum(one.text == text for one, text in zip(streams, said, strict=False))
        return {"texts": said, "tok_s": rates, "alone as in a batch": f"{same} of {len(said)}"}

    @staticmethod
    def _compare(phase: Phase) -> None:
        rows = phase.seen.get("starts", [])
        for model in ("", "-small"):
            these = [row for row in rows if row["part"].endswith("small") == bool(model)]
            these = [row for row in these if not row["part"].startswith("deterministic")]
            said = {row["text"] for row in these}
            if said:
                phase.check(f"start{model}: every start says the same", len(said) == 1, said)
            own = [row["texts"] for row in these]
            for row, texts in zip(these, own, strict=False):
                same = sum(one == other for one, other in zip(own[0], texts, strict=True))
                row["same texts"] = f"{same} of {len(texts)}"
                name = f"{row['part']}, {row['caches']}: {_TOKENS} greedy tokens as of the first"
                phase.check(name, same == len(texts), row["same texts"])


def _ask(server: Server) -> str:
    """The first answer; `server` is ready."""
    body = {"model": "verify", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    url = f"http://127.0.0.1:{server.openai}/v1/completions"  # type: ignore[attr-defined]
    answer = httpx.post(url, json=body, timeout=60)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def _files(*places: Path) -> set[str]:
    """Files that compilers have made, each by its name with the directory's that it is in."""
    return {
        "/".join(path.parts[-2:])
        for place in places
        for path in place.rglob("*")
        if path.suffix in (".cubin", ".so", ".autotune.json") or path.name == "model"
    }
