"""llm: its command line with the models of extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from checks import GIVEN, check, main, server

HERE = server("openvino")
HOME = Path(GIVEN["work"]) / "user"
ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris"
_COMMON = {"model_name": HERE.model, "api_base": HERE.openai}
MODELS = [
    {"model_id": "chat", "supports_tools": True, "supports_schema": True, **_COMMON},
    {"model_id": "completion", "completion": True, **_COMMON},
    {"model_id": "responses", "responses": True, "supports_schema": True, **_COMMON},
    {"model_id": "absent", **_COMMON, "model_name": "absent"},
]
HOME.mkdir(exist_ok=True)
# JSON is YAML.
(HOME / "extra-openai-models.yaml").write_text(json.dumps(MODELS))


def llm(*arguments: str, model: str = "chat", code: int = 0, text: str = "") -> str:
    command = ["llm", *arguments, "-m", model]
    done = subprocess.run(
        command,
        env={**os.environ, "LLM_USER_PATH": str(HOME)},
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout + (done.stderr if code else "")


@check
def prompt_streamed_and_whole() -> None:
    assert llm(ASK, "-o", "temperature", "0").startswith(PARIS)
    assert llm(ASK, "-o", "temperature", "0", "--no-stream").startswith(PARIS)


@check
def system_prompt_and_options() -> None:
    options = {"temperature": "0.5", "top_p": "0.9", "seed": "3", "max_tokens": "4", "stop": "zzz"}
    flags = [part for name, value in options.items() for part in ("-o", name, value)]
    first, second = (llm(ASK, "-s", "Be brief.", *flags) for _ in range(2))
    assert first == second


@check
def a_conversation_goes_on() -> None:
    llm(ASK, "-o", "temperature", "0")
    assert llm("And of Italy?", "-c", "-o", "max_tokens", "20").strip()


@check
def completion_models() -> None:
    text = llm("The capital of France is", "-o", "max_tokens", "4", model="completion")
    assert text.strip()
    logprobs = ("-o", "logprobs", "0", "-o", "max_tokens", "2")
    llm("The capital of France is", *logprobs, model="completion")


@check
def responses_models() -> None:
    assert llm(ASK, "-o", "temperature", "0", model="responses").startswith(PARIS)


@check
def schemas() -> None:
    names = {"type": "string", "enum": ["Paris", "Rome"]}
    schema = {"type": "object", "properties": {"name": names}, "required": ["name"]}
    for model in ("chat", "responses"):
        found = json.loads(llm(ASK, "--schema", json.dumps(schema), model=model))
        assert found["name"] in names["enum"]


@check
def tools() -> None:
    code = "def multiply(a: int, b: int) -> int:\n    'Product of two numbers.'\n    return a * b"
    said = llm(
        *("What is 3 times 4?", "--functions", code, "--tools-debug", "--chain-limit", "2"),
        *("-o", "temperature", "0", "-o", "max_tokens", "100"),
    )
    assert said.strip()


@check
def chat_command() -> None:
    assert "Paris" in llm("chat", "-o", "temperature", "0", text=f"{ASK}\nquit\n")


@check
def errors_name_the_field() -> None:
    assert "absent" in llm(ASK, model="absent", code=1)
    assert "E1005" in llm(ASK, "-o", "logit_bias", '{"1": 5}', code=1)


if __name__ == "__main__":
    main()
