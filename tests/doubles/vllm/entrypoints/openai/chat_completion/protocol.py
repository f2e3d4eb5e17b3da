"""Double of vllm/entrypoints/openai/chat_completion/protocol.py, as far as parsers read it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ChatParams:
    chat_template_kwargs: dict[str, Any]

    def with_defaults(self, defaults):
        return ChatParams({**defaults, **self.chat_template_kwargs})


@dataclass
class ChatCompletionRequest:
    model: str
    messages: list[Any]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    structured_outputs: Any = None
    skip_special_tokens: bool | None = None

    def build_chat_params(self, template, content_format, efforts=None):
        return ChatParams({"reasoning_effort": self.reasoning_effort, **self.chat_template_kwargs})
