"""Token client: requests, stopping the engine, printed responses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scripted_server import HANG, Answer, Part, Request, event, serving, stream, whole
from small_tokenizers import byte_level, save
from typer.testing import CliRunner

from cog_triton.cli.app import app
from cog_triton.errors import InvalidArgument
from cog_triton.triton.token_client import TokenRequest


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "400")


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["client", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def asked(answer: Answer, *arguments: object) -> tuple[list[Request], str]:
    with serving(answer) as server:
        code, said = run("--url", server.url, *arguments)
    assert code == 0, said
    return server.requests, said


def done(*ids: int) -> list[Part]:
    return stream(event(output_ids=list(ids), sequence_length=len(ids)))


def test_request_has_only_given_values() -> None:
    (request,), said = asked(done(5, 6, 7, 8), "--input-ids", "5,6", "--request-output-len", 2)
    assert request.path == "/v2/models/tensorrt_llm/generate_stream"
    sent = request.json
    assert re.fullmatch(r"client-\d+-\d+", sent.pop("id"))
    assert sent == {
        "input_ids": [5, 6],
        "input_lengths": 2,
        "request_output_len": 2,
        "beam_width": 1,
        "streaming": False,
        "temperature": 1.0,
        "runtime_top_k": 1,
        "runtime_top_p": 0.0,
    }
    assert said == "Got completed request\noutput_ids = [[5, 6, 7, 8]]\n"


def test_every_option_is_sent() -> None:
    (request,), _ = asked(
        done(1),
        *("--input-ids", "1", "--model-name", "a b", "--request-id", "mine", "-b", 1, "-n", 1),
        *("--temperature", 0.5, "--top-k", 4, "--top-p", 0.25, "--seed", 7, "--end-id", -1),
        *("--repetition-penalty", 1.5, "--presence-penalty", 2, "--frequency-penalty", -1),
        *("--pad-id", 9, "--exclude-input-in-output", "--streaming"),
    )
    assert request.path == "/v2/models/a%20b/generate_stream"
    assert request.json == {
        "id": "mine",
        "input_ids": [1],
        "input_lengths": 1,
        "request_output_len": 16,
        "beam_width": 1,
        "num_return_sequences": 1,
        "streaming": True,
        "temperature": 0.5,
        "runtime_top_k": 4,
        "runtime_top_p": 0.25,
        "seed": 7,
        "end_id": -1,
        "pad_id": 9,
        "repetition_penalty": 1.5,
        "presence_penalty": 2.0,
        "frequency_penalty": -1.0,
        "exclude_input_in_output": True,
    }


def test_text_is_encoded_and_the_response_decoded(tmp_path: Path) -> None:
    tokenizer = byte_level()
    save(tmp_path, tokenizer, eos_token="<|im_end|>")
    ids = tokenizer.encode("hello world").ids
    (request,), said = asked(done(*ids, *ids), "--tokenizer_dir", tmp_path, "--text", "hello world")
    assert request.json["input_ids"] == ids
    assert request.json["end_id"] == tokenizer.token_to_id("<|im_end|>")
    assert said.splitlines()[1:] == [
        f"output_ids = [{[*ids, *ids]}]",
        "Input: hello world",
        f"Output: {tokenizer.decode(ids)}",
    ]


def test_ids_are_read_from_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "ids.csv"
    path.write_text("1, 2,3\n4\n")
    (request,), _ = asked(done(1, 2, 3), "--input-tokens-csv", path)
    assert request.json["input_ids"] == [1, 2, 3]


def test_stream_is_printed_as_it_arrives() -> None:
    answer = stream(event(output_ids=7, sequence_length=1), event(output_ids=[8, 9]))
    _, said = asked(answer, "--input-ids", "5", "-S")
    assert said == "[7]\n[8, 9]\nGot completed request\noutput_ids = [[5, 7, 8, 9]]\n"


def test_beams_are_split_by_their_lengths() -> None:
    answer = stream(event(output_ids=[1, 5, 6, 1, 7, 0], sequence_length=[3, 2]))
    _, said = asked(answer, "--input-ids", "1", "--beam-width", 2)
    assert "output_ids = [[1, 5, 6], [1, 7]]" in said


def test_sequences_are_split_by_their_index() -> None:
    answer = stream(
        event(output_ids=[1, 8], sequence_length=2, sequence_index=1),
        event(output_ids=[1, 5, 6], sequence_length=3, sequence_index=0),
    )
    _, said = asked(answer, "--input-ids", "1", "-n", 2)
    assert "output_ids = [[1, 5, 6], [1, 8]]" in said


def test_stop_is_sent_as_a_second_request() -> None:
    """The answer waits for the stop, as an engine's that has tokens left to make."""

    def answer(request: Request) -> list[Part]:
        if request.json.get("stop"):
            return stream()
        server.request(1)
        return stream(event(output_ids=[1, 7], sequence_length=2))

    with serving(answer) as server:
        code, said = run(
            *("--url", server.url, "--input-ids", "1", "--request-output-len", 50),
            *("--stop-after-ms", 50),
        )
    assert code == 0
    first, stop = server.requests
    assert stop.json["stop"] is True
    assert stop.json["id"] == first.json["id"]
    assert said.startswith("Stopped after 50 ms: 1 of 50 tokens\n")


