"""Webhooks of a running server: order and pace, by HTTP and HTTPS, and delivery at its stop."""

import time
from itertools import pairwise
from typing import Any

import httpx
import pytest
from stack import Stack, wait_until
from webhook_receiver import CERTIFICATE, Receiver, by_http_and_https

MOCK = {"COG_TRITON_ENGINE": "mock", "MOCK_TPS": "150"}
if CERTIFICATE.exists():
    MOCK["SSL_CERT_FILE"] = str(CERTIFICATE)
ALL = ["start", "output", "logs", "completed"]
pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("mock")]
DONE = {"succeeded", "failed", "canceled"}


def begin(stack: Stack, name: str, webhook: str, events: list[str] = ALL, **values: Any) -> None:
    answer = httpx.put(
        f"{stack.url}/predictions/{name}",
        json={
            "input": {"prompt": "Hi.", "max_tokens": 100, "min_tokens": 100, **values},
            "webhook": webhook,
            "webhook_events_filter": events,
        },
        headers={"Prefer": "respond-async"},
        timeout=60,
    )
    assert answer.status_code == 202, answer.text
    assert "127.0.0.1" not in answer.text


@by_http_and_https
def test_webhooks_of_many_predictions_keep_order_and_pace(mock: Stack, tls: bool) -> None:
    names = [f"order-{tls}-{number}" for number in range(20)]
    with Receiver(tls=tls, sequential=True) as receiver:
        for name in names:
            begin(mock, name, f"{receiver.url}/hook")
        wait_until(lambda: sum(each["status"] in DONE for each in receiver.events) == len(names))
        time.sleep(1)
    for name in names:
        told = receiver.of(name)
        statuses = [event["status"] for _, event in told]
        assert statuses == ["processing"] * (len(told) - 1) + ["succeeded"]
        lengths = [len(event.get("output", ())) for _, event in told]
        assert lengths == sorted(lengths)
        assert lengths[0] == 0
        assert told[-1][1]["metrics"]["output_token_count"] == 100
        running = [when for when, _ in told[:-1]]
        assert all(late - early >= 0.49 for early, late in pairwise(running))


@pytest.mark.full
def test_the_last_webhook_is_tried_again_while_the_server_stops(tmp_path_factory: Any) -> None:
    stack = Stack(tmp_path_factory.mktemp("webhooks") / "stopped", None, **MOCK)
    with Receiver(lambda _, count: (503 if count < 4 else 200, {})) as receiver, stack.served():
        begin(stack, "last", receiver.url, ["completed"])
        wait_until(lambda: receiver.events)
        assert stack.process is not None
        assert stack.finish(15)[0] == 0
    assert [event["status"] for event in receiver.events] == ["succeeded"] * 5
