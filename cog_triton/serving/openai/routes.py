"""OpenAI API routes: models, chats, completions and responses; and Anthropic's messages."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cog_triton import errors
from cog_triton.errors import InvalidArgument
from cog_triton.serving.openai import messages_request, responses_request
from cog_triton.serving.openai.chat_plan import AnswerPlan, ChatPlanner
from cog_triton.serving.openai.embeddings import EmbeddingRoutes
from cog_triton.serving.openai.error_responses import MESSAGES, json_response
from cog_triton.serving.openai.messages_request import NAMES, CountTokensRequest, translate
from cog_triton.serving.openai.request_body import (
    FieldNames,
    check_ids,
)
from cog_triton.serving.openai.requests import (
    ChatRequest,
    CompletionRequest,
    Exact,
    HashableFailFast,
    Messages,
    OpenAIRequest,
    check_abilities,
    check_guide,
    described,
    parse,
    validate,
)
from cog_triton.serving.openai.sequences import (
    ParsedSequences,
    SequencePlan,
    Sequences,
    bound_log_probs,
    check_count,
    plan_sequences,
)
from cog_triton.serving.openai.served_models import (
    ANTHROPIC,
    LOAD,
    UNLOAD,
    AdapterRoutes,
    ServedAPI,
    anthropic_model,
    anthropic_models,
)
from cog_triton.serving.openai.shapes import (
    Answer,
    ChatShape,
    CompletionShape,
    Echo,
    MessageShape,
    Object,
    ResponseShape,
    Shape,
)
from cog_triton.serving.openai.stored_responses import (
    RecordedResponse,
    RunningResponse,
    StoredResponses,
    tenant_name,
)
from cog_triton.serving.openai.streaming import GenerationResponse
from cog_triton.system.log_format import request_id
from cog_triton.system.printable import shortened
from cog_triton.text.chat import require_unicode
from cog_triton.text.detokenize import token_bytes
from cog_triton.text.sampling import MAX_TOKENS, SAMPLING
from cog_triton.text.stop_strings import WordLimits, parse_stop_sequences

_CHAT = ("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")


class TokenizeRequest(Exact):
    """POST /tokenize: a prompt, or a chat as /v1/chat/completions takes it."""

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


class DetokenizeRequest(Exact):
    """POST /detokenize: token ids."""

    model: str | None = None
    tokens: Annotated[list[int], HashableFailFast()] = Field(max_length=1 << 20)


def _asked(
    api: ServedAPI, body: Any, names: FieldNames
) -> tuple[responses_request.StoreFields, responses_request.Translated]:
    """What a response's body asks of the store, and of a chat."""
    parsed = responses_request.read(body)
    given = responses_request.store_fields(parsed, has_store=api.responses is not None)
    earlier: list[Any] = []
    if api.responses is not None and given.previous:
        most = api.settings.max_request_bytes
        earlier = api.responses.conversation(given.previous, tenant_name(), most)
    return given, responses_request.translate(parsed, api.defaults, names, earlier)


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
        names = FieldNames(responses_request.NAMES)
        with names.in_errors():
            chat = {"model": self._models.base, **_asked(self._api, body, names)[1].chat}
            self._require(chat["model"])
            count = len(self._chat_ids(chat, special=False))
        return {"object": "response.input_tokens", "input_tokens": count}

    def _message_tokens(self, body: Any) -> dict[str, Any]:
        names, images = FieldNames(NAMES), self._planner.takes_images
        with names.in_errors():
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


