"""Messages between own processes: frames, round trips and refusals, and the steps among them."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
from array import array
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton import errors
from cog_triton.engines import engine_messages, step_items
from cog_triton.engines.engine_messages import (
    Cancel,
    Event,
    Hello,
    Others,
    StepLoad,
    Submit,
    Welcome,
)
from cog_triton.engines.engine_orders import Opened, Serve, Stop
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.mock.mock_request import MockRequest
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.step_items import EncodedStep, StepItem, decode, encode, merge
from cog_triton.engines.vllm.host_messages import (
    TextEvent,
    TextRequest,
)
from cog_triton.errors import InvalidArgument, TritonMalformedEvent
from cog_triton.ipc import framing, messages
from cog_triton.ipc.framing import FrameDecoder, FrameError, frame
from cog_triton.ipc.messages import Message, Stream
from cog_triton.pictures.image_limits import ImagePart
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import SamplingParams

handles = st.integers(-(2**63), 2**63 - 1)
ids = st.integers(-(2**31), 2**31 - 1)
words = st.lists(st.lists(ids, max_size=3).map(tuple), max_size=3).map(tuple)
images = st.lists(st.builds(ImagePart, st.text(), st.binary()), max_size=3).map(tuple)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(10, 1000),
    temperature=st.floats(0, 10),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.lists(st.integers(0, 10**6), max_size=3).map(tuple),
)
asked: dict[str, Any] = {
    "input_ids": st.lists(ids),
    "sampling": sampling,
    "end_id": st.none() | ids,
    "stop_words": words,
    "bad_words": words,
    "guide": st.none() | st.builds(Guide, st.just("regex"), st.text()),
    "adapter": st.none() | st.text(),
    "images": images,
    "streaming": st.booleans(),
    "top_log_probs": st.integers(0, 20),
    "dimensions": st.none() | st.integers(1, 9),
}
texts = st.lists(st.text(), max_size=3)
requests = st.one_of(
    st.builds(EngineRequest, **asked),
    st.builds(
        MockRequest,
        **asked,
        tps=st.none() | st.floats(0, 9),
        inject=st.sampled_from([None, "hang"]),
    ),
    st.builds(
        TextRequest,
        prompt=st.text(),
        sampling=st.fixed_dictionaries(
            {"n": st.integers(1, 4), "stop": texts},
            optional={"structured_outputs": st.fixed_dictionaries({"json": st.text()})},
        ),
        stream=st.booleans(),
        images=images,
    ),
)
events = st.one_of(
    st.builds(
        TextEvent,
        texts=texts,
        finish_reasons=st.lists(st.none() | st.just("stop"), max_size=2),
        cumulative_logprobs=st.lists(st.floats(allow_nan=False)),
        logprobs=texts,
        output_token_counts=st.lists(st.integers(0)),
        input_token_count=st.integers(0),
        finish=st.none() | st.just("stop"),
        error=st.none(),
    ),
)
steps = st.builds(
    EncodedStep,
    st.lists(st.integers(-(2**63), 2**63 - 1)).map(lambda found: array("q", found)),
    st.lists(st.floats(width=32, allow_nan=False)).map(lambda found: array("f", found)),
    texts,
)
others = st.one_of(
    st.builds(Hello, st.sampled_from(engine_messages.ROLES)),
    st.builds(Welcome, st.integers(1)),
    st.builds(Others, st.booleans()),
    st.builds(StepLoad, st.integers(0)),
    st.builds(Cancel, handles),
    st.builds(Event, handles, events),
    st.builds(KVCacheStats, st.floats(0, 1), st.none() | st.integers(1)),
    steps,
)


@given(handles, requests)
def test_requests_arrive_as_they_were_sent(handle: int, request: Any) -> None:
    arrived = engine_messages.decode(engine_messages.submit(handle, request))
    assert isinstance(arrived, Submit)
    assert arrived.handle == handle
    assert arrived.request() == request
    assert type(arrived.request()) is type(request)


@given(others)
def test_other_messages_arrive_as_they_were_sent(sent: Any) -> None:
    assert engine_messages.decode(engine_messages.encode(sent)) == sent


@given(st.binary(max_size=60))
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    try:
        arrived = engine_messages.decode(payload)
        if isinstance(arrived, Submit):
            arrived.request()
    except FrameError:
        return
    assert engine_messages.decode(engine_messages.encode(arrived)) == arrived


def content(*head: Any, tail: bytes = b"") -> bytes:
    return frame(json.dumps(head).encode()) + tail


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (content("Surprise", {}), "'Surprise'"),
        (content("EngineRequest", {"input_ids": 8}), "missing required field `sampling`"),
        (content("EngineRequest", {"input_ids": 9}, tail=bytes(9)), "not a multiple"),
        (content("EngineRequest", {"input_ids": 2**70}), "malformed message"),
        (content("TextRequest", {"prompt": "\ud800", "sampling": {}}), "malformed message"),
        (frame(b"[" * 99999), "malformed message"),
    ],
)
def test_refusals_say_what_is_wrong(sent: bytes, said: str) -> None:
    with pytest.raises(FrameError, match=said):
        Submit(1, sent).request()


def test_a_value_out_of_range_is_the_coded_error_of_its_class() -> None:
    sent = content("EngineRequest", {"input_ids": 8, "sampling": {"max_tokens": 0}}, tail=bytes(8))
    with pytest.raises(errors.InvalidArgument, match="max_tokens=0"):
        Submit(1, sent).request()


class Sent(Message, frozen=True):
    error: errors.CogTritonError | None = None
    pairs: tuple[tuple[str, int], ...] = ()
    numbers: Mapping[int, str] = {}


@pytest.mark.parametrize(
    "sent",
    [
        Sent(None, (("\udcff", 1),), {1: "a"}),
        Sent(errors.InvalidArgument("x=1: must be 2\nor 3")),
    ],
)
def test_errors_keep_their_codes(sent: Sent) -> None:
    arrived = messages.decode(messages.encode(sent))
    assert repr(arrived) == repr(sent)
    with pytest.raises(FrameError, match="'Sent'"):
        messages.decode(messages.encode(sent), Stop | Serve)


STUB = """
import sys
sys.modules["msgspec"] = None
from cog_triton.engines import engine_client, engine_messages, request
from cog_triton.text.sampling import SamplingParams