def test_stop_by_closing_the_connection() -> None:
    with serving(stream(event(output_ids=[7]), HANG)) as server:
        code, said = run(
            *("--url", server.url, "--input-ids", "1", "-S", "--stop-after-ms", 100),
            "--stop-via-request-cancel",
        )
        assert server.request().left.wait(60)
    assert code == 0
    assert said == "[7]\nStopped after 100 ms: 1 of 16 tokens\noutput_ids = [[1, 7]]\n"
    assert len(server.requests) == 1


def test_completion_before_the_stop_is_reported() -> None:
    requests, said = asked(done(1, 2), "--input-ids", "1", "--stop-after-ms", 60_000)
    assert said.startswith("Got completed request: it had ended before 60000 ms\n")
    assert len(requests) == 1


def test_failed_stop_is_reported() -> None:
    def answer(request: Request) -> list[Part]:
        if request.json.get("stop"):
            return [whole(json.dumps({"error": "no such thing"}).encode(), "400 Bad Request")]
        server.request(1)
        return done(1, 2)

    with serving(answer) as server:
        code, said = run("--url", server.url, "--input-ids", "1", "--stop-after-ms", 10)
    assert code == 1
    assert "E2100 TritonUnknownError: no such thing" in said


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"error": "E1005 InvalidArgument: beam_width=2: no"}, "E1005 InvalidArgument: beam_width"),
        ({"output_ids": ["a"]}, "E2104 TritonMalformedEvent: output_ids=['a']"),
        ({"output_ids": [1, 2, 3], "sequence_length": [3]}, "E2104"),
    ],
)
def test_error_responses_are_raised_with_their_code(body: dict[str, Any], says: str) -> None:
    with serving(stream(event(**body))) as server:
        code, said = run("--url", server.url, "--input-ids", "1", "--beam-width", 2)
    assert code == 1
    assert says in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--input-ids", "1,x"), "E1005 InvalidArgument: --input-ids: 'x' is not a token id"),
        (("--input-ids", ""), "E1005"),
        (("--input-tokens-csv", "/nowhere.csv"), "--input-tokens-csv='/nowhere.csv': cannot be"),
        (("--input-ids", "1", "--top-p", "3"), "E1005 InvalidArgument: top_p=3.0"),
        (("--input-ids", "1", "--request-output-len", "0"), "E1005 InvalidArgument: max_tokens=0"),
        (("--input-ids", "1", "--url", "https://a:1"), "--url='https://a:1': must be HOST:PORT"),
        (("--input-ids", "1", "--url", "a:b"), "--url='a:b': must be"),
        (("--input-ids", "1", "--url", "127.0.0.1:1"), "E2105 TritonUnavailable: cannot connect"),
        (("--tokenizer-dir", "/nowhere"), "E2102 TritonTokenizerError: /nowhere/tokenizer.json"),
        ((), "name a tokenizer with --tokenizer-dir"),
    ],
)
def test_bad_options_are_refused(arguments: tuple[str, ...], says: str) -> None:
    code, said = run(*arguments)
    assert code == 1
    assert says in said
    assert "Traceback" not in said


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="there is no token"):
        TokenRequest(input_ids=[], output_len=1)
