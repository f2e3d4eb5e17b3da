"""Engine client: events of an engine's process, in order, joined where a reader is late."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_clients import PATIENCE_S, FrameSocket

from cog_triton.engines import engine_messages, engine_spec
from cog_triton.engines.engine_client import EngineClient, coalesce_events, events_of
from cog_triton.engines.engine_messages import Hello, Welcome
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.step_items import ERROR, FINISH_REASONS, GOES_ON, LENGTH, StepItem, encode
from cog_triton.errors import TritonUnavailable
from cog_triton.system import local_socket
from cog_triton.text.sampling import SamplingParams

REQUEST = EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=10**9))


@contextmanager
def linked() -> Iterator[tuple[EngineClient, FrameSocket]]:
    """A client, and the engine's end of its connection."""
    name = f"cog-triton-test-{secrets.token_hex(8)}"
    client = EngineClient([name], "tokens")
    with local_socket.listen(name) as listener:
        listener.setblocking(True)
        client.start()
        theirs = FrameSocket(listener.accept()[0])
    assert engine_messages.decode(theirs.receive()) == Hello("tokens")
    theirs.send(engine_messages.encode(Welcome(4)))
    client.wait_until_linked()
    yield client, theirs
    client.close()
    theirs.close()


def step(*items: StepItem) -> bytes:
    return engine_messages.encode(encode(items))


def test_events_that_queue_up_are_joined() -> None:
    all_sent, slow, ends = threading.Event(), list[TokenEvent](), queue.Queue[Any]()

    def emit(event: TokenEvent) -> None:
        slow.append(event)
        assert all_sent.wait(PATIENCE_S)

    with linked() as (client, theirs):
        client.submit(1, REQUEST, emit)
        client.submit(2, REQUEST, ends.put)
        for n in range(50):
            theirs.send(step(StepItem(1, 0, n, [n], [])))
        theirs.send(step(StepItem(2, 0, 0, [5], [], LENGTH)))
        all_sent.set()
        assert ends.get(timeout=PATIENCE_S).token_ids == [5]
    assert [token for event in slow for token in event.token_ids] == [*range(50)]
    assert len(slow) < 25
    assert isinstance(slow[-1].error, TritonUnavailable)


def test_first_tokens_are_emitted_before_later_ones() -> None:
    order = queue.Queue[str]()
    with linked() as (client, theirs):
        for handle, name in enumerate(["first", "second", "third"]):
            client.submit(handle, REQUEST, lambda event, name=name: order.put(name))
        theirs.send(step(StepItem(0, 0, 0, [5], []), StepItem(1, 0, 0, [5], [])))
        assert [order.get(timeout=PATIENCE_S) for _ in range(2)] == ["first", "second"]
        theirs.send(step(*(StepItem(n, 0, 1, [6], [], LENGTH) for n in range(3))))
        found = [order.get(timeout=PATIENCE_S) for _ in range(3)]
        client.on_kv_cache = lambda: order.put("reported")
    assert found == ["third", "first", "second"]
    assert order.empty()  # Triton that waits for the end takes no metrics


steps = st.lists(
    st.builds(
        lambda handle, ids, end, text: StepItem(
            handle, 0, 0, ids, [token / 2 for token in ids], end, text
        ),
        st.integers(1, 3),
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from([GOES_ON, *FINISH_REASONS, ERROR]),
        st.just("E2105 TritonUnavailable: gone"),
    ),
    max_size=9,
)


@given(steps)
def test_joined_events_have_the_tokens_and_ends_of_each_request_in_order(
    items: list[StepItem],
) -> None:
    def said(events: Iterable[tuple[int, TokenEvent]]) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}
        for handle, event in events:
            ends = [end for end in (event.finish, event.error and str(event.error)) if end]
            assert event.error is None or not event.token_ids
            of_tokens = zip(event.token_ids, event.log_probs, strict=True)
            found.setdefault(handle, []).extend([*of_tokens, *ends])
        return found

    wanted: dict[int, list[Any]] = {}
    sent = []
    for item in items:
        of_handle = wanted.setdefault(item.handle, [])
        if not (of_handle and isinstance(of_handle[-1], str)):  # nothing follows an end
            ends = [FINISH_REASONS.get(item.end, str(item.error))] if item.end else []
            of_handle.extend([*zip(item.ids, item.log_probs, strict=True), *ends])
            sent.append(item)
    assert said(events_of(sent)) == wanted
    assert said(coalesce_events(list(events_of(sent)))) == wanted


def test_a_triton_that_no_server_has_started_has_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engine_spec.ADDRESS_VARIABLE, raising=False)
    with pytest.raises(TritonUnavailable, match=f"{engine_spec.ADDRESS_VARIABLE} is not set"):
        engine_spec.own_addresses()
