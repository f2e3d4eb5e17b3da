from collections.abc import Callable, Iterator
from pathlib import Path

import clean_environment
import pytest
from build_runs import BuildRuns
from engine_fixtures import engine_dir, engine_tar, mock, mock_text, stack  # noqa: F401
from stack import Stack, processes_of
from tensorrt_llm_tree import Installation, install, models

from cog_triton.engines.mock import mock_directory
from cog_triton.text.tokenizer import EngineTokenizer

clean_environment.clean()
LONG = frozenset({"test_long_steps", "test_resume", "test_vllm_resume", "test_sealed_turns"})
"""Files whose tests take minutes."""
SMALL = frozenset({"leaks_fail_the_file_that_leaks"})
"""Fixtures of a module that start no server."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give one worker all tests that share a server: those with a fixture of their module.

    The longest of the others begin first, so that no worker waits for another's last one.
    """
    items.sort(key=lambda item: item.path.stem not in LONG)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            fixtures = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
            own = [found[-1] for name, found in fixtures.items() if name not in SMALL]
            if any(fixture.scope == "module" for fixture in own):
                item.add_marker(pytest.mark.xdist_group(item.path.stem))


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


@pytest.fixture(scope="session")
def says(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """What the mock says in so many tokens."""
    engine = mock_directory.make_engine(tmp_path_factory.mktemp("engines"))
    ids = mock_directory.read_model(engine).output_ids
    tokenizer = EngineTokenizer.load(engine).tokenizer

    def said(count: int) -> str:
        text = str(tokenizer.decode([ids[place % len(ids)] for place in range(count)]))
        return text.rstrip("\N{REPLACEMENT CHARACTER}")  # of a character that is not complete

    return said


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="session")
def legacy_tree(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return install(tmp_path_factory.mktemp("legacy"), legacy=True)


@pytest.fixture
def build_runs(tree: Installation, tmp_path: Path) -> Iterator[BuildRuns]:
    models.llama(tmp_path / "tiny-llama")
    models.gpt2(tmp_path / "tiny-gpt2")
    yield BuildRuns(tmp_path, tree)
    assert not processes_of(tmp_path)
