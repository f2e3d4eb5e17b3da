"""Inputs of the text models: one prompt of a request as the engine gets it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_tokenizers import byte_level

from cog_triton.backend import text_inputs
from cog_triton.backend.text_inputs import InputOptions, Prompt, Tensors
from cog_triton.engines.tensor_contract import ALIASES
from cog_triton.errors import InvalidArgument
from cog_triton.text.prompt_encoder import PromptEncoder
from cog_triton.text.stop_strings import WordLimits
from cog_triton.text.tokenizer import EngineTokenizer

TOKENIZER = EngineTokenizer(byte_level())
OPTIONS = InputOptions(
    model="ensemble",
    tokenizer=TOKENIZER,
    encoder=PromptEncoder(TOKENIZER, None),
    word_limits=WordLimits(4, 16),
    add_special_tokens=True,
    engine_names={"min_tokens": "min_length"},
    end_id=7,
    pad_id=None,
    decoupled=True,
    engine_streams=True,
    excludes_input=True,
    takes_bias=True,
)
WHOLE = replace(OPTIONS, engine_streams=False)
KINDS: dict[type, Any] = {int: np.int32, str: object, bool: bool, float: np.float32}


def inputs(*prompts: str, **values: Any) -> Tensors:
    rows = {"text_input": list(prompts), "max_tokens": [5] * len(prompts)}
    rows |= {name: [value] * len(prompts) for name, value in values.items()}
    tensors = {}
    for name, items in rows.items():
        lists = [item if isinstance(item, list) else [item] for item in items]
        raw = [[v.encode() if isinstance(v, str) else v for v in row] for row in lists]
        tensors[name] = np.array(raw, dtype=KINDS[type(lists[0][0])])
    return tensors


def prompt(options: InputOptions = OPTIONS, **values: Any) -> Prompt:
    return text_inputs.to_prompt(options, inputs("ab", **values))


def test_a_batch_is_split_into_prompts() -> None:
    rows = text_inputs.split(inputs("ab", "c", min_tokens=2))
    assert [text_inputs.to_prompt(OPTIONS, row).ids for row in rows] == [
        TOKENIZER.encode("ab"),
        TOKENIZER.encode("c"),
    ]
    assert rows[1]["min_tokens"].tolist() == [[2]]


def test_older_names_are_taken() -> None:
    given = inputs("a", min_length=3, random_seed=4)
    text_inputs.rename(given, ALIASES)
    assert (given["min_tokens"].item(), given["seed"].item()) == (3, 4)
    both = inputs("a", min_length=3, min_tokens=3)
    text_inputs.rename(both, ALIASES)
    assert both["min_tokens"].item() == 3
    with pytest.raises(InvalidArgument, match="min_length and min_tokens: two names"):
        text_inputs.rename(inputs("a", min_length=3, min_tokens=4), ALIASES)


def test_stop_words_are_matched_here_unless_the_engine_answers_whole() -> None:
    assert "stop_words_list" not in prompt(stop_words=["x"]).engine
    assert prompt(stop_words=["x"]).stop_words == ["x"]
    for options, more in ((WHOLE, {}), (OPTIONS, {"beam_width": 2})):
        found = prompt(options, stop_words=["x"], **more)
        assert found.engine["stop_words_list"].shape == (1, 2, 1)
        assert found.stop_words == ["x"]


def test_the_prompt_is_taken_off_whole_answers_of_engines_that_cannot_leave_it_out() -> None:
    ids = TOKENIZER.encode("ab")
    for options in (OPTIONS, WHOLE):
        assert prompt(options).without_input([*ids, 9]) == [*ids, 9]
    assert prompt(WHOLE).engine["exclude_input_in_output"].tolist() == [[True]]
    old = prompt(replace(WHOLE, excludes_input=False))
    assert "exclude_input_in_output" not in old.engine
    assert old.without_input([*ids, 9]) == [9]
    assert old.without_input([9]) == [9]


def test_the_engine_streams_unless_it_cannot_or_beams_are_wanted_whole() -> None:
    assert prompt().engine_streams
    assert prompt(beam_width=2, stream=True).engine_streams
    assert not prompt(beam_width=2).engine_streams
    assert not prompt(WHOLE).engine_streams
    with pytest.raises(InvalidArgument, match="stream=True: ensemble answers whole here"):
        prompt(replace(OPTIONS, decoupled=False), stream=True)


def test_biases_of_words_become_those_of_tokens() -> None:
    bias = {"embedding_bias_words": ["ab", "b"], "embedding_bias_weights": [1.5, 2.0]}
    (found,) = prompt(**bias).engine["embedding_bias"].tolist()
    a, b = TOKENIZER.encode("ab", add_special_tokens=False)
    assert (found[a], found[b], sum(found)) == (1.5, 3.5, 5.0)
    assert len(found) == TOKENIZER.tokenizer.get_vocab_size()
    assert "embedding_bias" not in prompt(embedding_bias_words=[""]).engine
    with pytest.raises(InvalidArgument, match="1 words; embedding_bias_weights has 2"):
        prompt(**{**bias, "embedding_bias_words": ["ab"]})
    with pytest.raises(InvalidArgument, match="embedding_bias_words: not supported here"):
        prompt(replace(OPTIONS, takes_bias=False), **bias)
