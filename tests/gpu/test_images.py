"""Images in chats: they are counted, each has its answer, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gpu_models import image_url
from gpu_servers import Server

pytestmark = pytest.mark.gpu

RED, GREEN = image_url((255, 0, 0)), image_url((0, 255, 0))


def ask(vision: Server, *urls: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is it?"}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": parts}]
    values = {"max_tokens": 48, "ignore_eos": True}
    return vision.ask("chat/completions", messages=messages, **values)


def said(vision: Server, *urls: str) -> str:
    answer = ask(vision, *urls)
    assert answer["status"] == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def test_tokens_of_images_are_counted(vision: Server) -> None:
    answers = [ask(vision, *urls) for urls in ((), (RED,), (GREEN,), (RED, GREEN))]
    assert [answer["status"] for answer in answers] == [200] * 4, answers
    none, red, green, both = (answer["usage"]["prompt_tokens"] for answer in answers)
    assert none < red == green < both


def test_an_image_has_the_same_answer_alone_and_in_a_batch(vision: Server) -> None:
    alone = {url: said(vision, url) for url in (RED, GREEN)}
    assert said(vision, RED) == alone[RED]
    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(lambda url: said(vision, url), [RED, GREEN] * 8))
    same = sum(one == alone[url] for one, url in zip(together, [RED, GREEN] * 8, strict=True))
    assert all(together)
    assert same >= 8, f"{same} of 16 are the same in a batch"


@pytest.mark.parametrize(
    "urls",
    [(RED[: len(RED) * 2 // 3 // 4 * 4],), (RED, RED, RED)],
    ids=["broken", "more than the model takes"],
)
def test_images_are_refused(vision: Server, urls: tuple[str, ...]) -> None:
    answer = ask(vision, *urls)
    assert answer["status"] == 400, answer
    assert answer["error"]["message"].startswith("E1005"), answer
