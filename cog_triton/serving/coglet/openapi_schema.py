"""OpenAPI schema that coglet validates requests with and serves at /openapi.json.

``python -m cog_triton.serving.coglet.openapi_schema predict.py:Predictor`` prints what
``cog build`` writes to .cog/openapi_schema.json. Without the file coglet checks no input and
refuses to stream. Inputs and output are read from the predictor's signature by Cog's own
introspection, so both sides agree on types; the rest is the same for every model.

Two limits of coglet 0.23.1: its validator ignores `nullable`, so an optional input says so in its
`type`, as in OpenAPI 3.1; and inputs that are not in `Input.properties` are removed from a request
before validation, with a warning in the server's log, so no schema can reject them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import cog
from cog._adt import InputField, OutputKind, Repetition
from cog._inspector import create_predictor

from cog_triton.errors import InvalidArgument

_OPTIONAL = (Repetition.OPTIONAL, Repetition.OPTIONAL_REPEATED)
_STREAMED = (OutputKind.ITERATOR, OutputKind.CONCAT_ITERATOR)
_TIME = {"type": "string", "format": "date-time"}
_OBJECT = {"type": "object", "additionalProperties": True}


def schema_for(predictor: type) -> dict[str, Any]:
    """The OpenAPI 3.1 document for a predictor class with a `run` or `predict` method.

    Raises ValueError, as Cog does when it loads the class, for a signature Cog cannot serve.
    """
    info = create_predictor(predictor.__module__, predictor.__name__)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Cog", "version": cog.__version__},
        "paths": _paths(streaming=info.output.kind in _STREAMED),
        "components": {
            "schemas": {
                "Input": _input(list(info.inputs.values())),
                "Output": info.output.json_type(),
                "PredictionRequest": _request(),
                "PredictionResponse": _response(),
                "Status": _enum(["starting", "processing", "succeeded", "canceled", "failed"]),
                "WebhookEvent": _enum(["start", "output", "logs", "completed"]),
                "ValidationError": _validation_error(),
            }
        },
    }


def load(reference: str) -> type:
    """Import the class that a reference such as ``predict.py:Predictor`` names."""
    file, _, name = reference.rpartition(":")
    path = Path(file)
    if not file or not name or path.suffix != ".py" or not path.is_file():
        raise InvalidArgument(f"predictor={reference!r}: must be <existing file>.py:<class>")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"predictor={reference!r}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Cog imports the class's module again, by its name
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise InvalidArgument(f"predictor={reference!r}: {file} has no class {name}")
    return found


def dumps(schema: dict[str, Any]) -> str:
    """The schema as JSON text for the repository: sorted, indented, ending in a newline."""
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _input(fields: list[InputField]) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "title": "Input",
        "type": "object",
        "properties": {field.name: _property(field) for field in fields},
    }
    required = [field.name for field in fields if _is_required(field)]
    return schema | ({"required": required} if required else {})


def _is_required(field: InputField) -> bool:
    return field.default is None and field.type.repetition not in _OPTIONAL


def _property(field: InputField) -> dict[str, Any]:
    schema: dict[str, Any] = field.type.json_type()
    target = schema.get("items", schema)  # a list's constraints are those of its items
    constraints = {
        "minimum": _number(field.ge),
        "maximum": _number(field.le),
        "minLength": field.min_length,
        "maxLength": field.max_length,
        "pattern": field.regex,
        "enum": field.choices,
    }
    target.update({key: value for key, value in constraints.items() if value is not None})
    if field.type.repetition in _OPTIONAL:
        _allow_null(schema)
    described = {
        "title": field.name.replace("_", " ").title(),
        "x-order": field.order,
        "description": field.description,
        "default": field.default,
        "deprecated": field.deprecated,
    }
    return schema | {key: value for key, value in described.items() if value is not None}


def _allow_null(schema: dict[str, Any]) -> None:
    schema["nullable"] = True  # for readers of OpenAPI 3.0
    if "anyOf" in schema:
        schema["anyOf"].append({"type": "null"})
    else:
        schema["type"] = [schema["type"], "null"]
    if "enum" in schema:
        schema["enum"] = [*schema["enum"], None]


def _number(value: float | None) -> float | None:
    """`value`, as an integer if it is whole: Cog keeps every bound as a float."""
    return int(value) if value is not None and value == int(value) else value


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _enum(values: list[str]) -> dict[str, Any]:
    return {"type": "string", "enum": values}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema | ({"required": list(required)} if required else {})


def _request() -> dict[str, Any]:
    properties = {
        "id": {"type": "string", "nullable": True},
        "input": _ref("Input"),
        "context": _OBJECT,
        "webhook": {"type": "string", "format": "uri", "nullable": True},
        "webhook_events_filter": {"type": "array", "items": _ref("WebhookEvent")},
    }
    return _object(properties)


def _response() -> dict[str, Any]:
    properties = {
        "id": {"type": "string", "nullable": True},
        "input": _ref("Input"),
        "output": _ref("Output"),
        "status": _ref("Status"),
        "error": {"type": "string", "nullable": True},
        "logs": {"type": "string"},
        "metrics": _OBJECT,
        "created_at": _TIME,
        "started_at": _TIME,
        "completed_at": _TIME,
    }
    return _object(properties)


def _validation_error() -> dict[str, Any]:
    item = _object({"loc": {"type": "array", "items": {}}, "msg": {"type": "string"}})
    return _object({"detail": {"type": "array", "items": item}})


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _operation(summary: str, answer: dict[str, Any], *path: str) -> dict[str, Any]:
    answers = {"200": {"description": "Success", "content": _content(answer)}}
    operation: dict[str, Any] = {"summary": summary, "responses": answers}
    if path:
        operation["parameters"] = [
            {"in": "path", "name": name, "required": True, "schema": {"type": "string"}}
            for name in path
        ]
    return operation


def _prediction(summary: str, streaming: bool, *path: str) -> dict[str, Any]:
    operation = _operation(summary, _ref("PredictionResponse"), *path)
    operation["requestBody"] = {"content": _content(_ref("PredictionRequest"))}
    invalid = {"description": "Invalid input", "content": _content(_ref("ValidationError"))}
    operation["responses"]["422"] = invalid
    if streaming:
        streamed = {"text/event-stream": {"schema": {"type": "string"}}}
        operation["responses"]["200"]["content"] |= streamed
        operation["x-cog-streaming"] = True
    return operation


def _status(summary: str) -> dict[str, Any]:
    """Of the server, which the front door refuses while it starts or stops."""
    operation = _operation(summary, _OBJECT)
    refused = _object({"error": {"type": "string"}, "status": {"type": "string"}})
    operation["responses"]["503"] = {"description": "Not serving", "content": _content(refused)}
    return operation


def _paths(*, streaming: bool) -> dict[str, Any]:
    one = "/predictions/{prediction_id}"
    return {
        "/": {"get": _status("Root")},
        "/health-check": {"get": _status("Health")},
        "/predictions": {"post": _prediction("Predict", streaming)},
        one: {"put": _prediction("Predict, once per id", streaming, "prediction_id")},
        f"{one}/cancel": {"post": _operation("Cancel", _OBJECT, "prediction_id")},
        "/shutdown": {"post": _operation("Shut down", _OBJECT)},
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m cog_triton.serving.coglet.openapi_schema predict.py:Predictor")
    sys.stdout.write(dumps(schema_for(load(sys.argv[1]))))
