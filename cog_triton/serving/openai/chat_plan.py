"""Plan of a chat: its prompt, the guide of its answer, and how the answer is parsed."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from cog_triton.engines.base import Abilities
from cog_triton.errors import InvalidArgument
from cog_triton.pictures.image_limits import ImagePart
from cog_triton.serving.openai.image_fetch import ChatImages, chat_images
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser, ReasoningParser
from cog_triton.serving.openai.parsers.borrowed import BorrowedParsers, BorrowedStream
from cog_triton.serving.openai.parsers.call_parser import (
    CALL_PARSERS,
    PYTHONIC,
    REASONING_MARKERS,
    CallParser,
    NamedCallParser,
    RequiredCallsParser,
    call_parser,
    format_of,
    reasoning_parser,
)
from cog_triton.serving.openai.requests import (
    ChatRequest,
    GivenGuide,
    NamedTool,
    Tool,
    check_guide,
    functions,
)
from cog_triton.settings import Settings
from cog_triton.settings.request_defaults import PREFIX
from cog_triton.system.log_notes import log_once, note_unknown
from cog_triton.text import chat
from cog_triton.text.chat import ImageURL
from cog_triton.text.chat_template import template_variables
from cog_triton.text.guide import Guide, GuideKind
from cog_triton.text.prompts import RenderedPrompt
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.text.tool_schema import (
    OBJECT,
    CallForm,
    ToolFunction,
    arguments_guide,
    calls_guide,
    calls_tag,
)

_log = logging.getLogger(__name__)

_PROBE = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_NOT_SETTINGS = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


class AnswerPlan(NamedTuple):
    """`guide` is what the answer must match, `visible` the special tokens that `parser` needs.

    `reasoning` has the arguments of `ReasoningCount`, where our own parser knows its markers.
    """

    guide: Guide | None = None
    parser: AnswerParser | None = None
    visible: Collection[str] = ()
    images: tuple[ImagePart, ...] = ()
    reasoning: tuple[str, str, bool] | None = None


class ChatPlanner:
    """Plans chats for one model; tells in the log how it parses their answers."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: EngineTokenizer,
        abilities: Abilities,
        borrowed: BorrowedParsers | None = None,
    ) -> None:
        """`abilities` are the engine's, `borrowed` parsers of vLLM."""
        self._settings = settings
        self._borrowed = borrowed
        self._special = tokenizer.special_tokens
        self._tokenizer = tokenizer
        self._engine = abilities
        self._calls = call_parser(settings, tokenizer)
        self._reasoning = reasoning_parser(settings, tokenizer)
        self._tagged, self._forces = False, True
        if borrowed is not None and borrowed.reasoning:
            self._reasoning = PREFIX + borrowed.reasoning
        if borrowed is not None and borrowed.tool:
            self._calls = PREFIX + borrowed.tool
            found = borrowed.plan({"tools": [_PROBE], "tool_choice": "required"})
            self._tagged = found.tag is not None and abilities.native_tags
            self._forces = self._tagged or found.json or borrowed.tool in CALL_PARSERS
        self._reads_tools = "tools" in self._variables(tools=True)
        self._images: ChatImages | None = None
        if abilities.images:
            self._images = chat_images(settings, tokenizer, abilities)
        _log.info(
            "tool calls are parsed as %s, reasoning as %s",
            self._calls or "text",
            self._reasoning or "text",
        )

    @property
    def takes_images(self) -> bool:
        return self._images is not None

    @property
    def abilities(self) -> dict[str, Any]:
        """What chats can do, for the description of the model."""
        choices = ["none"]
        if self._reads_tools and self._calls:
            choices.append("auto")
        guided = "json_schema" in self._engine.guides
        if guided and self._forces:
            choices += ["required", "function"]
        return {
            "tool_choice": choices,
            "tool_call_parser": self._calls,
            "reasoning_parser": self._reasoning,
            "guided_decoding": guided,
            "strict_with_auto": "auto" in choices
            and (self._tagged or self._strict_form is not None),
            "images": self._images.limits.count if self._images else 0,
        }

    def plan(self, request: ChatRequest) -> tuple[RenderedPrompt, AnswerPlan]:
        """The prompt, and the plan of its answer.

        Raises E1005 for what cannot be honoured, E1006 for bad messages.
        """
        urls: list[ImageURL] = []
        messages = chat.parse_messages(
            request.messages, self._settings.max_messages, urls if self._images else None
        )
        if self._images is not None:
            self._images.limits.check_count("messages", len(urls))
        tools = [] if request.tool_choice == "none" else request.tools or []
        guide, parser, borrows = self._call_plan(request, tools)
        prompt = chat.render_messages(
            messages,
            self._settings.system_prompt,
            self._tokenizer,
            self._template_variables(request, tools),
            self._images.form if self._images else None,
        )
        images = self._images.load(urls) if self._images and urls else ()
        free = guide is None or guide.kind in ("structural_tag", "native_tag")
        visible = {*(parser.markers if parser else ())}
        reasoning: ReasoningParser | BorrowedStream | None = None
        marked: tuple[str, str, bool] | None = None
        if self._borrowed and (borrows or (self._borrowed.reasoning and (free or self._defers))):
            spec = self._spec(request, tools if borrows else [])
            reasoning = BorrowedStream(self._borrowed, spec)
            if self._borrowed.plan(spec).visible:
                visible |= self._special
        elif free and (marks := REASONING_MARKERS.get(self._reasoning or "")):
            opening, closing = marks
            opened = prompt.text.rstrip().endswith(opening)
            reasoning = ReasoningParser(opening, closing, opened=opened)
            marked = opening, closing, opened
            visible |= {opening, closing}
        if reasoning is None and parser is None:
            return prompt, AnswerPlan(guide, images=images)
        answer = AnswerParser(
            reasoning,
            parser,
            include_reasoning=request.include_reasoning is not False,
            parallel=request.parallel_tool_calls is not False,
            forced=isinstance(request.tool_choice, NamedTool),
        )
        return prompt, AnswerPlan(guide, answer, visible, images, marked)

    @property
    def _defers(self) -> bool:
        """Whether the engine guides what comes after the reasoning, whose parser it was given."""
        return self._engine.native_tags and self._settings.reasoning_parser.startswith(PREFIX)

    def _spec(self, request: ChatRequest, tools: list[Tool]) -> dict[str, Any]:
        """The request as vLLM's parsers are told of it."""
        fields: dict[str, Any] = {
            "chat_template_kwargs": request.chat_template_kwargs,
            "reasoning_effort": request.reasoning_effort,
            "parallel_tool_calls": request.parallel_tool_calls,
        }
        if tools:
            choice = request.tool_choice or "auto"
            fields["tools"] = [tool.model_dump(exclude_unset=True) for tool in tools]
            fields["tool_choice"] = choice if isinstance(choice, str) else choice.model_dump()
        return {name: value for name, value in fields.items() if value is not None}

    def _borrowed_plan(
        self, borrowed: BorrowedParsers, request: ChatRequest, tools: list[Tool], *, forced: bool
    ) -> tuple[Guide | None, bool]:
        """The guide that vLLM has for calls, and whether its parser reads the answer."""
        found = borrowed.plan(self._spec(request, tools))
        if found.tag is not None and self._tagged:
            guide = Guide("native_tag", found.tag)
            guide.check("tools")
            return guide, True
        if forced and not self._forces:
            raise InvalidArgument(
                f"tool_choice: {self._calls} has no grammar for a forced call here; send 'auto'"
            )
        if not forced and any(tool.function.strict for tool in tools):
            log_once(_log, "tools: strict: not guided with tool_choice 'auto' on this model")
        return None, not forced

    def _call_plan(
        self, request: ChatRequest, tools: list[Tool]
    ) -> tuple[Guide | None, CallParser | None, bool]:
        """The guide of the answer, the parser of its calls, and whether vLLM's reads them."""
        form, choice = request.given_guide(), request.tool_choice
        names = [tool.function.name for tool in tools]
        forced = choice == "required" or isinstance(choice, NamedTool)
        if not tools:
            return check_guide(form, self._engine), None, False
        if form is not None and form.guide.kind != "json_schema":
            raise InvalidArgument(f"{form.field}: not together with tools")
        lent = self._borrowed if self._borrowed and self._borrowed.tool else None
        if lent is not None and form is None and (forced or self._reads_tools):
            guide, borrows = self._borrowed_plan(lent, request, tools, forced=forced)
            if borrows:
                return guide, None, True
        if forced or form is not None:
            cause = f"tool_choice={'required' if choice == 'required' else 'function'!r}"
            json_guide = GivenGuide(cause, Guide("json_schema", OBJECT))
            check_guide(json_guide if forced else form, self._engine)
        if isinstance(choice, NamedTool):
            name = choice.function.name
            (chosen,) = (item for item in functions(tools) if item.name == name)
            schema = arguments_guide(chosen)
            return self._guide("json_schema", schema, [chosen]), NamedCallParser([name]), False
        if forced or form is not None:
            called = functions(tools)
            schema = calls_guide(
                called,
                self._own_format.arguments_key,
                parallel=request.parallel_tool_calls is not False,
                or_else=None if forced or form is None else json.loads(form.guide.text),
            )
            return self._guide("json_schema", schema, called), RequiredCallsParser(names), False
        if not self._reads_tools:
            raise InvalidArgument(
                "tools: the model's chat template does not tell the model about tools; set"
                " CHAT_TEMPLATE to one that does, or send tool_choice 'required' or 'none'"
            )
        if self._calls is None:
            why = "it is not known how this model writes calls; set TOOL_CALL_PARSER"
            if format_of(self._tokenizer) == PYTHONIC:
                why = (
                    f"only {PREFIX}{PYTHONIC} reads this model's calls; set TOOL_CALL_PARSER to it"
                )
            raise InvalidArgument(f"tools: {why}, or send tool_choice 'required' or 'none'")
        return self._strict_guide(tools), CALL_PARSERS[self._calls](names), False

    @property
    def _own_format(self) -> type[CallParser]:
        """Our format of the calls, or the one nearest to what models write."""
        name = (self._calls or "").removeprefix(PREFIX)
        return CALL_PARSERS.get(name, CALL_PARSERS["hermes"])

    @property
    def _strict_form(self) -> CallForm | None:
        """How calls that are not forced are guided, None if they cannot be."""
        parser = CALL_PARSERS.get(self._calls or "")
        return parser.form if parser and self._engine.structural_tags else None

    def _strict_guide(self, tools: list[Tool]) -> Guide | None:
        """The guide of an answer that may call `tools`, if one of them is strict."""
        if not any(tool.function.strict for tool in tools):
            return None
        if (form := self._strict_form) is None:
            log_once(_log, "tools: strict: not guided with tool_choice 'auto' on this model")
            return None
        called = functions(tools)
        return self._guide("structural_tag", calls_tag(called, form), called)

    def _guide(self, kind: GuideKind, text: str, called: Sequence[ToolFunction]) -> Guide:
        """The guide of calls; raises E1005 naming a strict function's schema that is not taken."""
        for function in called:
            if function.strict:
                schema = Guide("json_schema", json.dumps(function.parameters))
                self._engine.check_guide(schema, function.where)
        guide = Guide(kind, text)
        self._engine.check_guide(guide, "tools")
        return guide

    def _variables(self, *, tools: bool) -> frozenset[str]:
        return template_variables(self._tokenizer.template_for(tools=tools) or "")

    def _template_variables(self, request: ChatRequest, tools: list[Tool]) -> dict[str, Any]:
        """What the template reads besides the messages."""
        known = self._variables(tools=bool(tools))
        values = dict(request.chat_template_kwargs or {})
        for name in _NOT_SETTINGS:
            if name in values:
                raise InvalidArgument(f"chat_template_kwargs.{name}: is set by the server")
        note_unknown(_log, "chat_template_kwargs", values.keys() - known)
        effort = request.reasoning_effort
        if effort is not None and not known & {"reasoning_effort", "enable_thinking"}:
            log_once(_log, "reasoning_effort: the chat template reads none")
        if effort is not None:
            values.setdefault("reasoning_effort", effort)
            values.setdefault("enable_thinking", effort != "none")
        if tools and self._reads_tools:
            values["tools"] = [tool.model_dump(exclude_unset=True) for tool in tools]
        return values
