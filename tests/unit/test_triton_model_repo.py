"""Model repository: consistency of the config.pbtxt files, and the text models' helpers."""

import functools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_fallback, byte_level

from cog_triton.backend import text_inputs
from cog_triton.backend.answers import TextResponses
from cog_triton.engines import tensor_contract
from cog_triton.errors import InvalidArgument, PromptRequired
from cog_triton.system.paths import triton_model_repo
from cog_triton.text.tokenizer import EngineTokenizer
from cog_triton.triton.model_repository import read_config

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble")
REPOSITORY = triton_model_repo()
CONFIGS: dict[str, Any] = {
    model: read_config(REPOSITORY / model / "config.pbtxt") for model in MODELS
}
TOKENIZERS = {
    "byte level": EngineTokenizer(byte_level()),
    "byte fallback": EngineTokenizer(byte_fallback()),
}
TOKENIZER = TOKENIZERS["byte level"]


def shape(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_type, tuple(tensor.dims)


def inputs(model: str) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in CONFIGS[model].input}


def outputs(model: str) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in CONFIGS[model].output}


@pytest.mark.parametrize("model", MODELS)
def test_each_models_defaults_are_complete(model):
    config = CONFIGS[model]
    assert config.name == model
    assert config.max_batch_size == 64
    assert len(inputs(model)) == len(config.input)
    assert len(outputs(model)) == len(config.output)
    assert (REPOSITORY / model / "1").is_dir()
    assert (REPOSITORY / model / "1" / "model.py").is_file() == (config.backend == "python")


def test_postprocessing_has_one_instance():
    (group,) = CONFIGS["postprocessing"].instance_group
    assert group.count == 1


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_models_that_stream_are_decoupled(model):
    assert CONFIGS[model].model_transaction_policy.decoupled


def test_engine_model_has_every_input_of_the_contract():
    known = inputs("tensorrt_llm")
    rendered = {tensor_contract.LORA_NAME}  # for engines that have adapters by name
    contract = tensor_contract.SUPPORTED_INPUTS | tensor_contract._NEUTRAL.keys()
    assert known.keys() >= contract - rendered
    required = {name for name, tensor in known.items() if not tensor.optional}
    assert required == {"input_lengths", "request_output_len"}


def test_engine_inputs_are_scalars_ragged_or_positions():
    for name, tensor in inputs("tensorrt_llm").items():
        scalar = tensor.HasField("reshape")
        assert not (scalar and tensor.allow_ragged_batch), name
        if scalar:
            assert (list(tensor.dims), list(tensor.reshape.shape)) == ([1], [])
        elif not tensor.allow_ragged_batch:
            assert name in ("mrope_rotary_cos_sin", "mrope_position_deltas")


def test_text_models_and_text_inputs_have_the_same_names():
    assert sorted(text_inputs.KNOWN_INPUTS) == sorted(inputs("ensemble"))
    for name, theirs in text_inputs.ENGINE_NAMES.items():
        ours, engines = inputs("ensemble")[name], inputs("tensorrt_llm")[theirs]
        assert (ours.data_type, len(ours.dims)) == (engines.data_type, len(engines.dims))


def test_decode_strings_drops_empty_words_and_refuses_invalid_utf8():
    tensor = np.array([[b"a", b""], [b"", b"\xc3\xbc"]], dtype=object)
    assert text_inputs.decode_strings("stop_words", tensor) == [["a"], ["ü"]]
    assert text_inputs.decode_strings("stop_words", None) == []
    with pytest.raises(InvalidArgument, match="stop_words: not UTF-8"):
        text_inputs.decode_strings("stop_words", np.array([[b"\xff"]], dtype=object))


def test_a_bias_is_refused_unless_it_is_empty():
    refuse = functools.partial(text_inputs.embedding_bias, None)
    assert refuse(None, None) is None
    assert refuse(np.array([[b""]], dtype=object), np.zeros((1, 0), np.float32)) is None
    with pytest.raises(InvalidArgument, match="embedding_bias_words"):
        refuse(np.array([[b"x"]], dtype=object), None)
    with pytest.raises(InvalidArgument, match="embedding_bias_weights"):
        refuse(None, np.array([[1.5]], np.float32))


