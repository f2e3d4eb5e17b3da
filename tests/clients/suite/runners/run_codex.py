"""codex: a released coding agent, over the Responses API, as it is without settings of its own."""

from __future__ import annotations

from checks import check, main
from coding_agent import HOME, MACHINE, PACKAGES, SCRIPTED, Answer, coding_checks, run

AGENT = next((PACKAGES / f"@openai/codex-linux-{MACHINE}" / "vendor").glob("*/bin/codex"))


def agent(ask: str, session: str = "") -> Answer:
    provider = f'{{name="here", base_url="{SCRIPTED.openai}", wire_api="responses", env_key="KEY"}}'
    settings = (
        f'model="{SCRIPTED.model}"',
        'model_provider="here"',
        f"model_providers.here={provider}",
    )
    told = run(
        *(AGENT, "exec", "--json", "--skip-git-repo-check"),
        "--dangerously-bypass-approvals-and-sandbox",
        *(part for setting in settings for part in ("-c", setting)),
        *(["resume", session, ask] if session else [ask]),
        KEY="none",
        CODEX_HOME=str(HOME),
    )
    items = [line["item"] for line in told if line["type"] == "item.completed"]
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    return told[0]["thread_id"], texts[-1] if texts else str(told[-1])


coding_checks("CX", agent)


@check
def a_tool_of_a_namespace_is_called() -> None:
    """One of its own: what it finds wrong with the argument is answered."""
    assert agent("CX-AGENT")[1] == "No such agent."


if __name__ == "__main__":
    main()
