"""Tenants: whom a request is of, and what its key allows.

The front knows the keys.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cog_triton.errors import NotFound, PromptTooLong

LOWEST = 10
"""Priorities are from its negative, first, to it."""

MOST_TENANTS = 200
OTHER = "other"
"""Label of the tenants that come after `MOST_TENANTS`, in metrics."""

Name = Annotated[str, Field(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\z")]
Limit = Annotated[int | None, Field(ge=1, le=10**12)]


class Tenant(BaseModel):
    """A tenant; None is no limit, and no `models` are all of them.

    `weight` is its share beside others', `priority` that of its requests, and the most urgent one
    that they may ask for: as in vLLM, lower is earlier. `tokens_per_minute` are of prompts and
    outputs, `concurrent` those that run or wait.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Name
    weight: float = Field(default=1.0, ge=0.01, le=1000)
    priority: int = Field(default=0, ge=-LOWEST, le=LOWEST)
    models: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        default=(), max_length=256, strict=False
    )
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    concurrent: Limit = None
    max_prompt_tokens: Limit = None

    def may_name(self, model: str) -> bool:
        """Whether the key is for a model or adapter."""
        return not self.models or model in self.models

    def require_model(self, name: str) -> None:
        """Raise E1009 for a model or adapter that the key is not for."""
        if not self.may_name(name):
            raise NotFound(f"model={name[:80]!r}: the key of {self.name} is not for it")

    def require_length(self, prompt_tokens: int) -> None:
        """Raise E1002 for a prompt that is longer than the key allows."""
        if self.max_prompt_tokens is not None and prompt_tokens > self.max_prompt_tokens:
            raise PromptTooLong(
                f"{prompt_tokens} tokens; prompts of {self.name} may have"
                f" {self.max_prompt_tokens} (max_prompt_tokens of its key)"
            )

    def bounded_priority(self, asked: int | None) -> int:
        """The priority of a request that asks for one, or for none."""
        return max(self.priority, min(LOWEST, self.priority if asked is None else asked))


CURRENT: ContextVar[Tenant | None] = ContextVar("cog_triton_tenant", default=None)
"""Tenant of the request that this context works for; None where no key has told one."""
