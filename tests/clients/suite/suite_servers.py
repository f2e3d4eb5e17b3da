"""Servers of the suite: Cog, Triton and an engine each, started when the first client asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import clean_environment
import httpx
from known_fields import KNOWN_FIELDS
from stack import Stack
from suite import agent_script
from suite.client_list import ROOT
from suite.environments import HOME

PLACES = 8
"""What the mock takes at once, without a queue, so that retries are seen."""


class Servers:
    """Running servers by kind, and what clients need beside them; all are closed on exit."""

    def __init__(self) -> None:
        given = os.environ.get("ENGINE_TAR")
        self._given = Path(given).resolve() if given else None
        clean_environment.clean()
        HOME.mkdir(parents=True, exist_ok=True)
        self._open = ExitStack()
        self._stacks: dict[str, Stack] = {}
        self._tar: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def described(self, kind: str) -> dict[str, Any]:
        """Addresses of a server, and its model's name."""
        if kind not in self._stacks:
            stack = self._stack(kind)
            self._stacks[kind] = self._open.enter_context(stack.served())
        stack = self._stacks[kind]
        return {
            "openai": f"{stack.own}/v1",
            "cog": stack.url,
            "http": stack.triton.removeprefix("http://"),
            "grpc": f"127.0.0.1:{stack.grpc}",
            "metrics": f"{stack.own}/metrics",
            "tokenizer": str(self._tokenizer(kind)),
            "places": PLACES,
            "fields": KNOWN_FIELDS,
            "model": httpx.get(f"{stack.own}/v1/models").json()["data"][0]["id"],
        }

    def _tokenizer(self, kind: str) -> Path:
        if kind in ("mock", "scripted"):
            made = (self._stacks[kind].work_dir / "engines").glob("mock-*")
            return max(made, key=lambda path: path.stat().st_mtime)
        directory = HOME / "tokenizer"
        directory.mkdir(exist_ok=True)
        with tarfile.open(self._engine_tar()) as tar:
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
                member = tar.extractfile(name)
                assert member is not None
                (directory / name).write_bytes(member.read())
        return directory

    def _stack(self, kind: str) -> Stack:
        work = HOME / "servers" / kind
        work.parent.mkdir(exist_ok=True)
        # The demo model's own chat template knows no tools.
        tools = {"CHAT_TEMPLATE": str(ROOT / "configs" / "chat_templates" / "chatml-tools.jinja")}
        if kind == "scripted":
            script = work.parent / "script.json"
            script.write_text(json.dumps(agent_script.script()))
            stack = Stack(
                work,
                None,
                MOCK_ANSWERS=str(script),
                TOOL_CALL_PARSER="hermes",
                MOCK_JOIN="0",
                **tools,
            )
            stack.command += ["--engine", "mock", "--tps", "200"]
            return stack
        if kind == "mock":
            stack = Stack(work, None, MAX_CONCURRENCY=str(PLACES), MAX_QUEUE="0")
            stack.command += ["--engine", "mock", "--tps", "50"]
            return stack
        whole = {"COG_TRITON_CONFIG": str(ROOT / "configs" / "serve" / "whole-answers.yaml")}
        return Stack(work, str(self._engine_tar()), **(whole if kind == "whole" else tools))

    def _engine_tar(self) -> Path:
        if self._tar is None:
            self._tar = self._given or _build()
        return self._tar


def _build() -> Path:
    tar = ROOT / ".work" / "test" / "engine.tar"
    config = ROOT / "configs" / "build" / "smollm2-135m-cpu.yaml"
    command = [sys.executable, "-m", "cog_triton", "build", str(config), f"--output={tar}"]
    tar.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*command, f"--work-dir={tar.parent / 'build'}"], check=True)
    return tar
