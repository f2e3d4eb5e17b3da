"""OpenAPI schema that coglet validates requests with and serves at /openapi.json.

``python -m cog_triton.serving.coglet.openapi_schema predict.py:Predictor`` prints what
``cog build`` writes to .cog/openapi_schema.json. Without the file coglet checks no input and
refuses to stream. Cog's own introspection reads inputs and output from the predictor's signature.
The rest is the same for every model; the builder's and the runner's files have it, to be edited.

Two limits of coglet 0.23.1: its validator ignores `nullable`, so an optional input says so in its
`type`, as in OpenAPI 3.1; and inputs that are not in `Input.properties` are removed from a request
before validation, with a warning in the server's log, so no schema can reject them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cog
from cog._adt import InputField, OutputKind, Repetition
from cog._inspector import create_predictor
from cog.predictor import load_predictor_from_ref

from cog_triton.errors import InvalidArgument
from cog_triton.system.paths import cog_project

_OPTIONAL = (Repetition.OPTIONAL, Repetition.OPTIONAL_REPEATED)


def schema_for(reference: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document for the predictor that ``predict.py:Predictor``, say, names."""
    file, _, name = reference.rpartition(":")
    try:
        load_predictor_from_ref(reference)  # makes the file a module of its name
        info = create_predictor(Path(file).stem, name)
    except (ImportError, OSError, AttributeError, ValueError) as error:
        raise InvalidArgument(f"predictor={reference!r}: {error}") from error
    streams = info.output.kind in (OutputKind.ITERATOR, OutputKind.CONCAT_ITERATOR)
    project = cog_project("builder" if streams else "runner")  # not the file that `>` has emptied
    document: dict[str, Any] = json.loads((project / ".cog/openapi_schema.json").read_bytes())
    document["info"]["version"] = cog.__version__
    fields = info.inputs.values()
    required = [f.name for f in fields if f.default is None and f.type.repetition not in _OPTIONAL]
    inputs = {"title": "Input", "type": "object"} | _given(required=required or None)
    document["components"]["schemas"] |= {
        "Input": inputs | {"properties": {field.name: _property(field) for field in fields}},
        "Output": info.output.json_type(),
    }
    for path, method in (("/predictions", "post"), ("/predictions/{prediction_id}", "put")):
        operation = document["paths"][path][method]
        content = operation["responses"]["200"]["content"]
        if streams:
            operation["x-cog-streaming"] = True
            content["text/event-stream"] = {"schema": {"type": "string"}}
        else:
            del operation["x-cog-streaming"], content["text/event-stream"]
    return document


def _property(field: InputField) -> dict[str, Any]:
    schema: dict[str, Any] = field.type.json_type()
    target = schema.get("items", schema)  # a list's constraints are those of its items
    bounds = _given(minimum=field.ge, maximum=field.le)  # floats for Cog
    target |= {name: int(value) if value == int(value) else value for name, value in bounds.items()}
    target |= _given(minLength=field.min_length, maxLength=field.max_length)
    target |= _given(pattern=field.regex, enum=field.choices)
    if field.type.repetition in _OPTIONAL:
        schema["nullable"] = True  # for readers of OpenAPI 3.0
        if "anyOf" in schema:
            schema["anyOf"].append({"type": "null"})
        else:
            schema["type"] = [schema["type"], "null"]
        if "enum" in schema:
            schema["enum"] = [*schema["enum"], None]
    title = field.name.replace("_", " ").title()
    schema |= {"title": title, "x-order": field.order} | _given(description=field.description)
    return schema | _given(default=field.default, deprecated=field.deprecated)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m cog_triton.serving.coglet.openapi_schema predict.py:Predictor")
    print(json.dumps(schema_for(sys.argv[1]), indent=2, sort_keys=True, ensure_ascii=False))
