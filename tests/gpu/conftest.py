"""One server for each kind of model, for all GPU tests; see docs/gpu.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gpu_models
import pytest
from gpu_servers import WORK, Card, Server, found_card, served
from stack import REPOSITORY

_CHAT_TEMPLATE = REPOSITORY / "configs" / "chat_templates" / "chatml-tools.jinja"
_REHEARSED = 2
"""GPUs of a rehearsal."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rehearse",
        action="store_true",
        help="run the GPU tests over the double of vLLM, as on two GPUs",
    )
    parser.addoption(
        "--whole-python",
        metavar="PYTHON",
        help="for test_prune: one whose PyTorch has code for every GPU (the one that runs this)",
    )


@pytest.fixture(scope="session")
def card(request: pytest.FixtureRequest) -> Card:
    """This machine's GPUs; skips if there is none."""
    if request.config.getoption("--rehearse"):
        return Card(_REHEARSED)
    if (found := found_card()) is None:
        pytest.skip("nvidia-smi shows no GPU; --rehearse runs over the double of vLLM")
    return found


@pytest.fixture
def two_gpus(card: Card) -> Card:
    """The same; skips if there is one only."""
    if card.count < 2:
        pytest.skip(f"needs two GPUs, and here is {card.count}")
    return card


@pytest.fixture
def real(card: Card) -> Card:
    """A real GPU; skips in a rehearsal."""
    if card.rehearsal:
        pytest.skip("needs a GPU: the double of vLLM computes nothing")
    return card


@pytest.fixture(scope="session")
def smollm2(card: Card) -> Path:
    """SmolLM2 with its real weights."""
    return gpu_models.smollm2(WORK / "models" / "smollm2")


@pytest.fixture(scope="session")
def text(card: Card, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of SmolLM2 with two LoRA adapters."""
    place = tmp_path_factory.mktemp("text")
    engine = gpu_models.with_adapters(smollm2, place / "engine", card.arguments())
    with served(Server(place / "work", engine, card, CHAT_TEMPLATE=str(_CHAT_TEMPLATE))) as server:
        yield server


@pytest.fixture(scope="session")
def embedder(
    card: Card, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of SmolLM2 as vLLM makes an embedder of it."""
    place = tmp_path_factory.mktemp("embedder")
    arguments = card.arguments(runner="pooling", convert="embed")
    engine = gpu_models.engine_of(smollm2, place / "engine", arguments)
    with served(Server(place / "work", engine, card)) as server:
        yield server


@pytest.fixture(scope="session")
def vision(card: Card, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model that takes images, whose weights are made up."""
    place = tmp_path_factory.mktemp("vision")
    mark = "\x01" if card.rehearsal else gpu_models.IMAGE  # the double takes one character
    engine = gpu_models.of_images(place / "engine", card.arguments(), mark)
    with served(Server(place / "work", engine, card)) as server:
        yield server
