"""Tensor contract: requests survive encoding and decoding; unsupported inputs are refused."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.engines import tensor_contract
from cog_triton.engines.request import REQUEST, EngineRequest
from cog_triton.errors import InvalidArgument
from cog_triton.system.paths import triton_model_repo
from cog_triton.text.guide import Guide
from cog_triton.text.sampling import MAX_SEED, SAMPLING, SamplingParams
from cog_triton.triton.model_repository import read_config

CONFIG = read_config(triton_model_repo() / "tensorrt_llm" / "config.pbtxt")
INPUTS = {tensor.name: tensor for tensor in CONFIG.input}
DTYPES = {
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_UINT64": np.uint64,
    "TYPE_FP32": np.float32,
    "TYPE_BOOL": np.bool_,
    "TYPE_STRING": np.object_,
}
Tensors = dict[str, np.ndarray[Any, Any]]


def tensors_of(values: dict[str, Any]) -> Tensors:
    """What Triton makes of JSON values: typed by the model's config, with a batch dimension."""
    made = {}
    for name, value in json.loads(json.dumps(values)).items():
        config = INPUTS[name]
        kind = config.DESCRIPTOR.fields_by_name["data_type"].enum_type
        dtype = DTYPES[kind.values_by_number[config.data_type].name]
        dims = [1, *config.dims]
        value = value.encode() if isinstance(value, str) else value
        made[name] = np.array(value, dtype=dtype).reshape(dims)
    return made


FLOATS32 = {"width": 32, "allow_nan": False, "allow_infinity": False}
IDS = st.integers(0, 2**31 - 1)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 2**31 - 1))
    penalty = st.floats(**FLOATS32)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        temperature=draw(st.floats(min_value=0, **FLOATS32)),
        top_k=draw(st.integers(0, 2**31 - 1)),
        top_p=draw(st.floats(min_value=0, max_value=1, width=32)),
        repetition_penalty=draw(st.floats(min_value=0, exclude_min=True, **FLOATS32)),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        length_penalty=draw(penalty),
        seed=draw(st.integers(0, MAX_SEED)),
    )


WORDS = st.lists(st.lists(IDS, min_size=1).map(tuple)).map(tuple)
TAG = (
    '{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<"], "tags":'
    ' [{"type": "tag", "begin": "<f", "content": {"type": "json_schema", "json_schema": {}},'
    ' "end": ">"}]}}'
)
REQUESTS = st.builds(
    EngineRequest,
    input_ids=st.lists(IDS, min_size=1),
    sampling=samplings(),
    end_id=st.none() | st.integers(-1, 2**31 - 1),
    pad_id=st.none() | st.integers(-1, 2**31 - 1),
    stop_words=WORDS,
    bad_words=WORDS,
    guide=st.none()
    | st.sampled_from(
        [
            Guide("json_schema", '{"type":"object"}'),
            Guide("json_schema", '{"const":"ü"}'),
            Guide("regex", "[a-zü]{2,3}"),
            Guide("grammar", 'root ::= "a"'),
            Guide("structural_tag", TAG),
            Guide("native_tag", '{"format": {"type": "any_text"}}'),
        ]
    ),
    streaming=st.booleans(),
    exclude_input_in_output=st.booleans(),
    return_log_probs=st.booleans(),
    return_num_input_tokens=st.booleans(),
    return_num_output_tokens=st.booleans(),
)


@given(REQUESTS)
def test_a_request_survives_encoding_and_decoding(request: EngineRequest) -> None:
    assert (
        tensor_contract.decode_request(tensors_of(tensor_contract.encode_request(request)))
        == request
    )


def test_every_field_of_a_request_is_encoded() -> None:
    """Each is a row of the table, or has a codec: nothing may be dropped on the way."""
    names = {field.name for field in fields(EngineRequest)}
    codecs = {"input_ids", "sampling", "guide", "adapter", "images"}
    assert names - codecs == {row.name for row in REQUEST}
    assert [row.name for row in SAMPLING] == [field.name for field in fields(SamplingParams)]


def request(**values: Any) -> Tensors:
    plain = EngineRequest(input_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=5))
    return tensors_of({**tensor_contract.encode_request(plain), **values})


