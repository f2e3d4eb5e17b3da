"""OpenAPI document of our own HTTP server, from the models that requests are parsed with."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from cog_triton import __version__
from cog_triton.serving.openai.embeddings import EmbeddingsRequest
from cog_triton.serving.openai.error_responses import MESSAGES
from cog_triton.serving.openai.messages_request import CountTokensRequest, MessagesRequest
from cog_triton.serving.openai.requests import ChatRequest, CompletionRequest
from cog_triton.serving.openai.responses_request import ResponsesRequest
from cog_triton.serving.openai.routes import DetokenizeRequest, TokenizeRequest
from cog_triton.serving.openai.served_models import (
    LOAD,
    UNLOAD,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)

Object = dict[str, Any]
_REF = "#/components/schemas/{model}"


class OpenAIError(BaseModel):
    """An error, as OpenAI has it."""

    message: str
    type: str
    param: str | None
    code: str = Field(pattern="^(E[12][0-9]{3}|[a-z_]+)$")


class Error(BaseModel):
    """Body of an answer that is an error."""

    error: OpenAIError


class AnthropicError(BaseModel):
    """An error, as Anthropic has it."""

    type: str
    message: str


class MessagesError(BaseModel):
    """Body of an answer that is an error, of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicError


_POSTS: dict[str, tuple[str, type[BaseModel]]] = {
    "/v1/chat/completions": ("Answer a chat", ChatRequest),
    "/v1/completions": ("Complete a text", CompletionRequest),
    "/v1/responses": ("Answer, and store it", ResponsesRequest),
    "/v1/responses/input_tokens": ("Tokens of input", ResponsesRequest),
    MESSAGES: ("Answer, as Anthropic's API", MessagesRequest),
    f"{MESSAGES}/count_tokens": ("Tokens of a message", CountTokensRequest),
    "/v1/embeddings": ("Embed texts", EmbeddingsRequest),
    LOAD: ("Load a LoRA adapter", LoadAdapterRequest),
    UNLOAD: ("Unload a LoRA adapter", UnloadAdapterRequest),
    "/tokenize": ("Tokens of a text or chat", TokenizeRequest),
    "/detokenize": ("Text of tokens", DetokenizeRequest),
}
_RESPONSE = "/v1/responses/{response_id}"
# Method, path and summary, names and types of the query's parameters.
_OTHERS: tuple[tuple[str, str, str, Object], ...] = (
    ("get", "/v1/models", "The models that are served", {}),
    ("get", "/v1/models/{model}", "The model", {}),
    ("get", _RESPONSE, "A stored response", {"stream": "boolean", "starting_after": "integer"}),
    ("delete", _RESPONSE, "Delete it", {}),
    ("post", f"{_RESPONSE}/cancel", "End it while it is made", {}),
    (
        *("get", f"{_RESPONSE}/input_items", "Items of its input"),
        {"limit": "integer", "order": "string", "after": "string"},
    ),
    ("get", "/version", "The server's version", {}),
    ("get", "/health", "Whether requests are served", {}),
)


@lru_cache(maxsize=1)
def openapi() -> Object:
    """The OpenAPI 3.1 document."""
    models = [Error, MessagesError, *(model for _, model in _POSTS.values())]
    unique = [(model, "validation") for model in dict.fromkeys(models)]
    _, found = models_json_schema(unique, ref_template=_REF)  # type: ignore[arg-type]
    paths: dict[str, Object] = {}
    for path, (summary, model) in _POSTS.items():
        body = {"required": True, "content": _json(_reference(model))}
        paths[path] = {"post": {**_operation(path, summary), "requestBody": body}}
    for method, path, summary, queries in _OTHERS:
        named = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        parameters = [
            *({"in": "path", "name": name, "required": True, **_typed("string")} for name in named),
            *({"in": "query", "name": name, **_typed(kind)} for name, kind in queries.items()),
        ]
        operation = {**_operation(path, summary), "parameters": parameters}
        paths.setdefault(path, {})[method] = operation
    keys = {
        "key": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "cog-triton", "version": __version__},
        "paths": paths,
        "components": {"schemas": found["$defs"], "securitySchemes": keys},
        "security": [{}, *({name: []} for name in keys)],
    }


def _operation(path: str, summary: str) -> Object:
    """An operation that is answered by an object, events or text, or any error."""
    error = MessagesError if path.startswith(MESSAGES) else Error
    answer = {"application/json": _typed("object"), "text/event-stream": _typed("string")}
    if path in (LOAD, UNLOAD):
        answer = {"text/plain": _typed("string")}
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer", "content": answer},
            "default": {"description": "An error", "content": _json(_reference(error))},
        },
    }


def _typed(kind: str) -> Object:
    return {"schema": {"type": kind}}


def _json(schema: Object) -> Object:
    return {"application/json": {"schema": schema}}


def _reference(model: type[BaseModel]) -> Object:
    return {"$ref": _REF.format(model=model.__name__)}
