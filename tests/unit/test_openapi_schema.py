import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cog import BaseRunner, ConcatenateIterator, Input

from cog_triton.errors import InvalidArgument
from cog_triton.serving.coglet.openapi_schema import dumps, load, schema_for

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
    schema = schema_for(Streaming)["components"]["schemas"]["Input"]
    assert schema["type"] == "object"
    assert schema["required"] == ["prompt", "scores"]
    properties = schema["properties"]
    assert [field["x-order"] for field in properties.values()] == list(range(11))
    titles = {name: field.pop("title") for name, field in properties.items()}
    assert titles["prompt"] == "Prompt"
    for field in properties.values():
        del field["x-order"]
    null_or = {"nullable": True}
    assert properties == {
        "prompt": {"type": "string", "description": "What to say."},
        "count": {"type": "integer", "default": 3, "minimum": 1, "maximum": 9},
        "temperature": {"type": "number", "default": 0.5, "minimum": 0, "maximum": 1.5},
        "seed": null_or
        | {"type": ["integer", "null"], "minimum": 0, "description": "0 is one, too."},
        "mode": {"type": "string", "default": "a", "enum": ["a", "b"]},
        "maybe": null_or | {"type": ["string", "null"], "enum": ["a", "b", None]},
        "name": {
            "type": "string",
            "default": "xy",
            "minLength": 2,
            "maxLength": 4,
            "pattern": "^x",
            "deprecated": True,
        },
        "stops": null_or | {"type": ["array", "null"], "items": {"type": "string"}},
        "scores": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "flag": {"type": "boolean", "default": False},
        "either": null_or | {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
    }


@pytest.mark.parametrize(
    ("predictor", "output", "streaming"),
    [
        (
            Streaming,
            {
                "type": "array",
                "items": {"type": "string"},
                "x-cog-array-type": "iterator",
                "x-cog-array-display": "concatenate",
            },
            True,
        ),
        (
            Lines,
            {"type": "array", "items": {"type": "string"}, "x-cog-array-type": "iterator"},
            True,
        ),
        (Whole, {"type": "string"}, False),
    ],
)
def test_output_says_whether_it_streams(
    predictor: type, output: dict[str, object], streaming: bool
) -> None:
    schema = schema_for(predictor)
    assert schema["components"]["schemas"]["Output"] == output | {"title": "Output"}
    post = schema["paths"]["/predictions"]["post"]
    put = schema["paths"]["/predictions/{prediction_id}"]["put"]
    assert post.get("x-cog-streaming", False) is streaming
    assert put.get("x-cog-streaming", False) is streaming


def test_no_required_key_without_required_inputs() -> None:
    assert "required" not in schema_for(Lines)["components"]["schemas"]["Input"]


def test_every_reference_resolves() -> None:
    schema = schema_for(Streaming)

    def references(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            if "$ref" in value:
                yield value["$ref"]
            for item in value.values():
                yield from references(item)
        elif isinstance(value, list):
            for item in value:
                yield from references(item)

    found = set(references(schema))
    assert found
    for reference in found:
        prefix, name = reference.rsplit("/", 1)
        assert prefix == "#/components/schemas"
        assert name in schema["components"]["schemas"]


def test_a_signature_cog_cannot_serve_is_refused() -> None:
    with pytest.raises(ValueError, match="run or predict method not found"):
        schema_for(BaseRunner)


@pytest.mark.parametrize("reference", ["", "Streaming", "nothing.py:A", ":A", "x.txt:A", "a.py:"])
def test_predictor_reference_to_a_missing_file_is_refused(reference: str) -> None:
    with pytest.raises(InvalidArgument, match=r"E1005 .*predictor="):
        load(reference)


def test_a_file_without_the_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "without_it.py").write_text("Other = 1\n")
    for name in ("Predictor", "Other"):
        with pytest.raises(InvalidArgument, match=f"no class {name}"):
            load(f"{tmp_path / 'without_it.py'}:{name}")
    del sys.modules["without_it"]


def generate(directory: Path) -> str:
    command = [
        sys.executable,
        "-m",
        "cog_triton.serving.coglet.openapi_schema",
        "predict.py:Predictor",
    ]
    return subprocess.run(
        command, cwd=directory, env={"PYTHONPATH": str(ROOT)}, capture_output=True, check=True
    ).stdout.decode()


def test_command_prints_the_schema(tmp_path: Path) -> None:
    (tmp_path / "predict.py").write_text(
        "from __future__ import annotations\n"
        "from cog import BaseRunner, ConcatenateIterator\n"
        "class Predictor(BaseRunner):\n"
        "    async def run(self, größe: int | None = None) -> ConcatenateIterator[str]:\n"
        "        return iter(())\n"
    )
    text = generate(tmp_path)
    schema = json.loads(text)
    assert text == dumps(schema)
    assert text.endswith("}\n")
    assert text.index('"components"') < text.index('"info"') < text.index('"openapi"')
    assert list(schema["components"]["schemas"]["Input"]["properties"]) == ["größe"]


PROJECTS = [file.parent for file in sorted(ROOT.glob("*/predict.py"))]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_schema_in_the_repository_is_current(project: Path) -> None:
    assert (project / ".cog" / "openapi_schema.json").read_text() == generate(project)


def test_there_are_three_cog_projects() -> None:
    assert {ROOT / "builder", ROOT / "runner", ROOT / "mock_cog_triton"} <= set(PROJECTS)