asked = request.EngineRequest(input_ids=[1, 2], sampling=SamplingParams(max_tokens=5))
sys.stdout.buffer.write(engine_messages.submit(7, asked))
told = engine_messages.TextEvent(
    texts=["a"],
    finish_reasons=[None],
    cumulative_logprobs=[0.0],
    logprobs=["null"],
    output_token_counts=[1],
    input_token_count=2,
)
sent = engine_messages.encode(engine_messages.Event(7, told))
assert engine_messages.decode(sent).event == told
"""


def test_a_stub_needs_no_msgspec() -> None:
    done = subprocess.run([sys.executable, "-c", STUB], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert engine_messages.decode(done.stdout).request().input_ids == [1, 2]


PLAIN = StepItem(7, 0, 3, [5, 6], [])
LAST = StepItem(2**62, 0, 0, [], [], step_items.LENGTH)
SAMPLED = StepItem(8, 1, 0, [5, 6], [-0.5, -0.25], step_items.STOP, None, 1)
ALTERNATIVES = StepItem(
    9, 0, 0, [1, 2], [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], 0, None, 3, [3, 4, 5, 6]
)
FAILED = StepItem(10, 0, 4, [1], [], step_items.ERROR, "E2105 TritonUnavailable: gone")
FAILED_LATER = StepItem(11, 0, 4, [1], [-1.0], step_items.ERROR, "E1005 other", 1)
ALL = [PLAIN, LAST, SAMPLED, FAILED, ALTERNATIVES, FAILED_LATER]


def test_items_survive_encoding() -> None:
    step = encode(ALL)
    assert decode(step.items.tolist(), step.log_probs.tolist(), step.errors) == ALL
    assert decode(step.items, step.log_probs, step.errors) == ALL
    assert decode([]) == []


def test_the_layout_is_the_written_one() -> None:
    step = encode([PLAIN, ALTERNATIVES, FAILED])
    plain = [7, 0, 3, 0, 2, 0, 5, 6]
    alternatives = [9, 0, 0, 0, 2, 3, 1, 2, 3, 4, 5, 6]
    assert step.items.tolist() == [*plain, *alternatives, 10, 0, 4, 4, 1, 0, 1]
    assert (step.items.itemsize, step.log_probs.itemsize) == (8, 4)
    assert step.log_probs.tolist() == ALTERNATIVES.log_probs
    assert step.errors == [FAILED.error]


@pytest.mark.parametrize(
    ("ints", "floats", "errors"),
    [
        ([1], [], []),
        ([1, 0, 0, 0, 2, 0, 5], [], []),
        ([1, 0, 0, 0, -1, 0, 5], [], []),
        ([1, 0, 0, 5, 0, 0], [], []),
        ([1, 0, 0, -1, 0, 0], [], []),
        ([1, 0, 0, 0, 1, -1, 5], [], []),
        ([1, 0, 0, 0, 1, 1, 5], [], []),
        ([1, 0, 0, 0, 1, 3, 5, 6], [0.0, 0.0, 0.0], []),
        ([1, 0, 0, 4, 0, 0], [], []),
        ([1, 0, 0, 0, 0, 0], [1.0], []),
        ([1, 0, 0, 0, 0, 0], [], ["E2105 nobody's"]),
        ([1, 0, 0, 0, None, 0], [], []),
        ([1, 0, 0, 0, "2", 0, 5, 6], [], []),
        ([1, 0, 0, None, 0, 0], [], []),
    ],
)
def test_malformed_steps_are_refused(ints: Any, floats: Any, errors: Any) -> None:
    good = encode([PLAIN]).items.tolist()
    with pytest.raises(TritonMalformedEvent, match="E2104 TritonMalformedEvent: a step"):
        decode([*good, *ints], floats, errors)


def test_a_refusal_shows_what_is_malformed() -> None:
    good = encode([PLAIN]).items.tolist()
    with pytest.raises(TritonMalformedEvent) as caught:
        decode([*good, 1, 0, 0, 0, 900, 0, *range(1000, 1500)])
    assert "malformed at 8: [1, 0, 0, 0, 900, 0, 1000," in str(caught.value)
    assert len(str(caught.value)) < 300


def test_merging_joins_what_follows() -> None:
    items = [
        StepItem(1, 0, 0, [1], []),
        StepItem(2, 0, 5, [9], [-1.0, -1.5], 0, None, 2, [8]),
        StepItem(1, 0, 1, [2, 3], []),
        StepItem(2, 0, 6, [7], [-2.0, -2.5], 0, None, 2, [6]),
        StepItem(1, 1, 3, [4], []),
        StepItem(1, 0, 3, [], [], step_items.ERROR, "E2105 gone"),
        StepItem(2, 0, 7, [], [], step_items.STOP),
    ]
    assert merge(items) == [
        StepItem(1, 0, 0, [1, 2, 3], [], step_items.ERROR, "E2105 gone"),
        StepItem(2, 0, 5, [9, 7], [-1.0, -1.5, -2.0, -2.5], step_items.STOP, None, 2, [8, 6]),
        StepItem(1, 1, 3, [4], []),
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (StepItem(1, 0, 0, [1], []), StepItem(1, 0, 2, [3], [])),
        (StepItem(1, 0, 0, [1], []), StepItem(1, 0, 0, [3], [])),
        (StepItem(1, 0, 0, [1], []), StepItem(1, 0, 1, [3], [-1.0], 0, None, 1)),
        (StepItem(1, 0, 0, [1], [], step_items.STOP), StepItem(1, 0, 1, [3], [])),
    ],
)
def test_merging_hides_no_gap_or_end_and_mixes_no_widths(first: StepItem, second: StepItem) -> None:
    assert merge([first, second]) == [first, second]


def test_events_become_items() -> None:
    step = step_items.StepBuffer()
    step.add(1, 4, TokenEvent([5], [-0.5]))
    step.add(2, 7, TokenEvent([6], [-0.5], "length"), 1)
    step.add(3, 0, TokenEvent([], [], error=InvalidArgument("x=1: must be 2")))
    step.add(1, 5, TokenEvent([8], [0.0], "cancelled"))
    coded = "E1005 InvalidArgument: x=1: must be 2"
    length = StepItem(2, 0, 7, [6], [-0.5], step_items.LENGTH, None, 1)
    failed = StepItem(3, 0, 0, [], [], step_items.ERROR, coded)
    assert decode(*step.encoded()) == [
        StepItem(1, 0, 4, [5], []),
        length,
        failed,
        StepItem(1, 0, 5, [8], [], step_items.CANCELLED),
    ]
    step.merge()
    assert decode(*step.encoded()) == [
        StepItem(1, 0, 4, [5, 8], [], step_items.CANCELLED),
        length,
        failed,
    ]


payloads = st.lists(st.binary(max_size=300), max_size=8)


@given(payloads, st.lists(st.integers(1, 64), min_size=1))
def test_a_decoder_gives_back_what_was_framed_however_it_arrives(
    sent: list[bytes], pieces: list[int]
) -> None:
    content = b"".join(map(framing.frame, sent))
    decoder, got, at, turn = FrameDecoder(), [], 0, 0
    while at < len(content):
        size = pieces[turn % len(pieces)]
        got += decoder.feed(content[at : at + size])
        at, turn = at + size, turn + 1
    assert got == sent


def test_a_frame_above_the_limit_is_refused_before_it_is_read() -> None:
    head = struct.pack("!I", 11)
    with pytest.raises(FrameError, match="11 bytes; 10 at most"):
        FrameDecoder(10).feed(head)


PATIENCE_S = 60


def test_two_streams_understand_each_other_until_one_hangs_up() -> None:
    async def main() -> None:
        ours, theirs = [await Stream.of(own) for own in socket.socketpair()]
        for sent in (Serve("address", 2), Stop()):
            ours.send(sent)
            assert await theirs.receive() == sent
        theirs.send(Opened())
        theirs.close()
        assert await ours.receive() == Opened()
        with pytest.raises(EOFError):
            await ours.receive()
        ours.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (struct.pack("!I", framing.CONTROL_LIMIT + 1), "16777216 at most"),
        (framing.frame(b'{"command":"status"}\n'), "malformed"),
        (framing.frame(b'{"type": "No"}'), "'No'"),
        (framing.frame(b'{"type": "Serve", "address": 1, "generation": 1}'), "Expected `str`"),
    ],
)
def test_what_is_no_message_is_an_error(content: bytes, said: str) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            stream = await Stream.of(ours)
            theirs.sendall(content)
            with pytest.raises(FrameError, match=said):
                await stream.receive()
            stream.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
