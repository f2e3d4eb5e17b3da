import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cog import BaseRunner, ConcatenateIterator, Input

from cog_triton.serving.coglet.openapi_schema import schema_for

ROOT = Path(__file__).parents[2]


class Streaming(BaseRunner):
    def run(
        self,
        prompt: str = Input(description="What to say."),
        count: int = Input(default=3, ge=1, le=9),
        temperature: float = Input(default=0.5, ge=0, le=1.5),
        seed: int | None = Input(default=None, ge=0, description="0 is one, too."),
        mode: str = Input(default="a", choices=["a", "b"]),
        maybe: str | None = Input(default=None, choices=["a", "b"]),
        name: str = Input(default="xy", min_length=2, max_length=4, regex="^x", deprecated=True),
        stops: list[str] | None = None,
        scores: list[int] = Input(ge=0),  # noqa: B008
        flag: bool = False,
        either: int | str | None = None,
    ) -> ConcatenateIterator[str]:
        yield prompt


class Lines(BaseRunner):
    def run(self) -> Iterator[str]:
        yield "line"


class Whole(BaseRunner):
    def run(self, text: str) -> str:
        return text


def test_inputs_follow_the_signature() -> None:
    schema = schema_for(f"{__file__}:Streaming")["components"]["schemas"]["Input"]
    assert schema.pop("required") == ["prompt", "scores"]
    properties = schema.pop("properties")
    assert schema == {"title": "Input", "type": "object"}
    assert [field.pop("x-order") for field in properties.values()] == list(range(11))
    titles = [field.pop("title") for field in properties.values()]
    assert titles[0] == "Prompt"
    null_or = {"nullable": True}
    text = {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^x"}
    seed = {"type": ["integer", "null"], "minimum": 0, "description": "0 is one, too."}
    assert properties == {
        "prompt": {"type": "string", "description": "What to say."},
        "count": {"type": "integer", "default": 3, "minimum": 1, "maximum": 9},
        "temperature": {"type": "number", "default": 0.5, "minimum": 0, "maximum": 1.5},
        "seed": null_or | seed,
        "mode": {"type": "string", "default": "a", "enum": ["a", "b"]},
        "maybe": null_or | {"type": ["string", "null"], "enum": ["a", "b", None]},
        "name": text | {"default": "xy", "deprecated": True},
        "stops": null_or | {"type": ["array", "null"], "items": {"type": "string"}},
        "scores": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "flag": {"type": "boolean", "default": False},
        "either": null_or | {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
    }


@pytest.mark.parametrize(("name", "streams"), [("Lines", True), ("Whole", False)])
def test_marks_of_streaming_are_those_of_the_output(
    name: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cog.__version__", "9.9")
    schema = schema_for(f"{__file__}:{name}")
    assert schema["info"]["version"] == "9.9"
    parts = schema["components"]["schemas"]
    lines = {"type": "array", "items": {"type": "string"}, "x-cog-array-type": "iterator"}
    assert parts["Output"] == {"title": "Output"} | (lines if streams else {"type": "string"})
    assert ("required" in parts["Input"]) is not streams
    paths = schema["paths"]
    for operation in (paths["/predictions"]["post"], paths["/predictions/{prediction_id}"]["put"]):
        assert operation.get("x-cog-streaming", False) is streams
        assert ("text/event-stream" in operation["responses"]["200"]["content"]) is streams


@pytest.mark.parametrize("project", ["builder", "runner", "mock_cog_triton"])
def test_schema_in_the_repository_is_current(project: str) -> None:
    module = "cog_triton.serving.coglet.openapi_schema"
    command = [sys.executable, "-m", module, "predict.py:Predictor"]
    environment = {"PYTHONPATH": str(ROOT)}
    made = subprocess.check_output(command, cwd=ROOT / project, env=environment)
    assert made == (ROOT / project / ".cog/openapi_schema.json").read_bytes()