@given(st.lists(st.lists(st.text("abc ü日", min_size=1)), min_size=1))
def test_word_lists_survive_encoding(rows):
    tensor = text_inputs.encode_word_lists(TOKENIZER, rows)
    expected = [
        tuple(tuple(TOKENIZER.encode(word, add_special_tokens=False)) for word in row)
        for row in rows
    ]
    if tensor is None:
        assert not any(expected)
    else:
        assert tensor.dtype == np.int32
        assert [tensor_contract.unflatten_words(words) for words in tensor] == expected


def test_pad_rows_pads_short_rows():
    assert text_inputs.pad_rows([[1, 2, 3], [4]], 9).tolist() == [[1, 2, 3], [4, 9, 9]]


def test_encode_prompt_refuses_an_empty_prompt_even_with_a_bos_token():
    tokenizer = TOKENIZERS["byte fallback"]
    assert tokenizer.encode("") != []
    with pytest.raises(PromptRequired, match="text_input"):
        text_inputs.encode_prompt(tokenizer, "text_input", "", add_special_tokens=True)


def chunks_of(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in pairwise(places)]


def run(reply: TextResponses, chunks: list[list[int]]) -> list[dict[str, Any]]:
    """The responses to chunks of ids, whose log probs are the ids negated."""
    sent = []
    for chunk in chunks:
        log_probs = -np.array([[chunk]], dtype=np.float32)
        sent.append(reply.feed(chunk, {"output_log_probs": log_probs}))
        if reply.finished:
            break
    sent.append(reply.finish())
    return [response for response in sent if response]


def texts(responses: list[dict[str, Any]]) -> list[str]:
    return [response["text_output"].item().decode() for response in responses]


ids_and_cuts = (
    st.lists(st.integers(0, 259), max_size=30),
    st.lists(st.integers(0, 30), max_size=6),
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(*ids_and_cuts)
def test_streamed_and_whole_responses_have_the_same_text(kind, ids, cuts):
    tokenizer = TOKENIZERS[kind]
    chunks = chunks_of(ids, cuts)
    decoded = tokenizer.tokenizer.decode(ids)
    assert "".join(texts(run(TextResponses(tokenizer, []), chunks))) == decoded
    assert texts(run(TextResponses(tokenizer, [], streaming=False), chunks)) == [decoded]
    repeated = texts(run(TextResponses(tokenizer, [], accumulate=True), chunks))
    assert all(later.startswith(text_inputs) for text_inputs, later in pairwise(repeated))
    assert (repeated or [""])[-1] == decoded


@given(*ids_and_cuts)
def test_no_log_prob_is_lost_or_sent_twice(ids, cuts):
    for streaming in (True, False):
        responses = run(TextResponses(TOKENIZER, [], streaming=streaming), chunks_of(ids, cuts))
        sent = [
            p for r in responses if "output_log_probs" in r for p in r["output_log_probs"].ravel()
        ]
        assert sent == [-token for token in ids]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_string_that_spans_tokens_ends_the_text(streaming):
    ids = TOKENIZER.encode("one two STOP three", add_special_tokens=False)
    reply = TextResponses(TOKENIZER, ["STOP"], streaming=streaming)
    assert "".join(texts(run(reply, [[token] for token in ids]))) == "one two "
    assert reply.finished


def test_whole_text_echoes_the_prompt_without_matching_stop_strings_in_it():
    prompt, answer = (TOKENIZER.encode(t, add_special_tokens=False) for t in ("STOP? ", "no"))
    reply = TextResponses(TOKENIZER, ["STOP"], streaming=False, prompt_ids=prompt)
    assert texts(run(reply, [answer])) == ["STOP? no"]


def test_stop_strings_wait_for_min_tokens():
    ids = TOKENIZER.encode("x.x.", add_special_tokens=False)
    reply = TextResponses(TOKENIZER, ["."], min_tokens=2)
    assert "".join(texts(run(reply, [[token] for token in ids]))) == "x.x"
