"""Channels between own processes: those that docs/architecture.md lists, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

from python_sources import trees

from cog_triton.engines import engine_messages

ROOT = Path(__file__).parents[2]
FORMATS = {"frames", "HTTP", "gRPC", "text"}
MOST = 5
OPENS = {
    *("socket.socket", "socket.socketpair", "socket.create_server", "socket.create_connection"),
    *("asyncio.open_connection", "asyncio.open_unix_connection", "asyncio.start_unix_server"),
    *("asyncio.start_server", "loop.create_connection", "loop.create_server"),
    *("loop.create_unix_server", "loop.create_unix_connection"),
    *("local_socket.connect", "local_socket.listen", "PythonChild"),
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
    "ipc/messages.py": "what channels are made of",
    "packages/package_set.py": "reads what pip says",
    "triton/grpc_relay.py": "passes on what clients of gRPC send",
    "system/local_socket.py": "what channels are made of",
    "system/ports.py": "tries which ports are free, and listens for clients",
}
ORDERS = {
    "engines/engine_orders.py": "messages",
    "processes/orders.py": "messages",
    "serving/cog_messages.py": "messages",
}
UNREADABLE = {"pickle", "shelve", "multiprocessing", "dill", "cloudpickle"}
OF_VLLM = {"engines/vllm/core_process.py": {"multiprocessing"}}
"""What vLLM itself starts EngineCore by, of one Python and one user, the parent to its child."""
MARSHAL = {"text/template_child.py", "text/chat_template.py"}
"""Into the sandbox alone; what comes back is text."""


class Channel(NamedTuple):
    """A row of the table, and the item below it with messages and modules that open it."""

    name: str
    form: str
    messages: set[str]
    files: set[str]


def channels() -> list[Channel]:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    section = text.partition("## Private channels")[2].partition("\n## ")[0]
    items = dict(re.findall(r"^- ([\w ]+): (.+?)(?=\n\S|\s*\Z)", section, re.MULTILINE | re.DOTALL))
    rows = re.findall(r"^\| ([\w ]+) \|.+\| (\w+) \|.+\|$", section, re.MULTILINE)[1:]
    assert [name for name, _ in rows] == list(items)
    words, files = re.compile(r"`(\w+)`"), re.compile(r"`([\w/]+\.py)`")
    return [
        Channel(name, form, {*words.findall(items[name])}, {*files.findall(items[name])})
        for name, form in rows
    ]


def opening(tree: ast.Module) -> set[str]:
    """What a module opens channels by."""
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    named = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {re.sub(r"^(self\.)?_?", "", word) for word in called} & OPENS | named & PIPES


def test_there_are_at_most_five_in_one_format_of_our_own() -> None:
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


def test_every_message_is_in_the_row_of_its_channel() -> None:
    registered: dict[str, set[str]] = {name: set() for name in ("engine socket", *ORDERS.values())}
    for file, tree in trees("cog_triton").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and "Message" in map(ast.unparse, node.bases):
                registered[ORDERS[file]].add(node.name)
    listed = {row.name: row.messages for row in channels()}
    kinds = (*engine_messages.REQUESTS, *engine_messages.OTHERS)
    registered["engine socket"] |= {kind.__name__ for kind in kinds}
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
