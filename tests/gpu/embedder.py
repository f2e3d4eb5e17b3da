"""Checks of /v1/embeddings on the real vLLM, over the small model as an embedder."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from client import Client
from prompts import Prompt
from results import Phase

Vectors = npt.NDArray[np.float32]
_ALIKE = 0.999  # cosine of what differs by its batch alone


def write(small: Path, directory: Path, arguments: Mapping[str, Any]) -> Path:
    """The small model, which vLLM is to make an embedder of."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(small, directory, copy_function=os.link)
    (directory / "model.json").unlink()
    made = {**arguments, "runner": "pooling", "convert": "embed"}
    (directory / "model.json").write_text(json.dumps(made), "utf-8")
    return directory


@dataclass(frozen=True)
class Embeddings:
    """The checks of a model that makes embeddings."""

    client: Client
    phase: Phase
    prompts: Sequence[Prompt]
    hidden_size: int

    def all(self) -> None:
        """Run every check."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - the other phases are to be seen, too
            name = f"{type(error).__name__}: {error}"
            self.phase.check("embeddings went through", False, name)

    def _run(self) -> None:
        texts = [prompt.text for prompt in self.prompts]
        whole = self._embed(texts)
        shape = (len(texts), self.hidden_size)
        self.phase.check("embeddings: one for each text", whole.shape == shape, whole.shape)
        lengths = np.linalg.norm(whole, axis=1)
        self.phase.check("embeddings: of length 1", bool(np.allclose(lengths, 1, atol=1e-2)),
                         lengths.tolist())  # fmt: skip
        likeness = whole @ whole.T
        others = float((likeness - 2 * np.eye(len(texts))).max())
        self.phase.check("embeddings: texts differ", others < _ALIKE, others)
        with ThreadPoolExecutor(16) as threads:
            alone = np.concatenate(list(threads.map(lambda text: self._embed([text]), texts)))
        alike = float((alone * whole).sum(axis=1).min())
        self.phase.check("embeddings: alone as together", alike > _ALIKE, alike)
        ids = self._embed([self.prompts[0].ids])
        alike = float((ids[0] * whole[0]).sum())
        self.phase.check("embeddings: ids as their text", alike > _ALIKE, alike)
        told = self.client.openai("embeddings", input=texts[:1], encoding_format="base64")
        read = np.frombuffer(base64.b64decode(told["data"][0]["embedding"]), "<f4")
        alike = float((read * whole[0]).sum())
        self.phase.check("embeddings: base64 as numbers", alike > _ALIKE, alike)
        many = self._embed(texts * (256 // len(texts)))
        self.phase.check("embeddings: 256 inputs", len(many) == 256, len(many))
        refused = {
            "too long": ("embeddings", {"input": [5] * 100_000}, "E1002"),
            "dimensions": ("embeddings", {"input": "a", "dimensions": 8}, "E1005"),
            "text": ("completions", {"prompt": "a"}, "E1005"),
        }
        for name, (path, values, code) in refused.items():
            answer = self.client.openai(path, **values)
            found = answer["status"], answer.get("error", {}).get("code")
            self.phase.check(f"embeddings: {name} is 400", found == (400, code), answer)

    def _embed(self, given: Any) -> Vectors:
        told = self.client.openai("embeddings", input=given)
        if told["status"] != 200:
            raise RuntimeError(str(told)[:400])
        return np.array([item["embedding"] for item in told["data"]], np.float32)
