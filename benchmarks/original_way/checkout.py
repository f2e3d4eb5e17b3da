"""The original cog-triton's own predict() from a checkout of it, over our Triton and today's Cog.

What it imports and does not need here (transformers, pytriton, requests) is stood in for; the
tokenizer is ours behind the two calls that it makes of it, which is less than transformers does.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import cog
import httpx
from tokenizers import Tokenizer

from cog_triton.settings import Settings

Predict = Callable[[str, int, str], AsyncIterator[str]]
_ABSENT = {
    "transformers": ["AutoTokenizer"],
    "requests": [],
    "triton_config_generator": ["generate_configs", "load_yaml_config"],
    "pytriton": [],
    "pytriton.utils": [],
    "pytriton.utils.distribution": [],
}
_END_ID = 1


def load(path: str, tokenizer: Tokenizer, settings: Settings) -> Predict:
    """Load its predict() as a function of prompt, token count and stop sequences."""
    module = _module(Path(path))
    predictor = module.Predictor.__new__(module.Predictor)
    values: dict[str, Any] = {
        "log_performance_metrics": False,
        "model_exists": True,
        "max_sequence_length": 131_072,
        "end_id": _END_ID,
        "pad_id": _END_ID,
        "tokenizer": _Tokenizer(tokenizer),
        "client": httpx.AsyncClient(
            timeout=settings.triton_timeout, transport=_To(settings.triton_url)
        ),
        "log": lambda text: None,
        "_testing": True,  # else it emits metrics, by a function that Cog no longer has
    }
    vars(predictor).update(values)

    def predict(prompt: str, count: int, stops: str) -> AsyncIterator[str]:
        own = {"prompt": prompt, "max_tokens": count, "stop_sequences": stops or None}
        pieces: AsyncIterator[str] = predictor.predict(**(module.Predictor._defaults | own))
        return pieces

    return predict


def _module(path: Path) -> Any:
    if not (path / "predict.py").is_file():
        raise SystemExit(f"--original-checkout={path}: there is no predict.py")
    for name, members in _ABSENT.items():
        stand_in = ModuleType(name)
        vars(stand_in).update(dict.fromkeys(members))
        sys.modules[name] = stand_in
    distribution: Any = sys.modules["pytriton.utils.distribution"]
    distribution.get_root_module_path = Path
    vars(sys.modules["pytriton"])["utils"] = sys.modules["pytriton.utils"]
    vars(sys.modules["pytriton.utils"])["distribution"] = distribution
    cog.emit_metric = lambda name, value: None
    multiprocessing.current_process().name = "worker"  # in the main one it imports less
    sys.path.insert(0, str(path))
    known = sys.modules.pop("predict", None)  # Cog calls our own module so, too
    try:
        return importlib.import_module("predict")
    finally:
        sys.modules.pop("predict", None)
        if known is not None:
            sys.modules["predict"] = known


class _Tokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self._tokenizer.encode(text).ids}

    def decode(self, tokens: Any, *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(tokens.tolist(), skip_special_tokens=skip_special_tokens)
        return text


class _To(httpx.AsyncHTTPTransport):
    """httpx transport that redirects localhost:8000 to our Triton."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._parts = urlsplit(url)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        request.url = request.url.copy_with(host=self._parts.hostname, port=self._parts.port)
        return await super().handle_async_request(request)
