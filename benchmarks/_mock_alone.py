"""Cost of the mock engine alone: run in this process, without Triton or Cog."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cog_triton.engines.mock import mock_directory
from cog_triton.engines.mock.engine import MockEngine
from cog_triton.engines.mock.mock_request import MockOptions, MockRequest
from cog_triton.text.sampling import SamplingParams


class MockAlone:
    """A mock engine to call directly, at full rate unless `tps` is given."""

    def __init__(self, tps: float = 0) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            model = mock_directory.read_model(mock_directory.make_engine(Path(scratch)))
        self._engine = MockEngine(model, MockOptions(tps=tps))
        self._handles = itertools.count()

    def ttft_ms(self, prompt: int = 25) -> float:
        """Milliseconds from a request of `prompt` tokens to its first token."""
        first: list[float] = []
        started = time.perf_counter()
        self._run(1, 1, prompt, lambda: first.append(time.perf_counter()))
        return (first[0] - started) * 1000

    def us(self, streams: int, tokens: int = 1000) -> float:
        """CPU microseconds a token with `streams` concurrent streams."""
        before = time.process_time()
        self._run(streams, tokens, 25, lambda: None)
        return (time.process_time() - before) / (streams * tokens) * 1e6

    def _run(self, streams: int, tokens: int, prompt: int, arrived: Callable[[], None]) -> None:
        engine = self._engine
        sampling = SamplingParams(max_tokens=tokens)
        for _ in range(streams):
            request = MockRequest(input_ids=[500] * prompt, sampling=sampling, end_id=-1)
            engine.submit(next(self._handles), request)
        while (wait := engine.wait_s()) is not None:
            time.sleep(wait)
            for _, event in engine.step():
                arrived()
                if event.error is not None:
                    raise event.error
