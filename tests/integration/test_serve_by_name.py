"""``cog-triton serve ORG/NAME`` of a stand-in of the hub: converted, killed on the way, served."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
from hub_server import ID, MAIN, Hub, serving_hub
from openvino_reference import TinyModel
from stack import Stack, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.full]


def test_a_killed_start_goes_on_and_the_next_one_needs_no_hub(tmp_path: Path) -> None:
    model = TinyModel.make("LlamaForCausalLM").save(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with serving_hub(files) as hub:
        stack = of(hub, tmp_path)
        stack.start()
        assert stack.process is not None
        wait_until(lambda: "[build]" in stack.log.read_text("utf-8"))
        stack.process.kill()
        stack.process.wait()
        with stack.served():
            said = stack.log.read_text("utf-8")
            assert f"{ID}@{MAIN}: served by openvino, as " in said
            assert answered(stack) == ID
            assert stack.process is not None
            stack.process.send_signal(signal.SIGINT)
            assert stack.process.wait(60) == 0
        (engine,) = (tmp_path / "work" / "serve" / "engines").iterdir()
        hub.requests.clear()
        with stack.served():
            assert answered(stack) == ID
            assert "[build]" not in stack.log.read_text("utf-8")
        assert hub.requests == []
        assert (engine / "cog-triton.json").is_file()


def of(hub: Hub, home: Path) -> Stack:
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hub"), "HF_HUB_OFFLINE": ""}
    return Stack(home / "work", ID, **environment)


def answered(stack: Stack) -> str:
    """The model that answers a completion."""
    body = {"model": ID, "prompt": "the", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{stack.own}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["model"])
