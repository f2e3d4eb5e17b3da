"""Served models: the base model and its LoRA adapters, and routes that load and unload those.

The routes are as vLLM's server has them; `ServedAPI` is what all endpoints answer with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from cog_triton.engines.base import Abilities
from cog_triton.errors import CogTritonError, InvalidArgument, NotFound, nearest
from cog_triton.serving.adapter_store import AdapterStore
from cog_triton.serving.generate import TextGenerator
from cog_triton.serving.openai.parsers.borrowed import BorrowedParsers
from cog_triton.serving.openai.request_body import parse_body, read_body
from cog_triton.serving.openai.requests import Exact, validate
from cog_triton.serving.openai.stored_responses import RunningResponses
from cog_triton.serving.tenants import CURRENT
from cog_triton.settings import Settings

_SHOWN = 20
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ANTHROPIC = "anthropic-version"
"""Header of Anthropic's clients."""


class ServedModels:
    """Models by the name that requests give; adapters come and go while the server runs."""

    def __init__(
        self, base: str, adapters: AdapterStore | None = None, alias: str | None = None
    ) -> None:
        """`base` is the name of the base model; raises E1005 if an adapter has it, too.

        `alias` is another name of it.
        """
        self.base = base
        self._alias = alias
        self.adapters = adapters
        if adapters is not None and base in adapters.adapters():
            raise InvalidArgument(f"lora_name={base!r}: is the name of the base model")

    def adapter(self, model: str) -> str | None:
        """The adapter that `model` names, None for the base model; raises E1009."""
        names = list(self.adapters.adapters()) if self.adapters else []
        if model == self._alias and model not in names:
            model = self.base
        if (tenant := CURRENT.get()) is not None:
            tenant.require_model(model)
        if model == self.base:
            return None
        if model in names:
            return model
        served = f"the model is {self.base!r}"
        if names:
            served += f", its adapters are {', '.join(map(repr, names[:_SHOWN]))}"
        hint = nearest(model[:200], [self.base, *names])
        raise NotFound(f"model={model[:80]!r}: not served here; {served}{hint}")

    def object(self, base: dict[str, Any], adapter: str | None) -> dict[str, Any]:
        """The model object of an adapter, or of the base model, which is `base`."""
        return base if adapter is None else {**base, "id": adapter, "parent": self.base}

    def objects(self, base: dict[str, Any]) -> list[dict[str, Any]]:
        """The model objects of the base model and of each adapter that the tenant may name."""
        names = self.adapters.adapters() if self.adapters else {}
        every = [base, *(self.object(base, name) for name in names)]
        tenant = CURRENT.get()
        return [each for each in every if tenant is None or tenant.may_name(each["id"])]


T = TypeVar("T")


@dataclass(frozen=True)
class ServedAPI:
    """What endpoints answer with: one model and its adapters; `abilities` are its engine's.

    `defaults` are the model's own, of sampling parameters; `borrowed` are vLLM's parsers;
    `responses` are stored.
    """

    settings: Settings
    generator: TextGenerator
    models: ServedModels
    abilities: Abilities
    defaults: Mapping[str, float] = field(default_factory=dict)
    borrowed: BorrowedParsers | None = None
    responses: RunningResponses | None = None

    async def planned(self, request: Request, plan: Callable[[Any], T]) -> T:
        """What `plan` makes of the body's JSON value, on a thread.

        A long text takes long to parse and encode, and must not block the event loop.
        """
        self.generator.tenant_limits.begin(CURRENT.get())
        # In a list, so that it is freed as soon as it is parsed.
        raw = [await read_body(request)]
        return await asyncio.to_thread(lambda: plan(parse_body(raw.pop())))


class AdapterRequest(Exact):
    """Fields of both endpoints."""

    lora_name: str = Field(min_length=1)


class LoadAdapterRequest(AdapterRequest):
    """Body of `LOAD`, vLLM's; `lora_path` is relative to LORA_DIR, or absolute and below it."""

    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapterRequest(AdapterRequest):
    """Body of `UNLOAD`, vLLM's; `lora_int_id` is not read."""

    lora_int_id: int | None = None


B = TypeVar("B", bound=AdapterRequest)


class AdapterRoutes:
    """Endpoints that change which adapters are served; only with a key, and below LORA_DIR."""

    def __init__(self, api: ServedAPI) -> None:
        self._api = api

    async def load(self, request: Request) -> Response:
        """Load an adapter and make a token with it; one that the engine refuses is not served."""
        adapters = self._changeable()
        body = await self._parse(request, LoadAdapterRequest)
        if body.is_3d_lora_weight:
            raise InvalidArgument("is_3d_lora_weight=true: is not supported")
        if body.lora_name == self._api.models.base:
            raise InvalidArgument(f"lora_name={body.lora_name!r}: is the name of the base model")
        before = adapters.adapters().get(body.lora_name)
        load = partial(adapters.load_requested, replace=body.load_inplace)
        await asyncio.to_thread(load, body.lora_name, body.lora_path)
        try:
            await self._api.generator.probe(body.lora_name)
        except CogTritonError:
            await asyncio.to_thread(adapters.restore, before, body.lora_name)
            raise
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """POST of `UNLOAD`."""
        adapters = self._changeable()
        body = await self._parse(request, UnloadAdapterRequest)
        await asyncio.to_thread(adapters.unload, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _changeable(self) -> AdapterStore:
        """The adapters, if requests may change them, of which the front has checked the key."""
        adapters = self._api.models.adapters
        if adapters is None or self._api.settings.lora_dir is None:
            raise NotFound("adapters are loaded at run time where LORA_DIR is set, and it is not")
        return adapters

    async def _parse(self, request: Request, kind: type[B]) -> B:
        body = await read_body(request)
        parsed = validate(kind, parse_body(body))
        if (tenant := CURRENT.get()) is not None:
            tenant.require_model(parsed.lora_name)
        return parsed


def anthropic_models(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The list of `model` objects of OpenAI's API as Anthropic's, whole."""
    found = [anthropic_model(model) for model in models]
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return {"data": found, "has_more": False, "first_id": first, "last_id": last}


def anthropic_model(model: dict[str, Any]) -> dict[str, Any]:
    """A `model` object of OpenAI's API as Anthropic's `ModelInfo`."""
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
        "capabilities": None,
        "lifecycle": "active",
    }
