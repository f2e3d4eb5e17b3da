"""claude-code: a released coding agent, over the Messages API."""

from __future__ import annotations

from typing import Any

from checks import Server, add, check, main, server
from coding_agent import MACHINE, PACKAGES, SCRIPTED, Answer, coding_checks, run

HERE = server("openvino")
AGENT = PACKAGES / f"@anthropic-ai/claude-code-linux-{MACHINE}" / "claude"


def lines(one: Server, ask: str, *options: str, most_tokens: int = 8000) -> list[dict[str, Any]]:
    """What it reports of its work, as JSON lines."""
    print_mode = ["-p", "--verbose", "--output-format", "stream-json", "--model", one.model]
    return run(
        *(AGENT, *print_mode, *options, "--", ask),
        ANTHROPIC_BASE_URL=one.origin,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_SMALL_FAST_MODEL=one.model,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS=str(most_tokens),
        DISABLE_AUTOUPDATER="1",
    )


def agent(ask: str, session: str = "", cut: bool = False) -> Answer:
    """It joins the events of our stream, which it also prints: they are compared."""
    options = ["--allowedTools", "Read,Edit,Bash", "--include-partial-messages"]
    resume = ["--resume", session] if session else []
    told = lines(SCRIPTED, ask, *options, *resume, most_tokens=200 if cut else 8000)
    last = told[-1]
    events = [line["event"] for line in told if line["type"] == "stream_event"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    pieces = [delta["text"] for delta in deltas if delta["type"] == "text_delta"]
    assert cut or "".join(pieces).endswith(last["result"]), told
    return last["session_id"], last.get("result", "")


continued = coding_checks("CC", agent)
add("a session continues after a cut call", lambda: continued(agent("CC-LONG-CALL", cut=True)[0]))


@check
def the_model_answers_within_its_context() -> str:
    """The demo model reads 8192 tokens: two tools, and instructions of one line."""
    few = ["--bare", "--tools", "Read,Write", "--system-prompt", "Be brief.", "--max-turns", "1"]
    last = lines(HERE, "What is the capital of France?", *few, most_tokens=64)[-1]
    assert last["usage"]["output_tokens"] > 2
    return str(last.get("result", last["subtype"]))


@check
def a_prompt_beyond_the_context_is_told() -> None:
    """All that it sends on its own is too long for the demo model."""
    last = lines(HERE, "What is the capital of France?")[-1]
    assert last["is_error"]
    assert "too long" in last["result"], last


if __name__ == "__main__":
    main()