class OpenAIRoutes:
    """All of the API's endpoints."""

    def __init__(self, api: ServedAPI) -> None:
        self._api = api
        settings, self._abilities = api.settings, api.abilities
        self._settings, self._generator, self._models = settings, api.generator, api.models
        self._tokenizer = api.generator.tokenizer
        self._stop_limits = WordLimits(settings.max_stop_sequences)
        self._planner = ChatPlanner(settings, self._tokenizer, self._abilities, api.borrowed)
        self._token_text = cache(partial(token_bytes, self._tokenizer.tokenizer))
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        adapters = AdapterRoutes(self._api)
        return [
            Route("/v1/models", self._list, methods=["GET"]),
            Route("/v1/models/{model:path}", self._one_model, methods=["GET"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/responses", self._respond, methods=["POST"]),
            Route(MESSAGES, self._message, methods=["POST"]),
            Route("/v1/embeddings", EmbeddingRoutes(self._api).embed, methods=["POST"]),
            Route(LOAD, adapters.load, methods=["POST"]),
            Route(UNLOAD, adapters.unload, methods=["POST"]),
            *TokenRoutes(self._api, self._planner).routes(),
            *(StoredResponses(self._api.responses).routes() if self._api.responses else ()),
        ]

    async def _list(self, request: Request) -> Response:
        objects = self._models.objects(self._description())
        if ANTHROPIC in request.headers:
            return json_response(anthropic_models(objects))
        return json_response({"object": "list", "data": objects})

    async def _one_model(self, request: Request) -> Response:
        adapter = self._models.adapter(request.path_params["model"])
        model = self._models.object(self._description(), adapter)
        return json_response(anthropic_model(model) if ANTHROPIC in request.headers else model)

    async def _chat(self, request: Request) -> GenerationResponse:
        return await self._answer(request, ChatRequest, ChatShape(self._models.base))

    async def _complete(self, request: Request) -> GenerationResponse:
        return await self._answer(request, CompletionRequest, CompletionShape(self._models.base))

    async def _message(self, request: Request) -> GenerationResponse:
        shape = MessageShape(self._models.base)
        names = FieldNames(messages_request.NAMES)

        def to_chat(body: Any) -> Object:
            images = self._planner.takes_images
            chat = messages_request.translate(body, images=images, names=names)
            shape.stops = chat.get("stop", ())
            return chat

        return await self._answer(request, ChatRequest, shape, to_chat, names)

    async def _respond(self, request: Request) -> GenerationResponse:
        responses = self._api.responses
        running: RunningResponse | None = None
        background = False
        shape = ResponseShape(self._models.base)
        names = FieldNames(responses_request.NAMES)

        def to_chat(body: Any) -> Object:
            nonlocal running, background
            given, asked = _asked(self._api, body, names)
            background = given.background
            shape.namespaces = asked.namespaces
            shape.echoed = asked.echoed | {
                "store": given.store,
                "background": background,
                "previous_response_id": given.previous,
            }
            if given.store:
                running = RunningResponse(shape.id, tenant_name(), given.previous, given.input)
            return asked.chat

        answer = await self._answer(request, ChatRequest, shape, to_chat, names)
        if responses is None or running is None:
            return answer
        made = answer.sequences, shape, answer.answers, answer.streamed
        return RecordedResponse(*made, responses, running, background)

    async def _answer(
        self,
        request: Request,
        kind: type[OpenAIRequest],
        shape: Shape,
        to_body: Callable[[Any], Any] = lambda value: value,
        names: FieldNames | None = None,
    ) -> GenerationResponse:
        request_id.set(shape.id)  # this task is of this request alone

        def planned(value: Any) -> tuple[OpenAIRequest, SequencePlan, list[Answer]]:
            self._abilities.require_generation()
            with names.in_errors() if names else nullcontext():
                value = to_body(value)
                parsed = parse(kind, value)
                del value
                return parsed, *self._plan(parsed, shape)

        parsed, plan, answers = await self._api.planned(request, planned)
        options, streamed = parsed.stream_options, bool(parsed.stream)
        shape.sends_usage = bool(options and options.include_usage)
        shape.usage_so_far = bool(options and options.continuous_usage_stats)
        streams = [each.stream for each in answers if each.stream is not None]
        sequences = (
            ParsedSequences(self._generator, plan, streams, streamed=streamed)
            if streams
            else Sequences(self._generator, plan)
        )
        return GenerationResponse(sequences, shape, answers, streamed)

    def _plan(self, request: OpenAIRequest, shape: Shape) -> tuple[SequencePlan, list[Answer]]:
        adapter = self._models.adapter(request.model)
        shape.model = request.model
        self._check_count(request)
        check_abilities(request, self._abilities)
        stops = request.stops()
        if stops is None:
            stops = parse_stop_sequences(self._settings.stop_sequences)
        else:
            self._stop_limits.check("stop", stops)
        if isinstance(request, CompletionRequest):
            given = request.prompts()
            prompts = [self._prompt_ids(prompt) for prompt in given]
            form = AnswerPlan(check_guide(request.given_guide(), self._abilities))
        else:
            assert isinstance(request, ChatRequest)
            prompt, form = self._planner.plan(request)
            special = prompt.add_special_tokens
            prompts = [self._generator.encode(prompt.text, add_special_tokens=special)]
        asked, made, shown = request.engine_request(self._api.defaults), request.made, request.shown
        stop_token_ids = self._stop_token_ids(request)
        for item in SAMPLING:
            if item.ids:
                self._check_ids(item.name, getattr(asked.sampling, item.name))
        common = replace(asked, adapter=adapter, guide=form.guide, images=form.images)
        planned = [
            self._generator.plan(
                replace(common, input_ids=ids),
                stops,
                stop_token_ids=stop_token_ids,
                visible=form.visible,
                reasoning=form.reasoning,
                id=shape.id,
                endpoint=shape.endpoint,
                asked_priority=request.priority,
            )
            for ids in prompts
        ]
        if common.return_log_probs:
            limited = request.limit < MAX_TOKENS
            planned = bound_log_probs(planned, made, request.top_log_probs, limited=limited)
        plan = plan_sequences(planned, made, shown, seeded=request.seed not in (None, -1))
        answers = [
            Answer(
                place,
                self._token_text,
                copy.deepcopy(form.parser),
                log_probs=request.log_probs,
                top=request.top_log_probs > 0,
            )
            for place in range(len(plan.requests))
        ]
        if isinstance(request, CompletionRequest) and request.echo:
            alone = request.max_tokens == 0
            for number, ids in enumerate(prompts):
                echo = Echo(self._prompt_text(given[number]), ids[0], alone)
                for answer in answers[number * made : (number + 1) * made]:
                    answer.echo = echo
        return plan, answers

    def _check_count(self, request: OpenAIRequest) -> None:
        limit, admission = self._settings.max_sequences, self._generator.admission
        count = request.prompt_count
        field = "prompt" if count > 1 else "best_of" if request.made > request.shown else "n"
        check_count(field, count, request.made, limit, admission)

    def _stop_token_ids(self, request: OpenAIRequest) -> list[int]:
        ids = request.stop_token_ids or []
        if len(ids) > self._settings.max_stop_sequences:
            raise InvalidArgument(
                f"stop_token_ids: has {len(ids)}; {self._settings.max_stop_sequences} at most"
                " (MAX_STOP_SEQUENCES)"
            )
        self._check_ids("stop_token_ids", ids)
        return ids

    def _prompt_text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return str(self._tokenizer.tokenizer.decode(prompt, skip_special_tokens=True))

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        if not prompt:
            raise errors.PromptRequired("the prompt is blank")
        if isinstance(prompt, str):
            return self._generator.encode(require_unicode("prompt", prompt, InvalidArgument))
        self._generator.check_length(len(prompt))
        self._check_ids("prompt", prompt)
        return prompt

    def _check_ids(self, name: str, tokens: Iterable[int]) -> None:
        check_ids(name, tokens, self._tokenizer.vocab_size)

    def _description(self) -> Object:
        return {
            "id": self._models.base,
            "object": "model",
            "created": self._created,
            "owned_by": "cog-triton",
            "max_model_len": self._generator.max_seq_len,
            "generation_config": dict(self._api.defaults),
            "capabilities": {
                "generation": self._abilities.generation,
                "embeddings": self._abilities.embeddings,
                **self._planner.abilities,
                **described(self._abilities),
                "sequences": self._settings.max_sequences,
            },
        }
