"""Error codes: unique, stable, documented, and read back from every text that wraps them."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cog_triton import errors
from cog_triton.errors import CogTritonError, FrameworkError, UserError

KINDS = errors.all_errors()
KIND = st.sampled_from(KINDS)


def test_codes_are_unique_and_sorted() -> None:
    codes = [kind.code for kind in KINDS]
    assert codes == sorted(set(codes))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_codes_follow_user_and_framework_errors(kind: type[CogTritonError]) -> None:
    assert re.fullmatch(r"E[12]\d{3}", kind.code)
    assert issubclass(kind, UserError) is kind.code.startswith("E1")
    assert issubclass(kind, FrameworkError) is kind.code.startswith("E2")


@given(KIND, st.text())
def test_the_text_starts_with_code_and_name(kind: type[CogTritonError], detail: str) -> None:
    assert str(kind(detail)) == f"{kind.code} {kind.__name__}: {detail}"


@given(KIND, st.text())
def test_errors_survive_pickling_and_copying(kind: type[CogTritonError], detail: str) -> None:
    for other in (pickle.loads(pickle.dumps(kind(detail))), copy.copy(kind(detail))):
        assert type(other) is kind
        assert other.detail == detail
        assert str(other) == str(kind(detail))


WRAPPINGS = [
    "{}",
    "Prediction failed: Async prediction failed: InvalidArgument: {}",
    "worker setup failed: worker setup failed (slot bbb0f721-ee88-4c0d): Setup failed:"
    " setup failed: TritonStartFailed: {}",
    "[coglet::setup] starting\ncog_triton.errors.PromptTooLong: {}",
    "in ensemble 'ensemble', {}",
    "in ensemble 'ensemble', Failed to process the request(s) for model 'preprocessing_0_0',"
    " message: InvalidArgument: {}",
]


@given(KIND, st.text(), st.sampled_from(WRAPPINGS))
def test_an_error_is_read_back_from_the_texts_of_cog_and_triton(
    kind: type[CogTritonError], detail: str, wrapping: str
) -> None:
    found = errors.from_text(wrapping.format(kind(detail)))
    assert type(found) is kind
    assert found is not None
    assert found.detail == detail.strip()


def test_tracebacks_that_triton_appends_are_cut_off() -> None:
    text = (
        "Failed to process the request(s) for model 'tensorrt_llm_0_0', message:"
        " InvalidArgument: E1005 InvalidArgument: x=1: must be 2\n\n"
        "At:\n  /opt/cog_triton/engines/tensor_contract.py(89): decode_request\n"
        "  /opt/cog_triton/backend/token_model.py(140): execute\n"
    )
    found = errors.from_text(text)
    assert found is not None
    assert found.detail == "x=1: must be 2"


def test_the_outermost_of_nested_errors_is_read_back() -> None:
    inner = errors.PromptTooLong("9 > 8")
    found = errors.from_text(str(errors.TritonStartFailed(f"the first request failed: {inner}")))
    assert type(found) is errors.TritonStartFailed
    assert found.detail == f"the first request failed: {inner}"


@pytest.mark.parametrize(
    "text", ["", "E1005", "E1005 InvalidArgument", "E1999 Foo: bar", "XE1005 Foo: bar", "no code"]
)
def test_texts_without_a_code_are_not_errors(text: str) -> None:
    assert errors.from_text(text) is None


@pytest.mark.parametrize(
    ("word", "hint"),
    [("temprature", "; did you mean 'temperature'?"), ("xyz", ""), ("", "")],
)
def test_nearest_name_is_a_hint(word: str, hint: str) -> None:
    assert errors.nearest(word, ["temperature", "top_p"]) == hint
