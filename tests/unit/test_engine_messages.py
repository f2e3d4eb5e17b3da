"""Messages between own processes, those of the engine protocol first: round trips and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton import errors
from cog_triton.engines import engine_messages
from cog_triton.engines.engine_messages import (
    Cancel,
    Event,
    Hello,
    Others,
    StepLoad,
    Submit,
    Welcome,
)
from cog_triton.engines.engine_orders import Serve, Stop
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.mock.mock_request import MockRequest
from cog_triton.engines.request import EngineRequest
from cog_triton.engines.step_items import EncodedStep
from cog_triton.engines.vllm.host_messages import (
    TextEvent,
    TextRequest,
)
from cog_triton.ipc import messages
from cog_triton.ipc.framing import FrameError, frame
from cog_triton.ipc.messages import Message
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
        (content("Surprise", {}), "'Surprise', which this version does not know"),
        (content("Welcome", {"max_batch_size": 4}), "'Welcome', which this version does not know"),
        (content("EngineRequest", {"input_ids": 8}), "missing required field `sampling`"),
        (content("EngineRequest", {"input_ids": 9}, tail=bytes(9)), "not a multiple"),
        (content("EngineRequest", {"input_ids": 2**70}), "malformed message"),
        (content("EngineRequest", {"input_ids": 0, "sampling": {"max_tokens": "9"}}), "`int`"),
        (content("TextRequest", {"prompt": "\ud800", "sampling": {}}), "malformed message"),
        (content("EngineRequest", None), "malformed message"),
        (frame(b"[" * 99999), "malformed message"),
        (b"\0\0\1\0", "malformed message"),
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
