"""Bad input to both APIs: coded errors, and a server that continues to run."""

from typing import Any

import httpx
import pytest
import schemathesis
from engine_fixtures import LONG
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.core import NOT_SET
from stack import Stack, text_of, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("mock")]

USER = {"role": "user", "content": "Hi."}
PREDICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "E1001"),
    ({"prompt": "\n"}, "E1001"),
    ({"prompt": LONG}, "E1002"),
    ({"prompt": "Hi.", "prompt_template": "nothing"}, "E1003"),
    ({"prompt": "Hi.", "prompt_template": "{prompt"}, "E1004"),
    ({"prompt": "Hi.", "prompt_template": "{prompt.__class__}"}, "E1004"),
    ({"prompt": "Hi.", "repetition_penalty": -1}, "E1005"),
    ({"prompt": "Hi.", "inject": "error", "inject_after": 9000}, "E1005"),
    ({"prompt": "Hi.", "max_tokens": 2**31}, "E1005"),
    ({"prompt": "Hi.", "seed": 2**64}, "E1005"),
    ({"messages": []}, "E1006"),
    ({"messages": [{}]}, "E1006"),
    ({"messages": [{"role": "wizard", "content": "Hi."}]}, "E1006"),
    ({"messages": [{"role": "user"}]}, "E1006"),
    ({"messages": [{"role": "user", "content": 4}]}, "E1006"),
    ({"messages": [USER], "prompt": "Hi."}, "E1006"),
    ({"messages": [USER], "prompt_template": "{prompt}"}, "E1006"),
    ({"messages": [{"role": "system", "content": "a"}, USER], "system_prompt": "b"}, "E1006"),
    ({"messages": [{"role": "user", "content": LONG}]}, "E1002"),
    ({"prompt": "Hi.", "min_tokens": 1, "min_new_tokens": 2}, "E1101"),
    ({"prompt": "Hi.", "max_tokens": 1, "max_new_tokens": 2}, "E1102"),
    ({"prompt": 5}, "422"),
    ({"prompt": "Hi.", "temperature": "hot"}, "422"),
    ({"prompt": "Hi.", "temperature": 6}, "422"),
    ({"prompt": "Hi.", "top_p": -0.1}, "422"),
    ({"prompt": "Hi.", "top_k": -2}, "422"),
    ({"prompt": "Hi.", "max_tokens": 0}, "422"),
    ({"prompt": "Hi.", "seed": "one"}, "422"),
    ({"messages": "Hi."}, "422"),
    ({"messages": ["Hi."]}, "422"),
]
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "E1006"),
    ({"messages": "Hi."}, "E1006"),
    ({"messages": []}, "E1006"),
    ({"messages": ["Hi."]}, "E1006"),
    ({"messages": [{"role": "wizard", "content": "Hi."}]}, "E1006"),
    ({"messages": [{"role": "tool", "content": "Hi."}]}, "E1006"),
    ({"messages": [{"role": "user", "content": None}]}, "E1006"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "E1006"),
    ({"messages": [{"role": "user", "content": " "}]}, "E1006"),
    ({"messages": [{"role": "user", "content": LONG}]}, "E1002"),
    ({"model": "gpt-4"}, "E1009"),
    ({"model": 3}, "E1005"),
    ({"temperature": 3}, "E1005"),
    ({"temperature": "hot"}, "E1005"),
    ({"top_p": 2}, "E1005"),
    ({"top_k": -5}, "E1005"),
    ({"max_tokens": 0}, "E1005"),
    ({"min_tokens": 5, "max_tokens": 2}, "E1005"),
    ({"seed": 2**64}, "E1005"),
    ({"seed": "x"}, "E1005"),
    ({"stop": ""}, "E1005"),
    ({"stop": [1]}, "E1005"),
    ({"n": 0}, "E1005"),
    ({"tools": [{"type": "function"}]}, "E1005"),
    ({"logit_bias": {"5": 101}}, "E1005"),
    ({"logprobs": True, "top_logprobs": 21}, "E1005"),
    ({"presence_penalty": 3}, "E1005"),
    ({"repetition_penalty": 0}, "E1005"),
    ({"stream": "yes"}, "E1005"),
    ({"response_format": {"type": "yaml"}}, "E1005"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "foo"}},
            }
        },
        "E1005",
    ),
    ({"prompt": "Hi."}, "E1005"),
]


LENGTHS = ("max_tokens", "max_completion_tokens")
"""Properties that say how many tokens an answer has; without them it has all that fit."""
OF_THE_MOCK = ("tps", "inject", "inject_after", "n_output_tokens")
"""Inputs that make the mock slow, or break it."""


