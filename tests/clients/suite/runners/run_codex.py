"""codex: a released coding agent, over the Responses API, as it is without settings of its own."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.request import Request, urlopen

from checks import check, main
from coding_agent import HOME, MACHINE, PACKAGES, SCRIPTED, Answer, coding_checks, run

AGENT = next((PACKAGES / f"@openai/codex-linux-{MACHINE}" / "vendor").glob("*/bin/codex"))


class _Cuts(BaseHTTPRequestHandler):
    """Asks our server for few tokens, which Codex has no setting for."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body["max_output_tokens"] = 200
        kind = {"Content-Type": "application/json"}
        url = f"{SCRIPTED.openai}/responses"
        with urlopen(Request(url, json.dumps(body).encode(), kind)) as answer:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            self.wfile.write(answer.read())


_CUTS = ThreadingHTTPServer(("127.0.0.1", 0), _Cuts)
Thread(target=_CUTS.serve_forever, daemon=True).start()


def agent(ask: str, session: str = "", cut: bool = False) -> Answer:
    url = f"http://127.0.0.1:{_CUTS.server_port}" if cut else SCRIPTED.openai
    provider = f'{{name="here", base_url="{url}", wire_api="responses", env_key="KEY"}}'
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
