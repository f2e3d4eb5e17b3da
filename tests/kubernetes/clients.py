"""Streams of a cluster's clients, over connections that they keep."""

from __future__ import annotations

import threading
import time
from typing import Any, Self

import httpx
from stack import wait_until

_CHAT = {"messages": [{"role": "user", "content": "Hi there."}], "stream": True}


class Clients:
    """Streams of both APIs, one after the other, over connections that are kept."""

    def __init__(self, address: str, *, count: int = 4, tokens: int = 60, pause: float = 0) -> None:
        """`pause` is the seconds between a client's streams, for engines that compute."""
        self.whole = 0
        self.lost: list[str] = []
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._address, self._tokens, self._pause = address, tokens, pause
        models = httpx.get(f"http://{address}:8080/v1/models", trust_env=False)
        self._model = models.raise_for_status().json()["data"][0]["id"]
        kinds = [self._chat, self._predict] * (count // 2)
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in kinds]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def wait(self, more: int = 8) -> None:
        """Until so many more streams are whole."""
        wanted = self.whole + more
        wait_until(lambda: self.whole >= wanted, 600)

    def _run(self, kind: Any) -> None:
        with httpx.Client(timeout=120, trust_env=False) as client:
            while not self._end.is_set():
                try:
                    kind(client)
                except (httpx.HTTPError, AssertionError) as error:
                    with self._lock:
                        self.lost.append(f"{time.strftime('%X')} {kind.__name__} {error!r}")
                    self._end.wait(0.5)
                    continue
                with self._lock:
                    self.whole += 1
                self._end.wait(self._pause)

    def _chat(self, client: httpx.Client) -> None:
        url = f"http://{self._address}:8080/v1/chat/completions"
        asked = {**_CHAT, "model": self._model, "max_tokens": self._tokens}
        with client.stream("POST", url, json=asked) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]", lines[-3:]
        assert "error" not in lines[-2], lines[-3:]

    def _predict(self, client: httpx.Client) -> None:
        url = f"http://{self._address}:5000/predictions"
        headers = {"accept": "text/event-stream"}
        asked = {"input": {"prompt": "Hi there.", "max_tokens": self._tokens}}
        with client.stream("POST", url, json=asked, headers=headers) as answer:
            assert answer.status_code == 200, answer.read()
            text = "".join(answer.iter_text())
        assert '"status": "succeeded"' in text.replace('":"', '": "'), text[-300:]
