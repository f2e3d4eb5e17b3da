"""replicate: its client, with the platform between it and Cog's HTTP API played by `hosted_api`."""

from __future__ import annotations

import json

import httpx
import replicate
from cases import ASK as QUESTION
from cases import LONG as TOKENS
from cases import PARIS
from checks import check, main, raises, server, until
from hosted_api import HostedAPI
from replicate.exceptions import ModelError, ReplicateError

HERE = server("openvino")
API = HostedAPI(HERE.cog)
CLIENT = replicate.Client(api_token="none", base_url="http://platform", transport=API)
MODEL = "me/small"
VERSION = "0" * 64
ASK = {"prompt": QUESTION, "temperature": 0, "max_tokens": 32}
LONG = {"prompt": "Write a long story.", "max_tokens": TOKENS, "end_id": -1}


@check
def run_waits_for_the_answer() -> None:
    assert "".join(CLIENT.run(MODEL, input=ASK)).startswith(PARIS)
    assert API.requests[-1] == ("POST", "/predictions")


@check
def run_without_waiting_polls_what_webhooks_told() -> None:
    assert "".join(CLIENT.run(MODEL, input=ASK, wait=False)).startswith(PARIS)
    assert API.requests[-1][0] == "PUT"


@check
def predictions_are_created_and_reloaded() -> None:
    prediction = CLIENT.predictions.create(version=VERSION, input=ASK)
    assert prediction.status in ("starting", "processing", "succeeded")
    prediction.wait()
    assert "".join(prediction.output).startswith(PARIS)
    assert prediction.metrics["output_token_count"] > 2
    assert CLIENT.predictions.get(prediction.id).status == "succeeded"


@check
def output_is_iterated_as_it_comes() -> None:
    prediction = CLIENT.predictions.create(version=VERSION, input=ASK)
    assert "".join(prediction.output_iterator()).startswith(PARIS)


@check
def cancelling_stops_the_generation() -> None:
    with HERE.stops_a_generation(TOKENS):
        prediction = CLIENT.predictions.create(version=VERSION, input=LONG)
        until(lambda: HERE.metric("requests_running") == 1)
        prediction.cancel()
    until(lambda: CLIENT.predictions.get(prediction.id).status == "canceled")


@check
def a_models_failure_is_a_model_error() -> None:
    bad = ASK | {"prompt_template": "{nothing}"}
    error = raises(ModelError, lambda: CLIENT.run(MODEL, input=bad))
    assert str(error).startswith("E1004"), error
    error = raises(ModelError, lambda: CLIENT.run(MODEL, input=bad, wait=False))
    assert "E1004" in str(error), error


@check
def an_input_of_the_wrong_type_is_a_replicate_error() -> None:
    error = raises(ReplicateError, lambda: CLIENT.run(MODEL, input={"prompt": ["no text"]}))
    assert error.status == 422
    assert "prompt" in str(error.detail)


@check
def cogs_server_sent_events() -> None:
    """What the platform makes streams of: the client reads the platform's own."""
    text, kinds = "", []
    with httpx.stream(
        "POST",
        f"{HERE.cog}/predictions",
        json={"input": ASK},
        headers={"Accept": "text/event-stream"},
        timeout=60,
    ) as answer:
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kinds.append(value)
            elif name == "data" and kinds[-1] == "output":
                text += json.loads(value)["chunk"]
    assert text.startswith(PARIS)
    assert kinds[-1] == "completed"


if __name__ == "__main__":
    main()
