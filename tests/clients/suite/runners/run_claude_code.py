"""claude-code: a released coding agent, as a command without a terminal, over the Messages API."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from checks import GIVEN, Server, check, main, server

HERE, SCRIPTED = server("openvino"), server("scripted")
WORK = Path(GIVEN["work"])
HOME = WORK / "home"
_MACHINE = {"x86_64": "x64", "aarch64": "arm64"}[platform.machine()]
AGENT = Path(GIVEN["packages"], f"@anthropic-ai/claude-code-linux-{_MACHINE}", "claude")
"""The program that its package of npm holds for this machine."""
TASK = "Which number is in notes.txt? Write the next one to copy.txt."
TOOLS = ["Read", "Write"]


def agent(one: Server, ask: str, *options: str, most_tokens: int = 1000) -> list[dict[str, Any]]:
    """What it tells of its work, as JSON lines; it sees nothing but our server."""
    (WORK / "notes.txt").write_text("The number 640917.\n")
    (WORK / "copy.txt").unlink(missing_ok=True)
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "NO_PROXY")}
    proxies = {name: os.environ[name] for name in ("HTTP_PROXY", "HTTPS_PROXY")}
    own = {
        "HOME": str(HOME),
        "ANTHROPIC_BASE_URL": one.openai.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_SMALL_FAST_MODEL": one.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(most_tokens),
        "DISABLE_AUTOUPDATER": "1",
    }
    HOME.mkdir(exist_ok=True)
    print_mode = ["-p", "--verbose", "--output-format", "stream-json", "--model", one.model]
    done = subprocess.run(
        [str(AGENT), *print_mode, *options, "--", ask],
        env={**kept, **proxies, **own},
        cwd=WORK,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_loop(lines: list[dict[str, Any]]) -> str:
    """Both tools were called, in turn, and the answer came in the third."""
    blocks = [
        block
        for line in lines
        if line["type"] == "assistant"
        for block in line["message"]["content"]
    ]
    called = [block["name"] for block in blocks if block["type"] == "tool_use"]
    last = lines[-1]
    assert called == TOOLS, lines
    assert (last["subtype"], last["num_turns"]) == ("success", 3)
    assert last["usage"]["output_tokens"] > 3
    assert (WORK / "copy.txt").read_text() == "It is 640918."
    said: str = last["result"]
    assert said == "Written: 640918."
    return said


@check
def agent_loop_of_two_tools_and_three_turns() -> str:
    """With all that it sends on its own: some twenty tools, and 30 kB of instructions."""
    return check_loop(agent(SCRIPTED, TASK, "--allowedTools", ",".join(TOOLS)))


@check
def agent_loop_with_partial_messages() -> None:
    """It tells the events of our stream as they come."""
    lines = agent(SCRIPTED, TASK, "--allowedTools", ",".join(TOOLS), "--include-partial-messages")
    events = [line["event"] for line in lines if line["type"] == "stream_event"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    pieces = [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]
    assert "notes.txt" in "".join(pieces)
    assert "640918" in "".join(pieces)
    check_loop([line for line in lines if line["type"] != "stream_event"])


@check
def a_session_is_resumed() -> None:
    first = agent(SCRIPTED, TASK, "--allowedTools", ",".join(TOOLS))[-1]
    again = agent(SCRIPTED, "Say it again.", "--resume", first["session_id"])[-1]
    assert again["result"] == "Written: 640918."


@check
def the_model_answers_within_its_context() -> str:
    """The demo model reads 8192 tokens: two tools, and instructions of one line."""
    few = ["--bare", "--tools", ",".join(TOOLS), "--system-prompt", "Be brief."]
    last = agent(HERE, "What is the capital of France?", *few, "--max-turns", "1", most_tokens=64)[
        -1
    ]
    assert last["usage"]["output_tokens"] > 2
    return str(last.get("result", last["subtype"]))


@check
def a_prompt_beyond_the_context_is_told() -> None:
    """All that it sends on its own is too long for the demo model."""
    last = agent(HERE, "What is the capital of France?")[-1]
    assert last["is_error"]
    assert "too long" in last["result"], last


if __name__ == "__main__":
    main()
