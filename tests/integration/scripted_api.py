"""An OpenAI API in this process that says what a test tells it to, behind the real front."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from app_server import serving
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from cog_triton.errors import CogTritonError
from cog_triton.serving.openai import error_responses
from cog_triton.serving.openai.served_applications import create_app
from cog_triton.settings import load_settings
from cog_triton.system.ports import bind

BREAK = object()
"""In place of a delta: end the connection."""
METRICS = """\
cog_triton_requests_running 3.0
cog_triton_requests_waiting 1.0
cog_triton_time_to_first_token_seconds_sum 1.28
cog_triton_time_to_first_token_seconds_count 20.0
cog_triton_inter_token_latency_seconds_sum 46.0
cog_triton_inter_token_latency_seconds_count 2000.0
cog_triton_prompt_tokens_total 7312.0
cog_triton_generation_tokens_total 20417.0
cog_triton_requests_total{endpoint="chat",outcome="stop"} 18.0
cog_triton_requests_total{endpoint="chat",outcome="length"} 2.0
cog_triton_kv_cache_usage_ratio 0.23
cog_triton_engine_restarts_total 0.0
"""


@dataclass
class ScriptedAPI:
    """What is answered next, and what was asked; `gate` holds back what follows a None."""

    url: str
    deltas: list[Any] = field(default_factory=list)
    error: CogTritonError | None = None
    pause_s: float = 0.0
    models: list[dict[str, Any]] = field(default_factory=list)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    gate: Event = field(default_factory=Event)
    left: Event = field(default_factory=Event)

    def says(self, *deltas: Any) -> None:
        """Answer with these from now on: texts, deltas, errors, None or BREAK."""
        self.deltas, self.error = list(deltas), None
        self.gate.clear()

    async def answer(self, request: Request) -> Response:
        self.asked.append((request.url.path, await request.json()))
        if self.error is not None:
            return error_responses.error_response(self.error)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            for number, delta in enumerate(self.deltas, 1):
                if delta is BREAK:
                    raise ConnectionResetError
                if isinstance(delta, CogTritonError):
                    yield _event(error_responses.error_body(delta))
                    return
                while delta is None and not self.gate.is_set():
                    await asyncio.sleep(0.01)
                found = {"content": delta} if isinstance(delta, str) else delta
                if found:
                    yield _event(
                        {"choices": [{"index": 0, "delta": found}], "usage": usage(number)}
                    )
                await asyncio.sleep(self.pause_s)
            choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
            yield _event({"choices": [choice]}) + b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left.set()
            raise


def usage(made: int) -> dict[str, int]:
    return {"prompt_tokens": 37, "completion_tokens": made, "total_tokens": 37 + made}


def _event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


@contextmanager
def scripted(api_key: str | None = None) -> Iterator[ScriptedAPI]:
    """A scripted API on a free port."""
    listening = bind("OPENAI_PORT", "127.0.0.1", 0, 64)
    api = ScriptedAPI(f"http://127.0.0.1:{listening.getsockname()[1]}")
    abilities = {"tool_call_parser": "hermes", "reasoning_parser": "think", "guides": ["json"]}
    base = {"id": "org/small-8b", "max_model_len": 8192, "capabilities": abilities}
    api.models = [base, {**base, "id": "sql-adapter", "parent": "org/small-8b"}]

    async def models(request: Request) -> Response:
        return error_responses.json_response({"object": "list", "data": api.models})

    async def metrics(request: Request) -> Response:
        return Response(METRICS, media_type="text/plain")

    routes = [
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/chat/completions", api.answer, methods=["POST"]),
        Route("/v1/completions", api.answer, methods=["POST"]),
    ]
    app = create_app(routes, require_ready=lambda: None)
    with serving(app, listening, load_settings(cog_triton_api_key=api_key)):
        try:
            yield api
        finally:
            api.gate.set()
