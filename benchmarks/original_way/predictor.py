"""Cog predictor with the original cog-triton's token path, over the mock engine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from cog import BaseRunner, ConcatenateIterator, Input

from cog_triton.serving.coglet import streaming
from cog_triton.serving.engine_preparation import prepare_engine
from cog_triton.settings import load_settings
from cog_triton.system.work_dir import fresh_run_dir
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.server import TritonServer
from original_way import checkout, repository
from original_way.decode import Stops, Text, events
from original_way.live import live

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from local_parent import linked

CHECKOUT = "ORIGINAL_CHECKOUT"
"""Where the original cog-triton's own code is; unset, ours stands for it."""
_END_ID = 1


class Predictor(BaseRunner):
    """Predictor that differs from ours only between Triton's events and text."""

    async def setup(self) -> None:
        """Start Triton on the mock engine, with the original cog-triton's ensemble."""
        streaming.install(type(self).run)
        self._loop = asyncio.get_running_loop()
        settings = load_settings(cog_triton_engine="mock")
        run_dir = fresh_run_dir(settings.work_dir)
        self._parent = linked(run_dir)
        link = await self._parent.__aenter__()
        prepared = await asyncio.to_thread(prepare_engine, settings, run_dir)
        repository.reshape(prepared.repository)
        self._tokenizer = EngineTokenizer.load(prepared.family.tokenizer_dir).tokenizer
        self._url = f"{settings.triton_url}/v2/models/ensemble/generate_stream"
        self._health = f"{settings.triton_url}/v2/health/ready"
        self._http = httpx.AsyncClient(timeout=settings.triton_timeout, trust_env=False)
        self._triton = TritonServer(settings, prepared.repository, link)
        await self._triton.start(self._is_ready, self._probe)
        path = os.environ.get(CHECKOUT)
        self._own = checkout.load(path, self._tokenizer, settings) if path else None

    async def run(
        self,
        prompt: str = Input(default="Tell me about the sea."),
        max_tokens: int = Input(default=512, ge=1),
        stop_sequences: str = Input(default=""),
    ) -> ConcatenateIterator[str]:
        """Stream the text of `max_tokens` tokens."""
        count = int(max_tokens)
        if self._own is not None:
            pieces = self._own(prompt, count, stop_sequences)
            return live(self._loop, pieces, lambda: self.record_metric("output_token_count", count))
        text = Text(self._decode)
        return live(
            self._loop,
            self._pieces(text, self._values(prompt, count, stop_sequences)),
            lambda: self.record_metric("output_token_count", text.tokens.size),
        )

    def _decode(self, ids: list[int]) -> str:
        decoded: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return decoded

    def _values(self, prompt: str, count: int, stop_sequences: str) -> dict[str, object]:
        stops = stop_sequences.split(",") if stop_sequences else []
        return {
            "text_input": prompt,
            "max_tokens": min(count, 131072 - len(self._tokenizer.encode(prompt).ids)),
            "min_length": 0,
            "top_k": 0,
            "temperature": 0.7,
            "top_p": 0.95,
            "length_penalty": 1.0,
            "presence_penalty": 0.0,
            "stop_words": stops,
            "stream": True,
            "random_seed": 1,
            "pad_id": _END_ID,
            "end_id": _END_ID,
        }

    async def _pieces(self, text: Text, values: dict[str, object]) -> AsyncIterator[str]:
        stops = Stops(values["stop_words"])  # type: ignore[arg-type]
        async with self._http.stream("POST", self._url, json=values) as response:
            async for event in events(response):
                if "error" in event:
                    raise RuntimeError(event["error"])
                if (new := text.feed(event["output_ids"])) and (new := stops.feed(new)):
                    yield new
        if rest := stops.finish():
            yield rest

    async def _is_ready(self) -> bool:
        try:
            answer = await self._http.get(self._health)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    async def _probe(self) -> None:
        text = Text(self._decode)
        async for _ in self._pieces(text, self._values("hi", 3, "")):
            pass
        if text.tokens.size != 3:
            raise RuntimeError(f"the first request brought {text.tokens.size} tokens of 3")
