"""Settings of requests and of what is logged of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from cog_triton.settings.environment_types import (
    LogLevel,
    OptionalInt,
    OptionalPath,
    OptionalSecret,
    ReasoningParser,
    SettingsGroup,
    ToolCallParser,
)

PREFIX, AUTO = "vllm:", "auto"
"""Beginning of the name of a parser of vLLM, and the name for the one that fits the model."""


class RequestSettings(SettingsGroup):
    """Defaults of requests, and how many there may be."""

    title = "Requests"

    system_prompt: str | None = Field(
        None,
        description="Predictions and chats without a system prompt have this one.",
    )
    prompt_template: str | None = Field(
        None,
        description="Predictions without a `prompt_template` have this one. Unset: the model's"
        " chat template.",
    )
    chat_template: OptionalPath = Field(
        None,
        description="The chat template (Jinja) in this file replaces the model's: one that"
        " knows tools, for example.",
    )
    tool_call_parser: ToolCallParser = Field(
        "auto",
        description="The model writes tool calls in this format: `hermes` (also Qwen),"
        " `llama3_json`, `mistral`, or `none`. `auto` knows the format from the chat template."
        " `vllm:NAME` is vLLM's parser of that name, and `vllm:auto` its parser of the model's"
        " type (openai.md#parsers-of-vllm).",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="The model's reasoning is between these marks: `think` (`<think>`),"
        " `mistral` (`[THINK]`), or `none`. `auto` knows them from the chat template. `vllm:NAME`"
        " is vLLM's parser of that name, which a vLLM engine gets as its `reasoning_parser`, and"
        " `vllm:auto` its parser of the model's type (openai.md#parsers-of-vllm).",
    )
    generation_config: Annotated[
        Literal["auto", "none"], BeforeValidator(lambda value: value or "auto")
    ] = Field(
        "auto",
        description="`temperature`, `top_p`, `top_k`, `repetition_penalty` and `min_p` have the"
        " defaults of the model's generation_config.json with `auto`, and the API's own with"
        " `none`.",
    )
    stop_sequences: str | None = Field(
        None, description="Predictions without `stop_sequences` have these, with commas between."
    )
    response_store_bytes: int = Field(
        256 << 20,
        ge=0,
        description="`/v1/responses` stores so many bytes of responses in `responses` of the"
        " work directory; beyond, the oldest go first, of the tenant that has most. 0: none is"
        " stored (openai.md).",
    )
    response_store_url: OptionalSecret = Field(
        None,
        description="Redis or Valkey at this URL stores the responses, so that each of several"
        " replicas answers for all: `redis://[USER:PASSWORD@]HOST:PORT/NUMBER`, `rediss://` with"
        " TLS, `unix://PATH` (openai.md).",
    )
    response_store_age: float = Field(
        86400, gt=0, description="A response of `/v1/responses` is stored for so many seconds."
    )
    detached_responses: int = Field(
        64,
        ge=0,
        description="So many responses are made although nobody waits for them: in the"
        " background, or of a stream whose client has left. Beyond, `background` gets 429 (E2107),"
        " and a client that leaves ends its own.",
    )
    cog_max_concurrency: int = Field(
        1,
        ge=1,
        description="Cog takes so many predictions at once, waiting ones included; HTTP 503"
        " beyond. `cog-triton serve` and the runner images set 500, the most.",
    )
    max_concurrency: OptionalInt = Field(
        None,
        ge=1,
        description="The engine has so many requests at once. Unset: its batch size.",
    )
    max_queue: OptionalInt = Field(
        None,
        ge=0,
        description="So many requests may wait; E2107 beyond. Unset: four times those in the"
        " engine, 64 at least.",
    )
    webhook_hosts: str = Field(
        "",
        description="Webhooks may go to these hosts, with commas between: names, `*.domain`,"
        " addresses or networks; `*` is every host, `none` is none. If unset, they go to every"
        " host with public addresses, and to this machine if Cog binds loopback.",
    )

    @property
    def vllm_reasoning_parser(self) -> str | None:
        """The parser of vLLM that REASONING_PARSER names, if it does."""
        name = self.reasoning_parser.removeprefix(PREFIX)
        return None if name in (self.reasoning_parser, AUTO) else name


class LogSettings(SettingsGroup):
    """Format and contents of the log."""

    title = "Logs"

    log_format: Annotated[
        Literal["json", "console"], BeforeValidator(lambda value: value or "json")
    ] = Field(
        "json",
        description="The log, Cog's included, is `json` or `console`, which `cog-triton serve`"
        " sets.",
    )
    log_level: LogLevel = Field(
        "info",
        description="Our own log lines are of this level at least: `debug`, `info`, `warning`,"
        " `error`.",
    )
    log_requests: bool = Field(True, description="Each request has a line in the log.")
    log_performance_metrics: bool = Field(
        False, description="Every prediction has its metrics in its log."
    )
