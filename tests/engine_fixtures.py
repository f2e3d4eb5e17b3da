"""Servers of the tests: one of the demo engine and one of the mock for many, and new ones."""

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stack import REPOSITORY, Stack
from webhook_receiver import CERTIFICATE

from cog_triton.artifact.engine_tar import unpack
from cog_triton.engines.mock import mock_directory
from cog_triton.text.tokenizer import EngineTokenizer

FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."
QUESTION = "What is machine learning?"
LEARNING = "\n\nMachine learning is a subset of artificial intelligence."
REPEATED = ("日本語 🦙 Übergröße 🎉", "🦜🌈 你好世界")
ANSWERS = {FRANCE: PARIS, QUESTION: LEARNING} | {
    f"Repeat exactly: {text}": text for text in REPEATED
}
"""What the mock says to whom, as a model would; its passage to all others."""
CONTEXT = 131_072
"""Tokens that fit the mock, prompt and output together."""
LONG = "word " * (CONTEXT + 2000)
"""A prompt that does not."""
ENDLESS = 30_000
"""Tokens of an output that no test waits for: five minutes, longer than `wait_until` waits."""


@pytest.fixture(scope="session")
def engine_tar() -> Path:
    """The demo engine, built by the real builder; the work directory stores it between runs."""
    tar = REPOSITORY / ".work" / "test" / "engine.tar"
    tar.parent.mkdir(parents=True, exist_ok=True)
    config = REPOSITORY / "configs" / "build" / "smollm2-135m-cpu.yaml"
    command = [sys.executable, "-m", "cog_triton", "build", str(config)]
    command += [f"--output={tar}", f"--work-dir={tar.parent / 'build'}"]
    with (tar.parent / "lock").open("w") as lock:  # two pytest workers ask for the same file
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, check=True)
    return tar


@pytest.fixture(scope="session")
def engine_dir(engine_tar: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo engine, unpacked."""
    directory = tmp_path_factory.mktemp("engine") / "engine"
    unpack(engine_tar, directory)
    return directory


@pytest.fixture(scope="session")
def stack(engine_tar: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One server of the demo engine for all tests that do not break it."""
    running = Stack(tmp_path_factory.mktemp("stack"), str(engine_tar))
    with running.served():
        yield running


class MockText:
    """What the mock says where no answer is scripted; and its tokens."""

    def __init__(self, engine: Path) -> None:
        self._ids = mock_directory.read_model(engine).output_ids
        self._tokenizer = EngineTokenizer.load(engine)

    def ids(self, count: int) -> list[int]:
        return [self._ids[place % len(self._ids)] for place in range(count)]

    def __call__(self, count: int) -> str:
        return str(self._tokenizer.tokenizer.decode(self.ids(count)))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def count_chat(self, *messages: tuple[str, str]) -> int:
        """Tokens of a chat in the mock's template; messages are pairs of a role and a text."""
        parts = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages]
        return self.count("".join([*parts, "<|im_start|>assistant\n"]))


@pytest.fixture(scope="session")
def mock_text(tmp_path_factory: pytest.TempPathFactory) -> MockText:
    return MockText(mock_directory.make_engine(tmp_path_factory.mktemp("engines")))


@pytest.fixture(scope="session")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One server of the mock engine for all tests that do not break it.

    Each stream has 100 tokens a second unless its request asks for another rate, which
    predictions and Triton's own model can do, but neither the OpenAI API nor Triton's text models.
    """
    directory = tmp_path_factory.mktemp("mock")
    script = directory / "answers.json"
    answers = [{"after": after, "say": say} for after, say in ANSWERS.items()]
    script.write_text(json.dumps(answers))
    settings = {"MOCK_ANSWERS": str(script), "MOCK_JITTER": "0.2", "LOG_FORMAT": "json"}
    settings |= {"COG_LOG_LEVEL": "info", "TERM": "xterm-256color"}
    if CERTIFICATE.exists():
        settings["SSL_CERT_FILE"] = str(CERTIFICATE)
    stack = Stack(directory / "work", None, **settings)
    stack.command += ["--engine", "mock", "--tps", "100"]
    with stack.served():
        yield stack


@pytest.fixture
def new_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Makes servers that are not started yet."""
    stacks: list[Stack] = []

    def new(engine: object = None, **environment: str) -> Stack:
        name = tmp_path / f"work{len(stacks)}"
        stacks.append(Stack(name, None if engine is None else str(engine), **environment))
        return stacks[-1]

    yield new
    for item in stacks:
        item.close()


@pytest.fixture
def make_stack(new_stack: Callable[..., Stack]) -> Callable[..., Stack]:
    """Makes servers that are ready."""

    def make(engine: object = None, **environment: str) -> Stack:
        made = new_stack(engine, **{"SERVED_MODEL_NAME": "any", **environment})
        made.start()
        made.until_ready()
        return made

    return make
