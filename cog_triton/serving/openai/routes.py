"""OpenAI API routes: /v1/models, /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cog_triton import errors
from cog_triton.errors import InvalidArgument, NotFound, RequestTooLarge
from cog_triton.serving.generate import Generation, TextGenerator
from cog_triton.serving.generation import GenerationRequest as PlannedRequest
from cog_triton.serving.inbox import LoopInboxes
from cog_triton.serving.openai.chat_plan import ChatPlanner
from cog_triton.serving.openai.error_responses import json_response
from cog_triton.serving.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse,
)
from cog_triton.serving.openai.responses import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    Object,
    ResponseBuilder,
)
from cog_triton.serving.openai.streaming import GenerationResponse
from cog_triton.settings import Settings
from cog_triton.system.log_format import request_id
from cog_triton.text.detokenize import TokenText
from cog_triton.text.stop_strings import WordLimits, parse_stop_sequences
from cog_triton.text.tokenizer import EngineTokenizer

R = TypeVar("R", bound=GenerationRequest)
Prompt = tuple[list[int], Mapping[str, Any]]
"""Token ids, and further fields of the planned request."""


class OpenAIRoutes:
    """The API's endpoints over a `TextGenerator`, for one `model` name."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: EngineTokenizer,
        generator: TextGenerator,
        model: str,
        *,
        guides: bool,
    ) -> None:
        """`guides` says whether the engine supports guided decoding by a JSON Schema."""
        self._settings = settings
        self._stop_limits = WordLimits(settings.max_stop_sequences, settings.max_stop_length)
        self._tokenizer = tokenizer
        self._generator = generator
        self._model = model
        self._planner = ChatPlanner(settings, tokenizer, guides=guides)
        self._token_text = TokenText(tokenizer)
        self._created = int(time.time())
        self._inboxes: LoopInboxes | None = None

    def routes(self) -> list[Route]:
        """The routes for the application."""
        return [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._one_model, methods=["GET"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]

    async def _models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._description()]})

    async def _one_model(self, request: Request) -> Response:
        self._require_model(request.path_params["model"])
        return json_response(self._description())

    async def _chat(self, request: Request) -> Response:
        builder = ChatResponseBuilder(self._model, self._token_text)

        def prompt(chat: ChatRequest) -> Prompt:
            plan = self._planner.plan(chat)
            builder.parser = plan.parser
            special = plan.prompt.add_special_tokens
            ids = self._generator.encode(plan.prompt.text, add_special_tokens=special)
            return ids, {"guide": plan.guide, "visible": plan.visible}

        return await self._answer(request, ChatRequest, prompt, builder)

    async def _complete(self, request: Request) -> Response:
        builder = CompletionResponseBuilder(self._model, self._token_text)
        return await self._answer(request, CompletionRequest, self._plain_prompt, builder)

    async def _answer(
        self,
        request: Request,
        kind: type[R],
        to_prompt: Callable[[R], Prompt],
        builder: ResponseBuilder,
    ) -> Response:
        request_id.set(builder.id)  # this task is of this request alone
        # In a list, so that it is freed as soon as it is parsed.
        raw = [await _body(request, self._settings.max_request_bytes)]
        # A long prompt takes long to parse and encode, and must not block the event loop.
        planned, parsed = await asyncio.to_thread(self._plan, raw, kind, to_prompt, builder)
        if self._inboxes is None:  # this is the event loop
            self._inboxes = LoopInboxes()
        inbox = self._inboxes.new()
        options = parsed.stream_options
        return GenerationResponse(
            Generation(self._generator, planned, inbox),
            inbox,
            builder,
            stream=bool(parsed.stream),
            include_usage=bool(options and options.include_usage),
            usage_so_far=bool(options and options.continuous_usage_stats),
        )

    def _plan(
        self,
        raw: list[bytearray],
        kind: type[R],
        to_prompt: Callable[[R], Prompt],
        builder: ResponseBuilder,
    ) -> tuple[PlannedRequest, R]:
        body = _json(raw.pop())
        self._generator.check_length(_count_ids(body))
        request = parse(kind, body)
        del body
        self._require_model(request.model)
        stops = request.stops()
        if stops is None:
            stops = parse_stop_sequences(self._settings.stop_sequences)
        else:
            self._stop_limits.check("stop", stops)
        ids, others = to_prompt(request)
        if not ids:
            raise errors.PromptRequired("the prompt is blank")
        planned = self._generator.plan(
            ids,
            request.sampling(),
            stops,
            ignore_eos=bool(request.ignore_eos),
            return_log_probs=request.log_probs,
            id=builder.id,
            endpoint=builder.endpoint,
            **others,
        )
        return planned, request

    def _plain_prompt(self, request: CompletionRequest) -> Prompt:
        prompt = request.one_prompt()
        if isinstance(prompt, str):
            if not prompt:
                raise errors.PromptRequired("the prompt is blank")
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise InvalidArgument(f"prompt: not Unicode text: {error.reason}") from None
            return self._generator.encode(prompt), {}
        for token in prompt:
            if not 0 <= token < self._tokenizer.vocab_size:
                raise InvalidArgument(
                    f"prompt: holds {token}; must be from 0 to {self._tokenizer.vocab_size - 1},"
                    " the model's vocabulary"
                )
        return prompt, {}

    def _require_model(self, model: str) -> None:
        if model != self._model:
            raise NotFound(f"model={model[:80]!r}: not served here; the model is {self._model!r}")

    def _description(self) -> Object:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "cog-triton",
            "max_model_len": self._generator.max_seq_len,
            "capabilities": self._planner.abilities,
        }


async def _body(request: Request, limit: int) -> bytearray:
    """Read the body; raises E1008 as soon as it exceeds `limit` bytes, E1005 when it ends early."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(
            415,
            f"Content-Type: {kind[:80]!r}; must be application/json, as of curl -H"
            " 'Content-Type: application/json'",
        )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise RequestTooLarge(f"{length} bytes; at most {limit} are taken (MAX_REQUEST_BYTES)")
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise RequestTooLarge(f"more than {limit} bytes (MAX_REQUEST_BYTES)")
    except ClientDisconnect:
        raise InvalidArgument("the body ended early") from None
    return body


def _json(raw: bytearray) -> Any:
    try:
        return json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError, too
        raise InvalidArgument(f"the body is not JSON: {str(error)[:200]}") from None


def _count_ids(body: Any) -> int:
    """How many token ids the prompt has, before each is checked; 0 for a text."""
    prompt = body.get("prompt") if isinstance(body, dict) else None
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, list) or any(isinstance(item, str) for item in prompt[:1]):
        return 0
    return len(prompt)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