@pytest.mark.parametrize("name", ["input_ids", "input_lengths", "request_output_len"])
def test_a_missing_input_is_named(name: str) -> None:
    tensors = request()
    del tensors[name]
    with pytest.raises(InvalidArgument, match=f"{name}: missing"):
        tensor_contract.decode_request(tensors)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("input_lengths", [4], "input_lengths=4: input_ids has 3 tokens"),
        ("input_lengths", [3, 3], "a batch of 2 prompts: send a request for each"),
        ("temperature", [-1.0], "temperature=-1"),
        ("temperature", [[1.0, 1.0]], "temperature: shape"),
        ("embedding_bias", [[0.0] * 8], "does not support embedding_bias"),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: list[Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        tensor_contract.decode_request({**request(), name: np.array(value)})


UNSUPPORTED = sorted(
    name
    for name, config in INPUTS.items()
    if name not in tensor_contract.SUPPORTED_INPUTS
    and list(config.dims) == [1]
    and config.data_type != 13
)


def test_unsupported_inputs_are_refused_by_name_unless_their_values_are_neutral() -> None:
    neutral = tensor_contract._NEUTRAL
    for name in UNSUPPORTED:
        dtype = request(**{name: 0})[name].dtype
        value = not neutral.get(name, 0) if dtype == np.bool_ else 3
        with pytest.raises(InvalidArgument, match=rf"{name}=.*does not support {name}"):
            tensor_contract.decode_request(request(**{name: value}))
        if name in neutral:
            given = tensor_contract.decode_request(request(**{name: neutral[name]}))
            assert given == tensor_contract.decode_request(request()), name


@pytest.mark.parametrize(
    ("kind", "guide", "words"),
    [
        (None, "{}", "needs guided_decoding_guide_type"),
        ("json_schema", None, "guided_decoding_guide: missing"),
        ("lark", None, "'lark'"),
        ("structural_tag", "[]", "guided_decoding_guide: must be a JSON object"),
        ("regex", " ", "_guide: is empty"),
        ("json_schema", '{"a": ', "guided_decoding_guide: not JSON"),
    ],
)
def test_unsupported_guides_are_refused(kind: str | None, guide: str | None, words: str) -> None:
    given = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    with pytest.raises(InvalidArgument) as caught:
        tensor_contract.decode_request(request(**{k: v for k, v in given.items() if v}))
    assert words in caught.value.detail


def test_older_names_of_inputs_are_taken() -> None:
    older = {"min_length": np.array([2], np.int32), "random_seed": np.array([3], np.uint64)}
    plain = request()
    del plain["min_tokens"], plain["seed"]
    sampling = tensor_contract.decode_request({**plain, **older}).sampling
    assert (sampling.min_tokens, sampling.seed) == (2, 3)


def test_parameters_that_clients_send_are_taken_and_unknown_ones_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = list(INPUTS)
    tensor_contract.check_parameters(["id", "triton_enable_empty_final_response"], known)
    tensor_contract.check_parameters(["Streaming"], known)  # NVIDIA's client, with a stop request
    assert not caplog.text
    for _ in range(3):
        tensor_contract.check_parameters(["my\x1bqueue"], known)
    assert caplog.text.count("request parameter 'my\\\\x1bqueue' is unknown, and ignored") == 1


@given(WORDS, st.booleans())
def test_words_survive_flattening(words: tuple[tuple[int, ...], ...], batched: bool) -> None:
    tensor = tensor_contract.flatten_words(words)
    assert tensor.dtype == np.int32
    assert tensor.shape == (2, sum(map(len, words)))
    assert tensor_contract.unflatten_words(tensor[None] if batched else tensor) == words


def test_flattened_words_have_ids_over_end_offsets() -> None:
    """As TensorRT-LLM documents it: ids end to end; inclusive end offsets, padded with -1."""
    tensor = tensor_contract.flatten_words([(5, 6), (7,), (8, 9)])
    assert tensor.tolist() == [[5, 6, 7, 8, 9], [2, 3, 5, -1, -1]]


def test_adapters_are_named_and_refused_where_there_are_none() -> None:
    values = tensor_contract.encode_request(
        EngineRequest(input_ids=[1], sampling=SamplingParams(max_tokens=1), adapter="sql")
    )
    assert values["lora_name"] == "sql"
    tensors = {
        "input_ids": np.array([[1]]),
        "input_lengths": np.array([[1]]),
        "request_output_len": np.array([[1]]),
        "lora_name": np.array([[b"sql"]], dtype=object),
    }
    assert tensor_contract.decode_request(tensors).adapter == "sql"
    with pytest.raises(InvalidArgument, match="lora_name: this server has no LoRA adapters"):
        tensor_contract.check_parameters(["lora_name"], ["input_ids"])
