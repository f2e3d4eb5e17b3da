from collections.abc import Iterator
from pathlib import Path

import clean_environment
import pytest
from build_runs import BuildRuns
from engine_fixtures import engine_dir, engine_tar, make_stack, mock, mock_text, new_stack, stack
from stack import processes_of
from tensorrt_llm_tree import Installation, install, models

__all__ = ["engine_dir", "engine_tar", "make_stack", "mock", "mock_text", "new_stack", "stack"]
clean_environment.clean()


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
