"""llm: its command line with the models of extra-openai-models.yaml."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from cases import ASK, PARIS, City, cases
from checks import GIVEN, check, main, run, server

HERE = server("openvino")
HOME = Path(GIVEN["work"]) / "user"
_COMMON = {"model_name": HERE.model, "api_base": HERE.openai}
MODELS = [
    {"model_id": "chat", "supports_tools": True, "supports_schema": True, **_COMMON},
    {"model_id": "completion", "completion": True, **_COMMON},
    {"model_id": "responses", "responses": True, "supports_schema": True, **_COMMON},
    {"model_id": "absent", **_COMMON, "model_name": "absent"},
]
GREEDY = ("-o", "temperature", "0")
HOME.mkdir(exist_ok=True)
# JSON is YAML.
(HOME / "extra-openai-models.yaml").write_text(json.dumps(MODELS))


def llm(*arguments: str, model: str = "chat", code: int = 0, text: str = "") -> str:
    return run("llm", *arguments, "-m", model, code=code, text=text, LLM_USER_PATH=str(HOME))


def typed(model: str, prompt: str) -> City:
    schema = json.dumps(City.model_json_schema())
    return City.model_validate_json(llm(prompt, "--schema", schema, model=model))


cases(
    completions=lambda prompt: " " + llm(prompt, *GREEDY, model="completion").strip(),
)
for api in ("chat", "responses"):
    cases(api, structured_output=partial(typed, api))


@check
def prompts_streamed_and_whole() -> None:
    for more in ((), ("--no-stream",)):
        for model in ("chat", "responses"):
            assert llm(ASK, *GREEDY, *more, model=model).startswith(PARIS)


@check
def a_conversation_is_continued() -> None:
    llm(ASK, *GREEDY)
    assert llm("And of Italy?", "-c", "-o", "max_tokens", "20").strip()


@check
def tools() -> None:
    code = "def multiply(a: int, b: int) -> int:\n    'Product of two numbers.'\n    return a * b"
    said = llm(
        *("What is 3 times 4?", "--functions", code, "--tools-debug", "--chain-limit", "2"),
        *(*GREEDY, "-o", "max_tokens", "100"),
    )
    assert said.strip()


@check
def errors_name_the_field() -> None:
    assert "absent" in llm(ASK, model="absent", code=1)
    assert "E1005" in llm(ASK, "-o", "logit_bias", '{"1": 5}', code=1)


if __name__ == "__main__":
    main()
