"""Channels between own processes: those that docs/architecture.md lists, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from python_sources import trees

ROOT = Path(__file__).parents[2]
FORMATS = {"frames", "HTTP", "gRPC", "text", "files"}
MOST = 8
OPENS = {
    *("socket.socket", "socket.socketpair", "socket.create_server", "socket.create_connection"),
    *("asyncio.open_connection", "asyncio.open_unix_connection", "asyncio.start_unix_server"),
    *("asyncio.start_server", "loop.create_connection", "loop.create_server"),
    *("loop.create_unix_server", "loop.create_unix_connection"),
    *("local_socket.connect", "local_socket.listen", "local_socket.accept", "PythonChild"),
    *("child.PythonChild", "http.client.HTTPConnection", "grpc.aio.insecure_channel"),
    *("os.pipe", "os.pipe2", "os.mkfifo", "os.memfd_create", "mmap.mmap"),
    "SharedTime",
}
"""Calls that open a channel, as they are written."""
PIPES = {"subprocess.PIPE", "asyncio.subprocess.PIPE"}
FOREIGN = {
    "bench/http_client.py": "asks a server as any client does",
    "build_scripts/openvino/_gguf_file.py": "reads a file",
    "engines/vllm/core_process.py": "starts EngineCore as vLLM does, by multiprocessing",
    "ipc/streams.py": "what channels are made of",
    "packages/package_set.py": "reads what pip says",
    "serving/openai/image_fetch.py": "fetches an image from elsewhere",
    "triton/grpc_relay.py": "passes on what clients of gRPC send",
    "system/local_socket.py": "what channels are made of",
    "system/tcp_sockets.py": "asks the kernel for sockets",
    "system/ports.py": "tries which ports are free, and listens for clients",
}
ORDERS = {
    "engines/engine_orders.py": "control",
    "processes/orders.py": "control",
    "serving/cog_messages.py": "server socket",
}
UNREADABLE = {"pickle", "shelve", "multiprocessing", "dill", "cloudpickle"}
OF_VLLM = {"engines/vllm/core_process.py": {"multiprocessing"}}
"""What vLLM itself starts EngineCore by, of one Python and one user, the parent to its child."""
MARSHAL = {"text/template_child.py", "text/chat_template.py"}
"""Into the sandbox alone; what comes back is text."""


class Channel(NamedTuple):
    """A row of the table."""

    name: str
    ends: str
    form: str
    messages: set[str]
    files: set[str]


def channels() -> list[Channel]:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    section = text.partition("## Private channels")[2].partition("\n## ")[0]
    found = []
    for line in section.splitlines():
        if line.startswith("|") and not line.startswith(("| channel |", "|---")):
            name, ends, form, messages, files = (cell.strip() for cell in line[1:-1].split("|"))
            words = set(re.findall(r"`(\w+)`", messages))
            found.append(
                Channel(name, ends, form, words, set(re.findall(r"`([\w/]+\.py)`", files)))
            )
    return found


def opening(tree: ast.Module) -> set[str]:
    """What a module opens channels by."""
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    named = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {re.sub(r"^(self\.)?_?", "", word) for word in called} & OPENS | named & PIPES


def test_there_are_at_most_eight_in_one_format_of_our_own() -> None:
    rows = channels()
    assert 0 < len(rows) <= MOST
    assert {row.form for row in rows} <= FORMATS
    assert any(row.form == "frames" for row in rows)


def test_a_module_that_opens_a_channel_is_in_the_table() -> None:
    listed = set().union(*(row.files for row in channels()))
    opened = {file: words for file, tree in trees("cog_triton").items() if (words := opening(tree))}
    assert {file: words for file, words in opened.items() if file not in listed | {*FOREIGN}} == {}
    assert (listed | {*FOREIGN}) - opened.keys() == set(), "these open none"
    assert not listed & FOREIGN.keys()


@pytest.mark.parametrize(
    "text",
    [
        "ours, theirs = socket.socketpair()",
        "self._listener = local_socket.listen(name)",
        "reader, writer = await self._loop.create_connection(f, h, 1)",
        "Popen([], stdout=subprocess.PIPE)",
        "self._progress = SharedTime()",
    ],
)
def test_a_channel_is_seen_however_it_is_opened(text: str) -> None:
    assert opening(ast.parse(f"async def f():\n    {text}\n"))


def test_every_message_is_in_the_row_of_its_channel() -> None:
    registered: dict[str, set[str]] = {name: set() for name in ("engine socket", *ORDERS.values())}
    for file, tree in trees("cog_triton").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(decorator) == "message" for decorator in node.decorator_list
            ):
                registered[ORDERS.get(file, "engine socket")].add(node.name)
    listed = {row.name: row.messages for row in channels()}
    registered["engine socket"] |= {"Submit", "Cancel", "Event", "EncodedStep"}  # in binary
    assert {name: listed[name] for name in registered} == registered


def test_nothing_that_can_run_code_is_read() -> None:
    for file, tree in trees("cog_triton").items():
        imported = {
            name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
        }
        assert imported & UNREADABLE <= OF_VLLM.get(file, set()), file
        assert "marshal" not in imported or file in MARSHAL, file
