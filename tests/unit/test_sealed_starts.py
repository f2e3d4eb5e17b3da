"""Starts of vLLM's engine process from a seal: what is opened, compiled, and by whom."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_driver import has_compiler
from sealed_engines import (
    CONFIG,
    SealedBuilds,
    compiled,
    copied,
    digest_of,
    lying,
    manifest_of,
    sealed_file,
    unpacked,
)
from stack import wait_until as until
from started_engines import StartedEngine
from started_fleet import says, started
from vllm_hosts import ABC, HOST, ask, token_ids, tokens

from cog_triton.engines.engine_spec import SPARE_LOADS, EngineSpec
from cog_triton.engines.vllm import compiler_caches
from cog_triton.engines.vllm.compiler_caches import REQUIRED, TRUSTED
from cog_triton.engines.vllm.sealed_caches import AOT
from cog_triton.errors import EngineIncompatible
from cog_triton.serving import sealed_engine
from cog_triton.settings import Settings

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builds = SealedBuilds(tmp_path_factory.mktemp("builds"))
    return unpacked(builds.build(), builds.directory / "unpacked")


def given(engine: Path, tmp_path: Path, **parameters: str) -> dict[str, str]:
    """Parameters of an engine whose caches are below ``work``."""
    return {
        "engine_dir": str(engine),
        compiler_caches.DIRECTORY: str(tmp_path / "work"),
        compiler_caches.MOST_BYTES: str(1 << 30),
        **parameters,
    }


def nothing_compiled(journal: Path) -> bool:
    return not [made for what in ("aot", "kernel", "measured") for made in compiled(journal, what)]


class Hostile:
    """What a pickle can do."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def answered(engine: Path, tmp_path: Path, **parameters: str) -> list[int]:
    """The answer of an engine process; raises the error that it does not load with."""
    started = StartedEngine(HOST, given(engine, tmp_path, **parameters))
    try:
        return token_ids(ask(started, tokens(ABC)))
    finally:
        started.close()


@pytest.mark.usefixtures("gpu", "vllm_environment")
def test_compiled_code_of_others_is_not_opened(
    engine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hostile, mark = copied(engine, tmp_path / "hostile"), tmp_path / "mark"
    model = sealed_file(hostile, "model").relative_to(hostile).as_posix()
    lying(hostile, model, pickle.dumps(Hostile(mark)))
    pin = {"SEAL_SHA256": digest_of(hostile)}
    settings, pinned = (
        Settings(COG_TRITON_WORK_DIR=str(tmp_path / "home"), **values) for values in ({}, pin)
    )
    assert sealed_engine.options(settings, hostile, None) == {}
    assert f"set SEAL_SHA256={digest_of(hostile)}; vLLM compiles it here" in caplog.text
    assert answered(hostile, tmp_path) == list(b"abcab")
    assert not mark.exists()
    trust = sealed_engine.options(pinned, hostile, None)
    assert trust == {TRUSTED: digest_of(hostile), REQUIRED: "false"}
    shutil.rmtree(tmp_path / "work")
    answered(hostile, tmp_path, **trust)
    assert mark.exists()  # it would have been run


@pytest.mark.usefixtures("gpu", "vllm_environment")
def test_an_engine_at_another_path_starts_from_its_seal_with_its_choices_among_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As torch does, the double looks for choices at the path of the build, which is gone."""
    reduces = {"VLLM_DOUBLE_REDUCES": "1"}
    builds = SealedBuilds(tmp_path / "builds", variables=reduces)
    engine = unpacked(builds.build(), tmp_path / "unpacked")
    (at,) = builds.compiled("tuned")
    shutil.rmtree(builds.directory)
    for name, value in reduces.items():
        monkeypatch.setenv(name, value)
    trust = {TRUSTED: digest_of(engine), REQUIRED: "true"}
    assert answered(engine, tmp_path, **trust) == list(b"abcab")
    assert not Path(at).exists()
    assert "nothing was compiled, but for 0 kernels" in capfd.readouterr().err
    journal = tmp_path / "journal"
    assert nothing_compiled(journal)
    assert compiled(journal, "tuned") == []
    assert len(read := compiled(journal, "read")) >= 4
    assert all(Path(path).is_relative_to(tmp_path / "work") for path in read)


@pytest.mark.usefixtures("gpu", "vllm_environment")
def test_variables_that_vllm_hashes_are_named_where_it_compiles_anew(
    engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert answered(engine, tmp_path, **{TRUSTED: digest_of(engine)}) == list(b"abcab")
    told = capfd.readouterr().err
    assert "which was not sealed" in told
    assert "VLLM_BATCH_INVARIANT" in told


def test_each_rank_is_sealed_and_starts_from_its_own(
    tmp_path: Path,
    gpu: Callable[..., None],
    vllm_environment: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builds = SealedBuilds(tmp_path / "builds", {"gpu_count": 2})
    tar = builds.build({**CONFIG, "args": {"tensor_parallel_size": 2}})
    engine = unpacked(tar, tmp_path / "engine")
    manifest = manifest_of(engine)
    assert (list(manifest.seals), manifest.world_size) == (["nvidia-h200-sm90-x2"], 2)
    ranks = [path.parent.name for path in sorted(engine.rglob("rank_*/model"))]
    assert ranks == ["rank_0_0", "rank_1_0"]

    gpu(gpu_count=2)
    trust = {TRUSTED: digest_of(engine), REQUIRED: "true"}
    assert answered(engine, tmp_path, **trust) == list(b"abcab")
    assert nothing_compiled(tmp_path / "journal")
    caches = next((tmp_path / "work").glob("*/vllm"))
    held = sorted(path.read_bytes() for path in (caches.parent / AOT).rglob("rank_*/model"))
    assert held == sorted(path.read_bytes() for path in engine.rglob("rank_*/model"))

    gpu(gpu_count=1)  # one of them is gone
    one = copied(engine, tmp_path / "one")
    (one / "model.json").write_text("{}")  # without its argument of ranks
    shutil.rmtree(tmp_path / "work")
    with pytest.raises(EngineIncompatible, match="a seal is required"):
        answered(one, tmp_path, **trust)


@pytest.mark.usefixtures("vllm_environment")
def test_an_engine_and_its_spare_start_from_the_seal_of_what_can_sleep(
    tmp_path: Path, gpu: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cog_triton")
    builds = SealedBuilds(tmp_path / "builds", {})
    gpu()
    config = {**CONFIG, "args": {"gpu_memory_utilization": 0.4}, "spare": True}
    engine = unpacked(builds.build(config), tmp_path / "engine")
    journal = tmp_path / "journal"
    trust = {TRUSTED: digest_of(engine), REQUIRED: "true"}
    spec = EngineSpec.of(HOST, given(engine, tmp_path, **trust, **{SPARE_LOADS: "beside"}))

    with started(tmp_path, spec, spare=True) as fleet:
        until(lambda: "spare engine 2 is parked" in caplog.text)
        assert says(fleet.client, ABC) == list(b"abca")
        fleet.call(fleet.engines.end, "by the test")
        fleet.death()
        assert says(fleet.client, ABC) == list(b"abca")
        until(lambda: "spare engine 3 is parked" in caplog.text)  # and the next spare
    assert nothing_compiled(journal)
    assert len(compiled(journal, "read")) == 3 * 4  # each opened the seal's kernels
    (caches,) = (tmp_path / "work").iterdir()
    assert len(list((caches / AOT).iterdir())) == 2
