"""Responses that are kept: taken up again, made in the background, cancelled, deleted, gone on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import openai
import pytest
from chat_templates import CHATML_TOOLS
from loop_thread import call
from openai_server import THREE, TOKENIZER, Served, api, tokens, wait
from scripted_server import HANG, PATIENCE_S
from scripted_triton import event
from test_response_store import another

from cog_triton.errors import DiskFull
from cog_triton.front.keyring import sha256_of
from cog_triton.serving.openai import stored_responses
from cog_triton.serving.openai.response_file import ResponseFile
from cog_triton.serving.openai.stored_responses import RunningResponses

BODY = {"model": "small", "input": "Hi"}
BODY_TURN = {"role": "user", "content": [{"type": "input_text", "text": "b"}]}
WORDS = [f"{number} " for number in range(40)]
TEXT = "".join(WORDS)


@contextmanager
def kept(
    path: Path, size: int = 1 << 20, age: float = 3600, detached: int = 8, **times: float
) -> Iterator[RunningResponses]:
    bounds = {"detached_s": 3600.0, **times}
    file = ResponseFile(path, size, age)
    try:
        yield call(lambda: RunningResponses(file, detached, **bounds))
    finally:
        file.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunningResponses]:
    with kept(tmp_path / "responses") as found:
        yield found


def gated(*gates: object) -> list[Any]:
    """An answer of `WORDS` that waits for each gate in turn, the first after ten of them."""
    parts: list[Any] = []
    for number, word in enumerate(WORDS):
        if number % 10 == 0 and 0 < number <= 10 * len(gates):
            parts.append(gates[number // 10 - 1])
        parts += tokens(word)
    return parts


def begun(served: Served, **fields: Any) -> tuple[str, list[Any]]:
    """Id and first five events of a stream that its client then leaves."""
    found = []
    with served.client().responses.create(stream=True, **{**BODY, **fields}) as events:
        for item in events:
            found.append(item)
            if len(found) == 5:
                break
    return found[0].response.id, found


def get(served: Served, name: str, **options: Any) -> dict[str, Any]:
    answer = httpx.get(f"{served.url}/v1/responses/{name}", timeout=PATIENCE_S, **options)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ended(served: Served, name: str) -> dict[str, Any]:
    """A response once it is made."""
    wait(lambda: get(served, name)["status"] != "in_progress")
    return get(served, name)


def deltas(events: list[Any]) -> str:
    return "".join(item.delta for item in events if item.type == "response.output_text.delta")


def test_a_stream_goes_on_without_its_client_and_is_taken_up_again(store: RunningResponses) -> None:
    gate = Event()
    with api(gated(gate), store=store) as served:
        name, first = begun(served)
        assert get(served, name)["status"] == "in_progress"
        gate.set()
        at = first[-1].sequence_number
        rest = list(served.client().responses.retrieve(name, stream=True, starting_after=at))
        numbers = [item.sequence_number for item in [*first, *rest]]
        assert numbers == list(range(len(numbers)))
        assert deltas([*first, *rest]) == TEXT
        assert rest[-1].type == "response.completed"
        again = list(served.client().responses.retrieve(name, stream=True))
        assert [item.model_dump() for item in again] == [
            item.model_dump() for item in [*first, *rest]
        ]
        late = served.client().responses.retrieve(name, stream=True, starting_after=numbers[-1])
        assert list(late) == []
        whole = served.client().responses.retrieve(name)
        assert whole == rest[-1].response
        assert (whole.status, whole.output_text) == ("completed", TEXT)
        assert get(served, name)["store"] is True


def test_a_failure_is_kept_with_its_code(store: RunningResponses) -> None:
    gate = Event()
    parts = [*tokens("the "), gate, event(error="E2107 Overloaded: the KV cache is exhausted")]
    with api(parts, store=store) as served:
        answer = served.post("/v1/responses", {**BODY, "background": True}).json()
        gate.set()
        found = ended(served, answer["id"])
        assert found["status"] == "failed"
        assert found["error"]["code"] == "server_error"
        assert found["error"]["message"].startswith("E2107 Overloaded: the KV cache")
        assert found["output"][0]["content"][0]["text"] == "the "
        assert found["output"][0]["status"] == "incomplete"
        with pytest.raises(openai.APIError, match="E2107"):
            list(served.client().responses.retrieve(answer["id"], stream=True))


@pytest.mark.parametrize("bounds", [{"detached": 0}, {"detached_s": 0.2}, {"grace_s": 0.2}])
def test_what_nobody_waits_for_is_bounded(tmp_path: Path, bounds: dict[str, Any]) -> None:
    with kept(tmp_path, **bounds) as store, api(gated(HANG), store=store) as served:
        name, _ = begun(served)
        assert wait(lambda: served.ended)
        assert ended(served, name)["status"] == "cancelled"
        answer = served.post("/v1/responses", {**BODY, "background": True})
        refused = answer.status_code == 429
        assert refused is (bounds == {"detached": 0})
        assert "DETACHED_RESPONSES" in answer.text or not refused


def test_a_conversation_goes_on_from_what_is_kept(
    store: RunningResponses, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = store.store.end

    async def slowly(*given: Any) -> None:
        await asyncio.sleep(0.3)
        await end(*given)

    with api(THREE, store=store) as served:
        client = served.client()
        first = client.responses.create(model="small", input="One.", instructions="Rhyme.")
        second = client.responses.create(model="small", input="Two.", previous_response_id=first.id)
        monkeypatch.setattr(store.store, "end", slowly)
        third = client.responses.create(
            model="small",
            input=[{"role": "user", "content": "Three."}],
            previous_response_id=second.id,
            stream=True,
        )
        last = list(third)[-1].response  # type: ignore[union-attr]
        assert call(store.read, last.id, "").status == "completed", "before its client knows"
        text = TOKENIZER.tokenizer.decode(served.triton.requests[-1].values["input_ids"])
        bad = {**BODY, "previous_response_id": last.id, "input": [{"type": "x"}]}
        named = served.post("/v1/responses", bad).json()["error"]["message"]
        gone = served.post("/v1/responses", {**BODY, "previous_response_id": "resp-1"})
    assert last.previous_response_id == second.id
    said = [text.index(word) for word in ("One.", "Two.", "Three.")]
    assert said == sorted(said)
    assert text.count("the quick größer") == 2
    assert "Rhyme." not in text
    assert "input[0].type='x'" in named
    assert gone.status_code == 400
    assert gone.json()["error"]["code"] == "previous_response_not_found"
    assert "previous_response_id='resp-1': response='resp-1': there is none" in gone.text


def tenant(name: str) -> dict[str, str]:
    return {"x-api-key": name}


def test_a_response_is_its_tenants_alone(store: RunningResponses, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        "\n".join(json.dumps({"name": n, "sha256": sha256_of(n.encode())}) for n in "ab")
    )
    with api(THREE, store=store, cog_triton_keys=keys) as served:
        asked = served.post("/v1/responses", BODY, headers=tenant("a")).json()
        url = f"{served.url}/v1/responses/{asked['id']}"
        for path, method in (("", "GET"), ("", "DELETE"), ("/cancel", "POST")):
            answer = httpx.request(method, url + path, headers=tenant("b"))
            assert answer.status_code == 404
        body = {**BODY, "previous_response_id": asked["id"]}
        assert served.post("/v1/responses", body, headers=tenant("b")).status_code == 400
        assert served.post("/v1/responses", body, headers=tenant("a")).status_code == 200
        assert get(served, asked["id"], headers=tenant("a"))["id"] == asked["id"]


def test_who_waits_has_an_answer_that_cannot_be_kept(
    store: RunningResponses, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: Any) -> None:
        raise DiskFull("responses cannot be kept: database or disk is full")

    with api(THREE, store=store) as served:
        monkeypatch.setattr(store.store, "add", full)
        whole = served.post("/v1/responses", BODY).json()
        events = list(served.client().responses.create(stream=True, **BODY))
        refused = served.post("/v1/responses", {**BODY, "background": True})
        assert httpx.get(f"{served.url}/v1/responses/{whole['id']}").status_code == 404
        monkeypatch.undo()
        monkeypatch.setattr(store.store, "end", full)
        monkeypatch.setattr(stored_responses, "_RETRY_S", 0.01)
        last = list(served.client().responses.create(stream=True, **BODY))[-1].response  # type: ignore[union-attr]
        assert last.output_text == "the quick größer"
        assert ended(served, last.id)["status"] == "failed"
        monkeypatch.setattr(stored_responses, "_RETRIES", 6000)
        last = list(served.client().responses.create(stream=True, **BODY))[-1].response  # type: ignore[union-attr]
        monkeypatch.undo()
        assert ended(served, last.id)["status"] == "completed"
    assert (whole["store"], whole["status"]) == (False, "completed")
    assert deltas(events) == "the quick größer"
    assert events[-1].response.store is False  # type: ignore[union-attr]
    assert refused.status_code == 500
    assert "responses cannot be kept: database or disk is full" in refused.text


def test_another_server_of_the_directory_is_not_asked(
    store: RunningResponses, tmp_path: Path
) -> None:
    file = f"ResponseFile(Path({str(tmp_path / 'responses')!r}), 1 << 20, 3600)"
    with another(file), api(THREE, store=store) as served:
        assert get(served, "resp-lost")["status"] == "in_progress"
        url = f"{served.url}/v1/responses/resp-lost"
        for method, path in (("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", "")):
            answer = httpx.request(method, url + path)
            assert (answer.status_code, answer.headers["x-error-code"]) == (409, "E1005")
            assert "another server makes this response" in answer.text


def test_items_of_the_input_are_listed_in_pages(store: RunningResponses) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}
    said = {"role": "assistant", "content": "so"}
    items: Any = [{"role": "user", "content": "a"}, said, {"type": "message", **BODY_TURN}]
    tools = replace(TOKENIZER, chat_template=CHATML_TOOLS)
    with api(THREE, store=store, tokenizer=tools) as served:
        client = served.client(_strict_response_validation=True)
        answer = client.responses.create(model="small", input=[*items, call, result])
        listed = client.responses.input_items.list(answer.id, limit=2)
        found = list(listed)
        assert [item.type for item in listed.data] == ["function_call_output", "function_call"]
        assert listed.has_more
        rising = list(client.responses.input_items.list(answer.id, order="asc", limit=100))
        assert rising == found[::-1]
        assert [item.type for item in rising] == ["message"] * 3 + [call["type"], result["type"]]
        url = f"{served.url}/v1/responses/{answer.id}/input_items"
        for query, words in (
            ("order=up", "asc or desc"),
            ("limit=0", "1 to 100"),
            ("after=x", "x"),
        ):
            refused = httpx.get(f"{url}?{query}")
            assert (refused.status_code, words in refused.text) == (400, True)
