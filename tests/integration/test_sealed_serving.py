"""A sealed vLLM engine from its build config to an answer, through the real Triton and Cog."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from cuda_driver import has_compiler
from sealed_engines import (
    SEAL,
    SealedBuilds,
    SealedStack,
    compiled,
    digest_of,
    manifest_of,
    unpacked,
)
from stack import text_of

from cog_triton.builder.predictor import BuildRunner

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not has_compiler(), reason="needs a C compiler"),
]
CONFIG = {
    "engine": "vllm",
    "model_id": "./model",
    "args": {"gpu_memory_utilization": 0.4},
    "canary": {"prompt": "abc", "tokens": 4},
}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> SealedBuilds:
    made = SealedBuilds(tmp_path_factory.mktemp("sealed"))
    made.build(CONFIG)
    return made


@pytest.fixture(scope="module")
def digest(builds: SealedBuilds) -> str:
    return digest_of(unpacked(builds.directory / "engine.tar", builds.directory / "unpacked"))


def test_a_pinned_engine_starts_without_compiling(
    builds: SealedBuilds, digest: str, tmp_path: Path
) -> None:
    tar = builds.directory / "engine.tar"
    stack = SealedStack(tmp_path / "a", builds, tar, SEAL_SHA256=digest, CANARY="require")
    with stack.served():
        assert text_of(stack.predict("abc", max_tokens=4)) == "abca"
        log = next((stack.work_dir / "run").rglob("engine-1.log")).read_text()
    assert f"compiled code is the engine's own, sealed for {SEAL}" in log
    assert [compiled(stack.journal, what) for what in ("aot", "kernel", "measured")] == [[], [], []]
    assert len(compiled(stack.journal, "read")) == 4
    assert "the canary of 4 tokens was answered as built" in stack.output


@pytest.mark.full
def test_an_engine_of_others_is_served_and_compiled_anew(
    builds: SealedBuilds, digest: str, tmp_path: Path
) -> None:
    stack = SealedStack(tmp_path / "b", builds, builds.directory / "engine.tar")
    with stack.served():
        assert text_of(stack.predict("abc", max_tokens=4)) == "abca"
    assert f"if you trust who made it, set SEAL_SHA256={digest}" in stack.output
    assert len(compiled(stack.journal, "aot")) == 1


@pytest.mark.full
def test_a_required_seal_that_is_not_trusted_ends_the_start(
    builds: SealedBuilds, tmp_path: Path
) -> None:
    tar = builds.directory / "engine.tar"
    stack = SealedStack(tmp_path / "c", builds, tar, SEAL="required")
    stack.start()
    try:
        code, output = stack.finish()
    finally:
        stack.close()
    assert code != 0
    assert "E1305" in output
    assert "a seal is required" in output
    assert not stack.journal.exists()


@pytest.mark.full
def test_the_builders_prediction_seals(tmp_path: Path, builds: SealedBuilds) -> None:
    """The child that the builder's predictor starts, with the environment of a builder image."""
    output = tmp_path / "engine.tar"
    config = yaml.safe_dump({**CONFIG, "model_id": str(builds.directory / "model")})
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in builds.environment.items():
            patch.setenv(name, value)
        BuildRunner(tmp_path / "work", output).run({"config": config}, lines.append)
    assert any("[prove] started in" in line for line in lines), lines
    assert list(manifest_of(unpacked(output, tmp_path / "engine")).seals) == [SEAL]
