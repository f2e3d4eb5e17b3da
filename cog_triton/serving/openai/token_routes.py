"""Tokens of a text or chat, and their text, in vLLM's form: /tokenize and /detokenize.

And the number of those of a message, in Anthropic's, and of a response's input, in OpenAI's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cog_triton.errors import InvalidArgument
from cog_triton.serving.openai import responses_request
from cog_triton.serving.openai.chat_plan import ChatPlanner
from cog_triton.serving.openai.error_responses import MESSAGES, json_response
from cog_triton.serving.openai.field_names import FieldNames
from cog_triton.serving.openai.messages_request import NAMES, CountTokensRequest, translate
from cog_triton.serving.openai.request_body import check_ids
from cog_triton.serving.openai.request_fields import HashableFailFast
from cog_triton.serving.openai.requests import ChatRequest, Messages, parse, validate
from cog_triton.serving.openai.served_models import ServedAPI
from cog_triton.serving.openai.stored_responses import tenant_name
from cog_triton.system.printable import shortened
from cog_triton.text.chat import require_unicode

_CHAT = ("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")


class TokenizeRequest(BaseModel):
    """POST /tokenize: a prompt, or a chat as /v1/chat/completions takes it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    tools: Any = None
    tool_choice: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize: token ids."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: Annotated[list[int], HashableFailFast()] = Field(max_length=1 << 20)


class TokenRoutes:
    """The endpoints, for one model and its adapters."""

    def __init__(self, api: ServedAPI, planner: ChatPlanner) -> None:
        self._api = api
        self._generator, self._models = api.generator, api.models
        self._tokenizer = api.generator.tokenizer
        self._planner = planner

    def routes(self) -> list[Route]:
        made = {
            "/tokenize": self._tokens,
            "/detokenize": self._text,
            f"{MESSAGES}/count_tokens": self._message_tokens,
            "/v1/responses/input_tokens": self._input_tokens,
        }
        return [
            Route(path, partial(self._answer, make), methods=["POST"])
            for path, make in made.items()
        ]

    async def _answer(self, make: Callable[[Any], Any], request: Request) -> Response:
        return json_response(await self._api.planned(request, make))

    def _input_tokens(self, body: Any) -> dict[str, Any]:
        responses, names = self._api.responses, FieldNames(responses_request.NAMES)
        with names.told():
            parsed = responses_request.read(body)
            given = responses_request.store_fields(parsed, has_store=responses is not None)
            earlier: list[Any] = []
            if responses is not None and given.previous:
                most = self._api.settings.max_request_bytes
                earlier = responses.conversation(given.previous, tenant_name(), most)
            chat = responses_request.translate(parsed, names=names, earlier=earlier).chat
            chat = {"model": self._models.base, **chat}
            self._require(chat["model"])
            count = len(self._chat_ids(chat, special=False))
        return {"object": "response.input_tokens", "input_tokens": count}

    def _message_tokens(self, body: Any) -> dict[str, Any]:
        names, images = FieldNames(NAMES), self._planner.takes_images
        with names.told():
            chat = translate(body, images=images, kind=CountTokensRequest, names=names)
            self._require(chat["model"])
            return {"input_tokens": len(self._chat_ids(chat, special=False))}

    def _chat_ids(self, chat: dict[str, Any], *, special: bool) -> list[int]:
        prompt, plan = self._planner.plan(parse(ChatRequest, chat))
        if plan.images:
            raise InvalidArgument("messages: only the engine knows the tokens of images")
        return self._generator.encode(prompt.text, add_special_tokens=special)

    def _tokens(self, body: Any) -> dict[str, Any]:
        request = validate(TokenizeRequest, body)
        self._require(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidArgument("prompt: send either a prompt or messages")
        if request.prompt is not None:
            special = request.add_special_tokens is not False
            text = require_unicode("prompt", request.prompt, InvalidArgument)
            ids = self._generator.encode(text, add_special_tokens=special)
        else:
            given = {name: getattr(request, name) for name in _CHAT}
            chat = {name: value for name, value in given.items() if value is not None}
            special = bool(request.add_special_tokens)
            ids = self._chat_ids({"model": self._models.base, **chat}, special=special)
        tokenizer = self._tokenizer.tokenizer
        return {
            "count": len(ids),
            "max_model_len": self._generator.max_seq_len,
            "tokens": ids,
            "token_strs": [tokenizer.id_to_token(token) for token in ids]
            if request.return_token_strs
            else None,
        }

    def _text(self, body: Any) -> dict[str, Any]:
        request = validate(DetokenizeRequest, body)
        self._require(request.model)
        check_ids("tokens", request.tokens, self._tokenizer.vocab_size)
        text = self._tokenizer.tokenizer.decode(request.tokens, skip_special_tokens=False)
        return {"prompt": text}

    def _require(self, model: Any) -> None:
        if model is not None:
            if not isinstance(model, str):
                raise InvalidArgument(f"model={shortened(model)}: must be text")
            self._models.adapter(model)
