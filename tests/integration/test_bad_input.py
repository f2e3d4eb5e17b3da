"""Generated input to both APIs: coded errors, and a server that continues to run."""

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.core import NOT_SET
from stack import Stack, text_of, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("mock")]

LENGTHS = ("max_tokens", "max_completion_tokens")
"""Properties that say how many tokens an answer has; without them it has all that fit."""
OF_THE_MOCK = ("tps", "inject", "inject_after", "n_output_tokens")
"""Inputs that make the mock slow, or break it."""


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
