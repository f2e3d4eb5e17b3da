"""Log lines: both forms, levels, the id of the request, and that nothing in the package prints."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from python_sources import trees

from cog_triton.errors import Overloaded
from cog_triton.front.server import SetupLog
from cog_triton.serving.cog_messages import LOG
from cog_triton.system import log_format
from cog_triton.system.log_format import request_id

log = logging.getLogger("cog_triton.serving.runtime")
Lines = Callable[[], list[str]]
WRITES_OUTPUT = {
    "builder/canary_run.py": "the canary, on the stdout that the build reads",
    "builder/build_request.py": "a build's progress, on the stdout that its parent reads",
    "builder/predictor.py": "a build's progress, in the prediction's log",
    "engines/vllm/core_process.py": "how long EngineCore imported, in the engine's log",
    "engines/vllm/seal_start.py": "a build step's result, or why there is none",
    "build_scripts/openvino/_script.py": "a build step, which runs in another Python",
    "serving/coglet/openapi_schema.py": "the schema, on stdout",
    "serving/coglet/predictor.py": "the prediction's log",
    "triton/mpi_rank.py": "runs by path, with the standard library alone",
    "bench/report.py": "results, on stdout where a user asks for them there",
}
"""Modules that write to stdout or stderr themselves, and what."""


@pytest.fixture
def configured(own_logging: None, tmp_path: Path) -> Iterator[Callable[..., Lines]]:
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)

    def configure(form: str, level: str = "info") -> Lines:
        log_format.configure(form, level, descriptor)
        return lambda: path.read_text().splitlines()

    yield configure
    os.close(descriptor)


@pytest.mark.parametrize("form", ["json", "console"])
def test_an_error_has_its_code_and_its_traceback(
    form: str, configured: Callable[..., Lines]
) -> None:
    lines = configured(form)
    try:
        raise Overloaded("later")
    except Overloaded:
        log.exception("no")
    text = "\n".join(lines())
    if form == "console":
        assert "cog_triton.serving.runtime: no error_code=E2107\nTraceback (most" in text
    else:
        values = json.loads(text)
        assert (values["error_code"], values["level"]) == ("E2107", "ERROR")
        assert values["exception"].startswith("Traceback")
        assert "Overloaded: E2107 Overloaded: later" in values["exception"]


def ids(lines: list[str]) -> list[str | None]:
    return [json.loads(line).get("id") for line in lines]


def test_the_id_of_the_request_is_in_lines_of_its_threads(
    configured: Callable[..., Lines],
) -> None:
    """As /v1 handles them: a task each, and threads."""
    lines = configured("json")

    async def handle(name: str) -> None:
        request_id.set(name)
        await asyncio.to_thread(log.info, "on a thread")
        log.info("in the task")

    async def main() -> None:
        await asyncio.gather(handle("a"), handle("b"))
        log.info("outside")

    asyncio.run(main())
    found = ids(lines())
    assert sorted(name or "" for name in found) == ["", "a", "a", "b", "b"]
    assert found[-1] is None


def test_setup_log_holds_all_lines_and_the_log_its_warnings(
    configured: Callable[..., Lines],
) -> None:
    class Follower:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def send(self, kind: bytes, text: str) -> None:
            assert kind == LOG
            self.lines.append(text)

    async def start() -> list[list[str]]:
        setup_log, followers = SetupLog(), [Follower(), Follower()]
        with setup_log:
            setup_log.follow(followers[0])  # type: ignore[arg-type]
            await asyncio.to_thread(log.info, "Unpacking")
            log.warning("odd")
            await asyncio.sleep(0)
        log.info("later")
        setup_log.follow(followers[1])  # type: ignore[arg-type]
        return [follower.lines for follower in followers]

    async def start_without_cog() -> None:
        setup_log = SetupLog()
        setup_log.for_cog = False
        with setup_log:
            log.info("alone")

    lines = configured("console")
    assert asyncio.run(start()) == [["Unpacking", "Warning: odd"]] * 2
    asyncio.run(start_without_cog())
    assert [line.rpartition(": ")[2] for line in lines()] == ["odd", "later", "alone"]


def writes_itself(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "print":
            return True
        if isinstance(node, ast.Attribute) and (
            ast.unparse(node) in ("sys.stderr.write", "sys.stdout.write")
            or node.attr in ("print_exc", "print_exception")
        ):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "warnings":
            return True
    return False


def test_nothing_else_in_the_package_prints() -> None:
    found = {name for name, parsed in trees("cog_triton").items() if writes_itself(parsed)}
    assert {name for name in found if not name.startswith("cli/")} == WRITES_OUTPUT.keys()
