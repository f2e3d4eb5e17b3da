"""Embeddings: their shape and length, alone as in a batch, and what is refused."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gpu_servers import Server

pytestmark = pytest.mark.gpu

TEXTS = [
    "The king of a small country in the mountains had three daughters.",
    "Water boils at one hundred degrees.",
    "She plays the violin, and he the piano.",
    "A train leaves the station at noon.",
]
ALIKE = 0.999
"""Cosine of what differs by its batch only."""
Vectors = npt.NDArray[np.float32]


def embed(server: Server, given: Any) -> Vectors:
    answer = server.ask("embeddings", input=given)
    assert answer["status"] == 200, answer
    return np.array([item["embedding"] for item in answer["data"]], np.float32)


@pytest.fixture(scope="module")
def vectors(embedder: Server) -> Vectors:
    """Those of `TEXTS` in one request."""
    return embed(embedder, TEXTS)


def test_each_text_has_a_vector_of_length_one(vectors: Vectors, smollm2: Path) -> None:
    size = json.loads((smollm2 / "config.json").read_text("utf-8"))["hidden_size"]
    assert vectors.shape == (len(TEXTS), size)
    assert np.linalg.norm(vectors, axis=1).tolist() == pytest.approx([1] * len(TEXTS), abs=0.01)


def test_texts_have_other_vectors(vectors: Vectors) -> None:
    likeness = vectors @ vectors.T - 2 * np.eye(len(TEXTS))
    assert likeness.max() < ALIKE


def test_a_text_has_the_same_vector_alone_and_in_a_batch(
    embedder: Server, vectors: Vectors
) -> None:
    with ThreadPoolExecutor(16) as threads:
        alone = np.concatenate(list(threads.map(lambda one: embed(embedder, [one]), TEXTS)))
    assert (alone * vectors).sum(axis=1).min() > ALIKE
    many = embed(embedder, TEXTS * 64)
    assert (many[: len(TEXTS)] * vectors).sum(axis=1).min() > ALIKE


def test_ids_and_base64_are_other_forms_of_the_same(embedder: Server, vectors: Vectors) -> None:
    ids = embedder.post("tokenize", prompt=TEXTS[0])["tokens"]
    assert (embed(embedder, [ids])[0] * vectors[0]).sum() > ALIKE
    told = embedder.ask("embeddings", input=TEXTS[:1], encoding_format="base64")
    read = np.frombuffer(base64.b64decode(told["data"][0]["embedding"]), "<f4")
    assert (read * vectors[0]).sum() > ALIKE


@pytest.mark.parametrize(
    ("path", "values", "code"),
    [
        ("embeddings", {"input": [5] * 100_000}, "E1002"),
        ("embeddings", {"input": "a", "dimensions": 8}, "E1005"),
        ("completions", {"prompt": "a"}, "E1005"),
    ],
)
def test_an_embedder_refuses_what_it_cannot(
    embedder: Server, path: str, values: dict[str, Any], code: str
) -> None:
    answer = embedder.ask(path, **values)
    assert answer["status"] == 400, answer
    assert answer["error"]["message"].startswith(code), answer
