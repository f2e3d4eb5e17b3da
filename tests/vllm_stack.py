"""A running ``cog-triton serve`` of the double of vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from lora_adapters import adapter
from stack import Stack
from vllm_engines import double_environment, hugging_face

TOKENS = 600
"""Tokens of `completion`."""


class VLLMStack(Stack):
    """``cog-triton serve`` on model.json, which names weights elsewhere; vLLM is the double."""

    def __init__(
        self, directory: Path, *, serve_config: str = "", loras: bool = True, **environment: str
    ) -> None:
        self.journal = directory / "journal"
        self.death = directory / "death"
        self.hold = directory / "hold"
        hugging_face(directory / "weights")
        engine = directory / "engine"
        engine.mkdir()
        arguments: dict[str, Any] = {"model": "../weights", "max_model_len": 4096}
        if loras:
            arguments["enable_lora"] = "true"
            adapter(directory / "doll")
            (engine / "multi_lora.json").write_text('{"doll": "../doll"}')
        else:
            arguments["gpu_memory_utilization"] = 0.4
        (engine / "model.json").write_text(json.dumps(arguments))
        config = directory / "serve.yaml"
        config.write_text(serve_config)
        environment = double_environment(
            self.journal,
            VLLM_DOUBLE_DEATH=str(self.death),
            VLLM_DOUBLE_HOLD=str(self.hold),
            COG_TRITON_CONFIG=str(config),
            **environment,
        )
        super().__init__(directory / "work", str(engine), **environment)

    def generate(self, *, status: int = 200, **values: Any) -> dict[str, Any]:
        response = httpx.post(
            f"{self.triton}/v2/models/vllm_model/generate", json=values, timeout=30
        )
        assert response.status_code == status, response.text
        body: dict[str, Any] = response.json()
        return body

    def events(self, **values: Any) -> list[dict[str, Any]]:
        url = f"{self.triton}/v2/models/vllm_model/generate_stream"
        with httpx.stream("POST", url, json=values, timeout=30) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        return [json.loads(line[6:]) for line in lines]


def prompt_of(number: int) -> str:
    return f"Tale {number}: "


def completion(stack: VLLMStack, number: int) -> Iterator[str]:
    body = {"model": "any", "prompt": prompt_of(number), "max_tokens": TOKENS, "stream": True}
    url = f"{stack.own}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=180) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                data = json.loads(line[6:])
                assert "error" not in data, data
                yield data["choices"][0]["text"]
