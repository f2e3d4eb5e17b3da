"""OpenAI API routes: models, chats, completions and responses; and Anthropic's messages."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cog_triton import errors
from cog_triton.errors import InvalidArgument
from cog_triton.pictures.image_limits import ImagePart
from cog_triton.serving.openai import messages_request, responses_request
from cog_triton.serving.openai.chat_plan import ChatPlan, ChatPlanner
from cog_triton.serving.openai.choices import (
    ChatChoiceBuilder,
    ChoiceBuilder,
    CompletionChoiceBuilder,
    Echo,
)
from cog_triton.serving.openai.embeddings import EmbeddingRoutes
from cog_triton.serving.openai.envelope import (
    ANTHROPIC,
    CompletionEnvelope,
    Envelope,
    MessageEnvelope,
    Object,
    ResponseEnvelope,
    anthropic_model,
    anthropic_models,
)
from cog_triton.serving.openai.error_responses import MESSAGES, json_response
from cog_triton.serving.openai.field_names import FieldNames
from cog_triton.serving.openai.message_choice import MessageChoiceBuilder
from cog_triton.serving.openai.parsed_sequences import ParsedSequences
from cog_triton.serving.openai.request_body import (
    check_ids,
    longest_id_list,
)
from cog_triton.serving.openai.request_fields import check_guide
from cog_triton.serving.openai.requests import (
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    check_abilities,
    described,
    parse,
)
from cog_triton.serving.openai.response_choice import ResponseChoiceBuilder
from cog_triton.serving.openai.response_store import Recording
from cog_triton.serving.openai.sequences import (
    SequencePlan,
    Sequences,
    bound_log_probs,
    check_count,
    plan_sequences,
)
from cog_triton.serving.openai.served_models import LOAD, UNLOAD, AdapterRoutes, ServedAPI
from cog_triton.serving.openai.stored_responses import (
    RecordedResponse,
    StoredResponses,
    tenant_name,
)
from cog_triton.serving.openai.streaming import GenerationResponse
from cog_triton.serving.openai.token_routes import TokenRoutes
from cog_triton.system.log_format import request_id
from cog_triton.text.chat import require_unicode
from cog_triton.text.detokenize import token_bytes
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import MAX_TOKENS, SAMPLING
from cog_triton.text.stop_strings import WordLimits, parse_stop_sequences

R = TypeVar("R", bound=OpenAIRequest)


class Prompts(NamedTuple):
    """Token ids of each prompt, builders by choice, and what the answers are made with.

    `images` are of the one prompt, `visible` the special tokens that are part of the text;
    `reasoning` is as in `ChatPlan`.
    """

    ids: Sequence[list[int]]
    builder: Callable[[int], ChoiceBuilder]
    guide: Guide | None = None
    images: tuple[ImagePart, ...] = ()
    visible: Collection[str] = ()
    reasoning: tuple[str, str, bool] | None = None

    @classmethod
    def of_chat(
        cls, plan: ChatPlan, ids: list[int], builder: Callable[[int], ChoiceBuilder]
    ) -> Self:
        """The only prompt of a chat."""
        return cls([ids], builder, plan.guide, plan.images, plan.visible, plan.reasoning)


class OpenAIRoutes:
    """All of the API's endpoints."""

    def __init__(self, api: ServedAPI) -> None:
        self._api = api
        settings, self._abilities = api.settings, api.abilities
        self._settings, self._generator, self._models = settings, api.generator, api.models
        self._tokenizer = api.generator.tokenizer
        self._stop_limits = WordLimits(settings.max_stop_sequences, settings.max_stop_length)
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
            *(StoredResponses(self._api.store).routes() if self._api.store else ()),
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
        envelope = Envelope(self._models.base)

        def prompts(chat: ChatRequest) -> Prompts:
            plan, ids = self._chat_plan(chat)
            texts, log_probs = self._token_text, chat.log_probs

            def builder(index: int) -> ChoiceBuilder:
                parser = copy.deepcopy(plan.parser)
                return ChatChoiceBuilder(envelope, index, texts, log_probs=log_probs, parser=parser)

            return Prompts.of_chat(plan, ids, builder)

        return await self._answer(request, ChatRequest, prompts, envelope)

    async def _respond(self, request: Request) -> GenerationResponse:
        store = self._api.store
        recording: Recording | None = None
        background = False
        namespaces: Mapping[str, tuple[str, str]] = {}
        envelope = ResponseEnvelope(self._models.base)
        names = FieldNames(responses_request.NAMES)

        def to_chat(body: Any) -> Object:
            nonlocal recording, background, namespaces
            given = responses_request.store_fields(body, has_store=store is not None)
            tenant, background = tenant_name(), given.background
            earlier: Sequence[Any] = ()
            if store is not None and given.previous:
                most = self._settings.max_request_bytes
                earlier = store.conversation(given.previous, tenant, most)
            asked = responses_request.translate(body, self._api.defaults, names, earlier)
            namespaces = asked.namespaces
            envelope.echoed = asked.echoed | {
                "store": given.store,
                "background": background,
                "previous_response_id": given.previous,
            }
            if given.store:
                streamed = background or bool(asked.chat.get("stream"))
                name, previous = envelope.id, given.previous
                recording = Recording(name, tenant, previous, given.input, streamed)
            return asked.chat

        def prompts(chat: ChatRequest) -> Prompts:
            plan, ids = self._chat_plan(chat)
            builder = ResponseChoiceBuilder(
                envelope, self._token_text, len(ids), plan.parser, namespaces
            )
            return Prompts.of_chat(plan, ids, lambda _: builder)

        answer = await self._answer(request, ChatRequest, prompts, envelope, to_chat, names)
        if store is None or recording is None:
            return answer
        return RecordedResponse(
            answer.sequences,
            envelope,
            answer.builders,
            answer.streamed,
            answer.usage_so_far,
            store,
            recording,
            background,
        )

    async def _message(self, request: Request) -> GenerationResponse:
        envelope = MessageEnvelope(self._models.base)
        names = FieldNames(messages_request.NAMES)

        def to_chat(body: Any) -> Object:
            images = self._planner.takes_images
            return messages_request.translate(body, images=images, names=names)

        def prompts(chat: ChatRequest) -> Prompts:
            plan, ids = self._chat_plan(chat)
            stops = chat.stops() or ()
            parser = plan.parser
            builder = MessageChoiceBuilder(envelope, self._token_text, len(ids), stops, parser)
            return Prompts.of_chat(plan, ids, lambda _: builder)

        return await self._answer(request, ChatRequest, prompts, envelope, to_chat, names)

    def _chat_plan(self, chat: ChatRequest) -> tuple[ChatPlan, list[int]]:
        plan = self._planner.plan(chat)
        special = plan.prompt.add_special_tokens
        return plan, self._generator.encode(plan.prompt.text, add_special_tokens=special)

    async def _complete(self, request: Request) -> GenerationResponse:
        envelope = CompletionEnvelope(self._models.base)

        def prompts(completion: CompletionRequest) -> Prompts:
            def builder(index: int) -> ChoiceBuilder:
                return CompletionChoiceBuilder(
                    envelope,
                    index,
                    self._token_text,
                    log_probs=completion.log_probs,
                    top_log_probs=completion.top_log_probs,
                    echo=echoes[index // completion.made] if echoes else None,
                )

            given = completion.prompts()
            ids = [self._prompt_ids(prompt) for prompt in given]
            alone = completion.max_tokens == 0
            echoes = [
                Echo(self._prompt_text(prompt), prompt_ids[0], alone)
                for prompt, prompt_ids in zip(given, ids, strict=True)
                if completion.echo
            ]
            guide = check_guide(completion.given_guide(), self._abilities)
            return Prompts(ids, builder, guide)

        return await self._answer(request, CompletionRequest, prompts, envelope)

    async def _answer(
        self,
        request: Request,
        kind: type[R],
        to_prompts: Callable[[R], Prompts],
        envelope: Envelope,
        to_body: Callable[[Any], Any] = lambda value: value,
        names: FieldNames | None = None,
    ) -> GenerationResponse:
        request_id.set(envelope.id)  # this task is of this request alone

        def planned(value: Any) -> tuple[R, SequencePlan, list[ChoiceBuilder]]:
            self._abilities.require_generation()
            with names.told() if names else nullcontext():
                value = to_body(value)
                self._generator.check_length(longest_id_list(value))
                parsed = parse(kind, value)
                del value
                return parsed, *self._plan(parsed, to_prompts, envelope)

        parsed, plan, builders = await self._api.planned(request, planned)
        options = parsed.stream_options
        envelope.tells_usage = bool(options and options.include_usage)
        streams = [each.stream for each in builders if each.stream is not None]
        return GenerationResponse(
            ParsedSequences(self._generator, plan, streams, streamed=bool(parsed.stream))
            if streams
            else Sequences(self._generator, plan),
            envelope,
            builders,
            streamed=bool(parsed.stream),
            usage_so_far=bool(options and options.continuous_usage_stats),
        )

    def _plan(
        self, request: R, to_prompts: Callable[[R], Prompts], envelope: Envelope
    ) -> tuple[SequencePlan, list[ChoiceBuilder]]:
        adapter = self._models.adapter(request.model)
        envelope.model = request.model
        self._check_count(request)
        check_abilities(request, self._abilities)
        stops = request.stops()
        if stops is None:
            stops = parse_stop_sequences(self._settings.stop_sequences)
        else:
            self._stop_limits.check("stop", stops)
        prompts = to_prompts(request)
        asked, made, shown = request.engine_request(self._api.defaults), request.made, request.shown
        stop_token_ids = self._stop_token_ids(request)
        for item in SAMPLING:
            if item.ids:
                self._check_ids(item.name, getattr(asked.sampling, item.name))
        common = replace(asked, adapter=adapter, guide=prompts.guide, images=prompts.images)
        planned = [
            self._generator.plan(
                replace(common, input_ids=ids),
                stops,
                stop_token_ids=stop_token_ids,
                visible=prompts.visible,
                reasoning=prompts.reasoning,
                id=envelope.id,
                endpoint=envelope.endpoint,
                asked_priority=request.priority,
            )
            for ids in prompts.ids
        ]
        if common.return_log_probs:
            limited = request.limit < MAX_TOKENS
            planned = bound_log_probs(planned, made, request.top_log_probs, limited=limited)
        plan = plan_sequences(planned, made, shown, seeded=request.seed not in (None, -1))
        return plan, [prompts.builder(place) for place in range(len(plan.requests))]

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