@pytest.mark.parametrize(("values", "code"), PREDICTIONS)
def test_bad_predictions_get_their_code(mock: Stack, values: dict[str, Any], code: str) -> None:
    answer = httpx.post(f"{mock.url}/predictions", json={"input": values}, timeout=60)
    if code == "422":
        assert answer.status_code == 422
    else:
        assert answer.json()["status"] == "failed"
        assert f"{code} " in answer.json()["error"]
    wait_until(lambda: mock.engine_requests() == 0)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("values", "code"), CHAT)
def test_bad_chats_get_their_code(
    mock: Stack, values: dict[str, Any], code: str, streamed: bool
) -> None:
    body = {"model": "mock", "messages": [USER], "stream": streamed, **values}
    answer = httpx.post(f"{mock.own}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == (404 if code == "E1009" else 400)
    error = answer.json()["error"]
    assert answer.headers["x-error-code"] == code
    assert error["message"].startswith(f"{code} ")
    wait_until(lambda: mock.engine_requests() == 0)


@pytest.fixture
def own_document(mock: Stack) -> dict[str, Any]:
    """Our own schema, with the one model that is there, and answers that end soon."""
    found: dict[str, Any] = httpx.get(f"{mock.own}/openapi.json", timeout=60).json()
    for name in ("ChatRequest", "CompletionRequest"):
        schema = found["components"]["schemas"][name]
        schema["properties"]["model"] = {"const": "mock"}
        schema["properties"]["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 3}
        schema["properties"].pop("max_completion_tokens", None)
        schema["required"].append("max_tokens")
    return found


@pytest.fixture
def cogs_document(mock: Stack) -> dict[str, Any]:
    """Cog's schema without what would end the server, call other hosts, or take long."""
    found: dict[str, Any] = httpx.get(f"{mock.url}/openapi.json", timeout=60).json()
    del found["paths"]["/shutdown"]
    schemas = found["components"]["schemas"]
    schemas["PredictionRequest"] = {
        "type": "object",
        "required": ["input"],
        "properties": {"input": {"$ref": "#/components/schemas/Input"}},
    }
    properties = schemas["Input"]["properties"]
    properties["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 3}
    for name in ("max_new_tokens", *OF_THE_MOCK):
        properties.pop(name)
    schemas["Input"]["required"] = ["max_tokens"]
    return found


def shorten(case: schemathesis.Case) -> None:
    """Have a request that would get many tokens ask for three: the schema's bounds are negated too.

    What the server refuses stays as it is: other types, and numbers of more than 31 bits.
    """
    path, asked = case.operation.path, case.body
    if path.endswith(("/predictions", "/predictions/{prediction_id}")):
        if asked is NOT_SET:
            case.body = asked = {}
            case.media_type = "application/json"
        if isinstance(asked, dict):  # Cog takes no input for one without values
            if asked.get("input") is None:
                asked["input"] = {}
            asked = asked["input"]
    elif not path.endswith("/completions"):
        return
    if not isinstance(asked, dict):
        return
    for name in LENGTHS:
        value = asked.get(name)
        if isinstance(value, int | float) and 3 < value < 2**31:
            asked[name] = 3
    if all(asked.get(name) is None for name in LENGTHS):
        asked["max_tokens"] = 3


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("which", ["own", "cogs"])
def test_generated_inputs_never_cause_a_framework_error(
    mock: Stack, which: str, mode: GenerationMode, request: pytest.FixtureRequest
) -> None:
    document = request.getfixturevalue(f"{which}_document")
    schema = schemathesis.openapi.from_dict(document)
    base_url = mock.own if which == "own" else mock.url
    tried = []
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(max_examples=examples(), suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def answers(case: schemathesis.Case) -> None:
            shorten(case)
            answer = case.call(base_url=base_url, timeout=300)
            assert answer.status_code < 500, answer.text

        if operation.body or mode == GenerationMode.POSITIVE:  # any text may be a path
            answers()
            tried.append(operation.label)
    assert any(label.startswith("POST") for label in tried)


def examples() -> int:
    """Half as many as of other properties, for each is a request; 10 in the quick profile."""
    return max(10, settings().max_examples // 2)


def test_server_is_ready_after_all_bad_input(mock: Stack) -> None:
    wait_until(lambda: mock.health() == "READY")
    assert httpx.get(f"{mock.own}/health", timeout=60).status_code == 200
    assert text_of(mock.predict(temperature=0, max_tokens=4))
