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
        description="Default of the input `system_prompt`, and of chats without a system message.",
    )
    prompt_template: str | None = Field(
        None,
        description="Default of the input `prompt_template`. Unset: the model's chat template.",
    )
    chat_template: OptionalPath = Field(
        None,
        description="File with a chat template (Jinja), in place of the model's: one that knows"
        " tools, for example.",
    )
    tool_call_parser: ToolCallParser = Field(
        "auto",
        description="Format of the model's tool calls: `hermes` (also Qwen), `llama3_json`,"
        " `mistral`, `pythonic`, or `none`. `auto` knows it from the chat template. `vllm:NAME` is"
        " vLLM's parser of that name, `vllm:auto` its parser of the model's type"
        " (openai.md#parsers-of-vllm).",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="Marks around the model's reasoning: `think` (`<think>`), `mistral`"
        " (`[THINK]`), or `none`. `auto` knows them from the chat template. `vllm:NAME` and"
        " `vllm:auto` are as above; a vLLM engine gets the name as its `reasoning_parser`.",
    )
    generation_config: Annotated[
        Literal["auto", "none"], BeforeValidator(lambda value: value or "auto")
    ] = Field(
        "auto",
        description="Defaults of `temperature`, `top_p`, `top_k`, `repetition_penalty` and `min_p`:"
        " `auto`, those of the model's generation_config.json; `none`, the API's own.",
    )
    stop_sequences: str | None = Field(
        None, description="Default of the input `stop_sequences`, separated by commas."
    )
    response_store_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Responses that `/v1/responses` keeps in `responses` of the work directory, in"
        " bytes together; beyond, the oldest go first, of the tenant that has most. 0: none is kept"
        " (openai.md).",
    )
    response_store_url: OptionalSecret = Field(
        None,
        description="Redis or Valkey that keeps them instead, so that each of several replicas"
        " answers for all: `redis://[USER:PASSWORD@]HOST:PORT/NUMBER`, `rediss://` with TLS,"
        " `unix://PATH` (openai.md).",
    )
    response_store_age: float = Field(86400, gt=0, description="Seconds that a response is kept.")
    detached_responses: int = Field(
        64,
        ge=0,
        description="Responses that are made although nobody waits for them: in the background, or"
        " of a stream whose client has left. Beyond, `background` gets 429 (E2107), and a client"
        " that leaves ends its own.",
    )
    detached_timeout: float = Field(
        3600,
        gt=0,
        description="Seconds after which such a response is cancelled; 60 at most for a stream"
        " that is not in the background.",
    )
    cog_max_concurrency: int = Field(
        1,
        ge=1,
        description="Predictions that Cog takes at once, waiting ones included; HTTP 503 beyond."
        " At most 500, which `cog-triton serve` and the runner images set.",
    )
    max_concurrency: OptionalInt = Field(
        None,
        ge=1,
        description="Requests in the engine at once. Unset: the engine's batch size.",
    )
    max_queue: OptionalInt = Field(
        None,
        ge=0,
        description="Requests that may wait; E2107 beyond. Unset: four times those in the engine,"
        " 64 at least.",
    )
    webhook_hosts: str = Field(
        "",
        description="Hosts that webhooks may go to, separated by commas: names, `*.domain`,"
        " addresses or networks; `*` for every host, `none` for none. Unset: every host with public"
        " addresses, and this machine where Cog binds loopback.",
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
        description="Format of the log, Cog's included: `json` or `console`, which `cog-triton"
        " serve` sets.",
    )
    log_level: LogLevel = Field(
        "info",
        description="Lowest level of our own log lines: `debug`, `info`, `warning` or `error`.",
    )
    log_requests: bool = Field(True, description="Write a log line for each request.")
    log_performance_metrics: bool = Field(
        False, description="Write the metrics of every prediction to its log."
    )
