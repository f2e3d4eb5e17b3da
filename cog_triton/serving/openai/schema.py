"""OpenAPI schema of our own HTTP server, from the models that requests are parsed with."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter

from cog_triton import __version__
from cog_triton.serving.openai.embeddings import EmbeddingsRequest
from cog_triton.serving.openai.error_responses import MESSAGES
from cog_triton.serving.openai.request_fields import FunctionName
from cog_triton.serving.openai.requests import ChatRequest, CompletionRequest
from cog_triton.serving.openai.served_models import (
    LOAD,
    UNLOAD,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from cog_triton.serving.openai.token_routes import DetokenizeRequest, TokenizeRequest
from cog_triton.text import chat

_REF = "#/components/schemas/{model}"
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string", "pattern": "^(E[12][0-9]{3}|[a-z_]+)$"},
            },
        }
    },
}
_TEXT = {"type": "string"}
_FUNCTION_NAME = TypeAdapter(FunctionName).json_schema()
_MESSAGES_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"type": "string", "const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT},
        },
    },
}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"type": "string", "const": "text"}, "text": _TEXT},
}
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": _TEXT,
        "type": {"type": "string", "const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": _TEXT, "arguments": _TEXT},
        },
    },
}
_MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "enum": list(chat.ROLES)},
            "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}, {"type": "null"}]},
            "name": _TEXT,
            "reasoning_content": _TEXT,
            "tool_calls": {"type": "array", "items": _CALL},
            "tool_call_id": _TEXT,
        },
    },
}


_RESPONSES_REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["model", "input"],
    "properties": {
        "model": _TEXT,
        "input": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]},
        "instructions": _TEXT,
        "max_output_tokens": {"type": "integer", "minimum": 1},
        "tools": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "name"],
                "properties": {"type": {"const": "function"}, "name": _FUNCTION_NAME},
            },
        },
        "text": {"type": "object"},
        "stream": {"type": "boolean"},
        "store": {"type": "boolean"},
        "background": {"type": "boolean"},
        "previous_response_id": _TEXT,
    },
}
_RESPONSE = "/v1/responses/{response_id}"
_STREAMED = (
    {"in": "query", "name": "stream", "schema": {"type": "boolean"}},
    {"in": "query", "name": "starting_after", "schema": {"type": "integer", "minimum": 0}},
)
_PAGED = (
    {"in": "query", "name": "limit", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    {"in": "query", "name": "order", "schema": {"type": "string", "enum": ["asc", "desc"]}},
    {"in": "query", "name": "after", "schema": _TEXT},
)
_MESSAGES_REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["model", "max_tokens", "messages"],
    "properties": {
        "model": _TEXT,
        "max_tokens": {"type": "integer", "minimum": 1},
        "messages": {"type": "array", "minItems": 1, "items": {"type": "object"}},
        "system": {"anyOf": [_TEXT, {"type": "array", "items": _PART}]},
        "stop_sequences": {"type": "array", "items": _TEXT},
        "tools": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "input_schema"],
                "properties": {"name": _FUNCTION_NAME, "input_schema": {"type": "object"}},
            },
        },
        "tool_choice": {"type": "object"},
        "thinking": {"type": "object"},
        "output_config": {"type": "object"},
        "stream": {"type": "boolean"},
    },
}
_COUNT_REQUEST = {**_MESSAGES_REQUEST, "required": ["model", "messages"]}
_MODELS = (
    ChatRequest,
    CompletionRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    TokenizeRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
)


@lru_cache(maxsize=1)
def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    schemas: dict[str, Any] = {
        "Error": _ERROR,
        "MessagesError": _MESSAGES_ERROR,
        "ResponsesRequest": _RESPONSES_REQUEST,
        "MessagesRequest": _MESSAGES_REQUEST,
        "CountTokensRequest": _COUNT_REQUEST,
    }
    for model in _MODELS:
        schema = model.model_json_schema(ref_template=_REF)
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    schemas["ChatRequest"]["properties"]["messages"] = _MESSAGES
    schemas["TokenizeRequest"]["oneOf"] = [
        {"required": [name], "properties": {name: kind, other: {"type": "null"}}}
        for name, kind, other in (("prompt", _TEXT, "messages"), ("messages", _MESSAGES, "prompt"))
    ]
    name = {"in": "path", "name": "model", "required": True, "schema": {"type": "string"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "cog-triton", "version": __version__},
        "paths": {
            "/v1/models": {"get": _operation("The models that are served", "401")},
            "/v1/models/{model}": {
                "get": {**_operation("The model", "401", "404"), "parameters": [name]}
            },
            "/v1/chat/completions": {"post": _post("Answer a chat", "ChatRequest")},
            "/v1/completions": {"post": _post("Complete a text", "CompletionRequest")},
            "/v1/responses": {"post": _post("Answer, and keep it", "ResponsesRequest")},
            _RESPONSE: {
                "get": _of_response("A response that is kept", _STREAMED),
                "delete": _of_response("Delete it"),
            },
            f"{_RESPONSE}/cancel": {"post": _of_response("End it while it is made")},
            f"{_RESPONSE}/input_items": {"get": _of_response("Items of its input", _PAGED)},
            "/v1/responses/input_tokens": {"post": _post("Tokens of input", "ResponsesRequest")},
            MESSAGES: {
                "post": _post("Answer, as Anthropic's API", "MessagesRequest", "MessagesError")
            },
            f"{MESSAGES}/count_tokens": {
                "post": _post("Tokens of a message", "CountTokensRequest", "MessagesError")
            },
            "/v1/embeddings": {"post": _post("Embed texts", "EmbeddingsRequest")},
            LOAD: {"post": _post("Load a LoRA adapter", "LoadAdapterRequest", text=True)},
            UNLOAD: {"post": _post("Unload a LoRA adapter", "UnloadAdapterRequest", text=True)},
            "/tokenize": {"post": _post("Tokens of a text or chat", "TokenizeRequest")},
            "/detokenize": {"post": _post("Text of tokens", "DetokenizeRequest")},
            "/version": {"get": _operation("The server's version", "401")},
            "/health": {"get": _operation("Whether requests are served", "503")},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"x-api-key": []}],
    }


def _operation(summary: str, *errors: str) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": _json({"type": "object"}), **_errors(errors)}}


def _of_response(summary: str, queries: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    name = {"in": "path", "name": "response_id", "required": True, "schema": {"type": "string"}}
    codes = ("400", "401", "404", "500")
    return {**_operation(summary, *codes), "parameters": [name, *queries]}


def _post(summary: str, model: str, error: str = "Error", *, text: bool = False) -> dict[str, Any]:
    """A request that is answered by an object or events, or by plain `text`."""
    codes = ("400", "401", "404", "413", "415", "429", "500", "503", "504")
    answer = _json({"type": "object"})
    answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    if text:
        answer["content"] = {"text/plain": {"schema": {"type": "string"}}}
    schema = {"$ref": _REF.format(model=model)}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": answer, **_errors(codes, error)},
    }


def _errors(codes: tuple[str, ...], error: str = "Error") -> dict[str, Any]:
    return {code: _json({"$ref": _REF.format(model=error)}) for code in codes}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "", "content": {"application/json": {"schema": schema}}}
