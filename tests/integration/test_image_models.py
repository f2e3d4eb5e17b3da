"""Images over the whole server, with the real Triton and the double of vLLM; and attacks."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from image_files import (
    FORMATS,
    PARTS_TEMPLATE,
    PLACEHOLDER,
    bomb,
    data_url,
    image,
    part,
    told,
    user,
)
from stack import Stack
from vllm_engines import VISION, double_environment, vllm_engine

pytestmark = [pytest.mark.integration, pytest.mark.full]


class Pictures(BaseHTTPRequestHandler):
    """Serves an image, and leads elsewhere."""

    def do_GET(self) -> None:
        self.send_response(302 if self.path == "/away" else 200)
        self.send_header("Location", "/picture.png")
        self.end_headers()
        self.wfile.write(image("PNG", (33, 44)))

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture(scope="module")
def pictures() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("images")
    engine = vllm_engine(directory / "engine", config=VISION, max_model_len=4096)
    (engine / "chat_template.jinja").write_text(PARTS_TEMPLATE)
    environment = double_environment(IMAGE_HOSTS="127.0.0.0/8", MAX_IMAGES="4")
    running = Stack(directory / "work", str(engine), **environment)
    with running.served():
        yield running


def ask(stack: Stack, *parts: Any, **fields: Any) -> httpx.Response:
    body = {"model": "images", "temperature": 0, "messages": [user(*parts)], **fields}
    return httpx.post(f"http://127.0.0.1:{stack.openai}/v1/chat/completions", json=body, timeout=60)


@pytest.fixture(scope="module")
def model(stack: Stack) -> str:
    answer = httpx.get(f"http://127.0.0.1:{stack.openai}/v1/models").json()
    (found,) = answer["data"]
    assert found["capabilities"]["images"] == 4
    return str(found["id"])


@pytest.mark.parametrize("kind", FORMATS)
def test_answers_depend_on_the_image(stack: Stack, model: str, kind: str) -> None:
    data = image(kind, (60, 40))
    answer = ask(stack, "a", part(data_url(data)), model=model, max_tokens=30)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["choices"][0]["message"]["content"].startswith(f"user:a{told(data)}")
    assert body["usage"]["prompt_tokens"] == len("user:a;") + len(told(data)) + 3 * 2


def test_images_are_fetched_from_the_allow_list(stack: Stack, model: str, pictures: str) -> None:
    answer = ask(stack, part(f"{pictures}/picture.png"), model=model, stream=True)
    expected = told(image("PNG", (33, 44)))
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert expected in "".join(delta.get("content") or "" for delta in deltas)


def test_attacks_are_refused_and_the_server_goes_on(
    stack: Stack, model: str, pictures: str
) -> None:
    whole = image("JPEG", (300, 300), 0x123456)
    cases = [
        ([part(f"{pictures}/away")], "redirects are not followed"),
        ([part("http://10.0.0.1/")], "its host is none that images may come from"),
        ([part("http://[::ffff:10.0.0.1]/")], "its host is none"),
        ([part("http://localhost.:1/")], "cannot be fetched"),
        ([part("http://bücher.example/")], "must be a data: URL"),
        ([part("file:///etc/passwd")], "must be a data: URL"),
        ([part(data_url(bomb()))], "50000x50000 pixels"),
        ([part(data_url(whole[: len(whole) // 2]))], "a broken image"),
        ([part(data_url(image()))] * 50, "has 50 images; 4 at most"),
        ([part(data_url(image(size=(4000, 10))))], "not fit for this model"),
    ]
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(ask, stack, *parts, model=model) for parts, _ in cases * 3]
        for answer, (_, words) in zip(made, cases * 3, strict=True):
            found = answer.result()
            assert found.status_code == 400, (words, found.text)
            assert words in found.json()["error"]["message"]
            assert "messages[0].content[0]" in found.text or "50 images" in found.text
    answer = ask(stack, part(data_url(bytes(30 << 20))), model=model)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "E1008"
    long = ask(stack, part(data_url(image(size=(2800, 2800)))), model=model)
    assert long.status_code == 400
    assert long.headers["x-error-code"] == "E1002"
    assert ask(stack, part(data_url(image())), model=model).status_code == 200


def test_vllm_model_takes_images_as_vllm_backend_does(stack: Stack) -> None:
    def generate(images: list[str], text: str = PLACEHOLDER) -> httpx.Response:
        body = {"text_input": text, "image": images, "parameters": {"max_tokens": 40}}
        url = f"{stack.triton}/v2/models/vllm_model/generate"
        return httpx.post(url, json=body, timeout=60)

    encoded = base64.b64encode(image("WEBP", (20, 10))).decode()
    answer = generate([encoded])
    assert answer.status_code == 200, answer.text
    assert told(image("WEBP", (20, 10))) in answer.json()["text_output"]
    for images, words in (
        ([encoded] * 5, "image: has 5 images; 4 at most"),
        (["nothing of it!"], "image[0]: is no base64"),
        ([encoded, base64.b64encode(bomb()).decode()], "image[1]: is of 50000x50000"),
    ):
        answer = generate(images)
        assert answer.status_code == 400, answer.text
        assert words in answer.text


def test_predictions_have_no_images(stack: Stack) -> None:
    done = stack.predict("", messages=[user(part(data_url(image())))])
    assert done["status"] == "failed"
    assert "E1006" in done["error"]
    given = {"prompt": "a", "images": [data_url(image())]}
    answer = httpx.post(f"{stack.url}/predictions", json={"input": given}, timeout=60)
    assert answer.status_code == 400
    assert "E1005" in answer.text
    assert "images: not an input of predictions; /v1/chat/completions has it" in answer.text
    assert stack.predict("a", images=[], unheard_of=1)["status"] == "succeeded"
    assert "input 'unheard_of' of predictions is unknown, and ignored" in stack.output
