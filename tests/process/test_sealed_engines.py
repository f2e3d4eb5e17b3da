"""Seals of vLLM engines: built with the double, used only if they fit and are trusted."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_driver import has_compiler
from rich.console import Console
from sealed_engines import (
    CONFIG,
    H200,
    SEAL,
    SealedBuilds,
    compiled,
    copied,
    digest_of,
    lying,
    manifest_of,
    rewritten,
    sealed_file,
    unpacked,
)
from stack import wait_until as until
from started_engines import StartedEngine
from started_fleet import says, started
from vllm_hosts import ABC, HOST, ask, token_ids, tokens

from cog_triton.artifact.seal import DIRECTORY
from cog_triton.doctor import run_checks
from cog_triton.engines.engine_spec import SPARE_LOADS, EngineSpec
from cog_triton.engines.vllm import compiler_caches
from cog_triton.engines.vllm.compiler_caches import REQUIRED, TRUSTED
from cog_triton.engines.vllm.sealed_caches import (
    AOT,
    SealedManifest,
    Trusted,
    environment_here,
    remember,
)
from cog_triton.errors import CogTritonError, EngineCorrupt, EngineIncompatible
from cog_triton.inspection.description import as_table, describe
from cog_triton.serving import sealed_engine
from cog_triton.settings import Settings
from cog_triton.sources.source import Source

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
PLACE = f"{DIRECTORY}/{SEAL}"


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> SealedBuilds:
    made = SealedBuilds(tmp_path_factory.mktemp("builds"))
    made.build()
    return made


@pytest.fixture(scope="module")
def engine(builds: SealedBuilds) -> Path:
    return unpacked(builds.directory / "engine.tar", builds.directory / "unpacked")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that this process's compilers write below."""
    for name, value in compiler_caches.variables(tmp_path / "caches").items():
        monkeypatch.setenv(name, value)
    return tmp_path / "caches"


def seeded(engine: Path, root: Path | None, *, ranks: int = 1, required: bool = False) -> Any:
    options = {TRUSTED: digest_of(engine), REQUIRED: str(required).lower()}
    return Trusted.of(engine, options).seed(root, ranks)


def test_tar_holds_the_engine_and_what_was_compiled(builds: SealedBuilds, engine: Path) -> None:
    manifest = manifest_of(engine)
    assert (manifest.schema_, manifest.engine, manifest.sm) == (3, "vllm", [90])
    assert manifest.gpu_name == H200
    (seal,) = manifest.seals.values()
    assert list(manifest.seals) == [SEAL]
    assert [f"{one}/rank_0_0" for one in seal.aot] == builds.compiled("aot")
    assert json.loads((engine / "model.json").read_text()) == {}
    assert json.loads((engine / "canary.json").read_text())["output_ids"] == list(b"abca")
    assert (engine / PLACE / AOT / seal.aot[0] / "rank_0_0" / "model").is_file()
    assert "model.safetensors" in manifest.files


def test_nothing_is_compiled_twice_and_equal_parts_make_equal_tars(builds: SealedBuilds) -> None:
    before = builds.journal.read_text()
    other = builds.build(tar="other.tar")
    assert builds.journal.read_text() == before
    data = (builds.directory / "engine.tar").read_bytes()
    assert other.read_bytes() == data
    assert str(builds.directory).encode() not in data


def test_inspect_tells_of_seals_and_of_the_digest_to_pin(
    builds: SealedBuilds, engine: Path
) -> None:
    described = describe(Source.open(str(builds.directory / "engine.tar")))
    told = described.facts([100])
    assert told["manifest_sha256"] == digest_of(engine)
    assert told["seals"][SEAL]["environment"]["gpu_name"] == H200
    assert told["gpu_check"]["problem"] is None  # elsewhere it compiles
    console = Console(width=100, file=io.StringIO())
    console.print(as_table(described, told))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"sealed/{SEAL}: 9 files" in text
    assert "NVIDIA H200" in text


def test_a_sealed_tar_is_known_as_vllms_before_its_weights(builds: SealedBuilds) -> None:
    source = Source.open(str(builds.directory / "engine.tar"))
    assert source.family() == "vllm"
    needs, _ = run_checks.engine(source, None)
    assert needs is not None
    assert (needs.backend, needs.world_size) == ("python", 0)


@pytest.mark.usefixtures("gpu")
def test_a_seal_that_fits_is_put_where_compilers_look(engine: Path, root: Path) -> None:
    assert seeded(engine, root).name == SEAL
    groups = list((root / "triton").rglob("__grp__*.json"))
    assert len(groups) == 2
    for group in groups:
        for path in json.loads(group.read_text())["child_paths"].values():
            assert Path(path).parent == group.parent
            assert Path(path).is_file()
            assert Path(path).stat().st_nlink == 1


@pytest.mark.usefixtures("gpu")
def test_the_machines_own_plan_stays_and_code_is_put_back(engine: Path, root: Path) -> None:
    seeded(engine, root)
    (plan,) = (root / "vllm/startup_plan").iterdir()
    (model,) = (root / AOT).glob("*/rank_0_0/model")
    sealed = model.read_bytes()
    plan.write_text("{}")
    model.write_bytes(b"another")
    seeded(engine, root)
    assert plan.read_text() == "{}"
    assert model.read_bytes() == sealed


@pytest.mark.parametrize(
    ("facts", "ranks", "told"),
    [
        ({"gpu_name": "NVIDIA H100"}, 1, "gpu_name NVIDIA H200 (here NVIDIA H100)"),
        ({"gpu_sm": 100}, 1, "sm 90 (here 100)"),
        ({"driver": "570.1"}, 1, "driver 580.95.05 or newer (here 570.1)"),
        ({"gpu_count": 2}, 2, "ranks 1 (here 2)"),
    ],
)
def test_a_seal_for_another_machine_is_left_with_what_differs(
    engine: Path,
    root: Path,
    gpu: Callable[..., None],
    facts: dict[str, object],
    ranks: int,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu(**facts)
    assert seeded(engine, root, ranks=ranks) is None
    assert f"no seal of the engine is used: {SEAL}: {told}; vLLM compiles it here" in caplog.text
    assert not root.exists()
    with pytest.raises(EngineIncompatible, match="and a seal is required"):
        seeded(engine, root, ranks=ranks, required=True)


@pytest.mark.usefixtures("gpu")
def test_a_seal_of_other_packages_is_left(
    engine: Path,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    package = tmp_path / "site" / "torch-2.15.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.15.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    assert seeded(engine, root) is None
    assert "torch unknown (here 2.15.0), other packages are installed beside vLLM" in caplog.text


@pytest.mark.usefixtures("gpu")
def test_packages_are_told_apart_by_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of the same version is another one; who installed it, and scripts, count for none."""
    package = tmp_path / "site" / "small-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)

    def digest(*lines: str) -> str:
        (package / "RECORD").write_text("\n".join([*lines, ""]))
        return environment_here(1)[0].packages

    wheel = digest("small.py,sha256=a,1", "small-1.0.dist-info/RECORD,,")
    by_uv = ["small-1.0.dist-info/INSTALLER,sha256=u,2", "../../../bin/small,sha256=s,9"]
    assert digest("__pycache__/small.pyc,,", *by_uv, "small.py,sha256=a,1") == wheel
    assert digest("small.py,sha256=b,1") != wheel


def reversed_kernel(engine: Path) -> None:
    file = sealed_file(engine, "*.cubin")
    file.write_bytes(file.read_bytes()[::-1])


def pipe(engine: Path) -> None:
    """It would be waited on for ever."""
    file = sealed_file(engine, "model")
    file.unlink()
    os.mkfifo(file)


def with_manifest(engine: Path, **changes: Any) -> None:
    rewritten(engine, manifest_of(engine).model_copy(update=changes))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda engine: sealed_file(engine, "model").write_bytes(b"x"), "model has 1 bytes"),
        (lambda engine: sealed_file(engine, "model").unlink(), "No such file"),
        (reversed_kernel, r"cubin has sha256 \w+"),
        (lambda engine: with_manifest(engine, model_id="another"), r"\w+ is trusted"),
        (pipe, "model has 0 bytes"),
    ],
)
def test_a_damaged_seal_is_refused(
    engine: Path, root: Path, tmp_path: Path, damage: Callable[[Path], Any], text: str
) -> None:
    copy = copied(engine, tmp_path / "copy")
    options = {TRUSTED: digest_of(copy)}
    damage(copy)
    with pytest.raises(EngineCorrupt, match=text):
        Trusted.of(copy, options).seed(root, 1)


def kernels(content: str) -> Callable[[Path], None]:
    def change(engine: Path) -> None:
        group = sealed_file(engine, "__grp__fused_kernel.json").relative_to(engine).as_posix()
        lying(engine, group, content.encode())

    return change


def another_hash(engine: Path) -> None:
    seal = manifest_of(engine).seals[SEAL].model_copy(update={"aot": ["0" * 64]})
    with_manifest(engine, seals={SEAL: seal})


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        *(
            (kernels(json.dumps({"child_paths": {path: path}})), "no file beside it")
            for path in ("/etc/passwd", "../../vllm/x", "absent.cubin", "x/fused.cubin")
        ),
        (kernels("[" * 500_000), "is no group of Triton's"),
        (another_hash, r"its manifest names \['000"),
    ],
)
def test_a_trusted_seal_that_names_what_is_not_in_it_is_refused(
    engine: Path, root: Path, tmp_path: Path, change: Callable[[Path], None], text: str
) -> None:
    copy = copied(engine, tmp_path / "copy")
    change(copy)
    with pytest.raises(EngineCorrupt, match=text):
        seeded(copy, root)
    assert not root.exists()
    pinned = settings(tmp_path, SEAL_SHA256=digest_of(copy))
    with pytest.raises(EngineCorrupt, match=text):
        sealed_engine.options(pinned, copy, None)  # before anything is started


def file_named(name: str) -> Callable[[Any], Any]:
    return lambda told: told["files"].update({name: {"size": 0, "sha256": "0" * 64}})


def weights_named(name: str) -> Callable[[Any], Any]:
    files = {name: {"size": 0, "sha256": "0" * 64}}
    return lambda told: told.update(weights={"source": "a/b", "files": files})


@pytest.mark.parametrize(
    "lie",
    [
        *map(file_named, (f"{PLACE}/../../../x", "/etc/x", "x\0y", "x" * 300)),
        *map(weights_named, ("../x.safetensors", "model.json")),
        lambda told: told["seals"][SEAL]["environment"].update(gpu_name="\x1b[2J"),
        lambda told: told["seals"][SEAL]["environment"].update(sm=1 << 40),
        lambda told: told["seals"][SEAL].update(driver="9" * 5000),
        lambda told: told.update(variables={"LD_PRELOAD": "x"}),
        lambda told: told.update(model_id="x" * (16 << 20)),
    ],
)
def test_a_manifest_that_lies_is_refused_before_it_is_trusted(
    engine: Path, tmp_path: Path, lie: Callable[[dict[str, Any]], Any]
) -> None:
    copy = copied(engine, tmp_path / "copy")
    told = json.loads((copy / "cog-triton.json").read_text())
    lie(told)
    (copy / "cog-triton.json").write_text(json.dumps(told))
    with pytest.raises(EngineCorrupt) as caught:
        SealedManifest.of(copy)
    assert str(caught.value).isprintable()
    with pytest.raises(EngineCorrupt):
        sealed_engine.with_weights(settings(tmp_path), copy)


def settings(tmp_path: Path, **values: str) -> Settings:
    return Settings(COG_TRITON_WORK_DIR=str(tmp_path / "home"), **values)


def test_trust_is_by_the_record_of_a_build_or_by_a_pin(
    builds: SealedBuilds, engine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digest = digest_of(engine)
    own = {TRUSTED: digest, REQUIRED: "false"}
    at_home = Settings(COG_TRITON_WORK_DIR=str(builds.directory / "home"))
    assert sealed_engine.options(at_home, engine, None) == own
    away = settings(tmp_path)
    assert sealed_engine.options(away, engine, None) == {}
    assert sealed_engine.options(settings(tmp_path, SEAL_SHA256=f"sha256:{digest}"), engine, None)
    both = settings(tmp_path, SEAL_SHA256=f"{'1' * 64}, {digest}")  # while one replaces the other
    assert sealed_engine.options(both, engine, None) == own
    other = settings(tmp_path, SEAL_SHA256="1" * 64)
    assert sealed_engine.options(other, engine, f"oci://r.lan/e@sha256:{'1' * 64}") == own
    assert sealed_engine.options(other, engine, f"oci://r.lan/e@sha256:{'2' * 64}") == {}
    assert sealed_engine.options(other, engine, None) == {}
    assert (
        sealed_engine.options(settings(tmp_path, SEAL_SHA256=digest, SEAL="off"), engine, None)
        == {}
    )
    for values in ({"SEAL": "required"}, {"SEAL_SHA256": "abc"}):
        with pytest.raises(CogTritonError, match=r"seal is required|SEAL_SHA256"):
            sealed_engine.options(settings(tmp_path, **values), engine, None)
    remember(tmp_path / "home", digest)
    assert sealed_engine.options(away, engine, None) == own
    (tmp_path / "home" / "trusted-seals").chmod(0o777)
    assert sealed_engine.options(away, engine, None) == {}


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


@pytest.mark.full
@pytest.mark.usefixtures("vllm_environment")
def test_each_rank_of_an_engine_and_its_spare_starts_from_its_seal_at_another_path(
    tmp_path: Path,
    gpu: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As torch does, the double looks for choices at the path of the build, which is gone."""
    caplog.set_level("INFO", "cog_triton")
    reduces = {"VLLM_DOUBLE_REDUCES": "1"}
    builds = SealedBuilds(tmp_path / "builds", {"gpu_count": 2}, variables=reduces)
    arguments = {"gpu_memory_utilization": 0.4, "tensor_parallel_size": 2}
    tar = builds.build({**CONFIG, "args": arguments, "spare": True})
    engine = unpacked(tar, tmp_path / "engine")
    manifest = manifest_of(engine)
    assert (list(manifest.seals), manifest.world_size) == (["nvidia-h200-sm90-x2"], 2)
    places = builds.compiled("tuned")
    shutil.rmtree(builds.directory)

    for name, value in reduces.items():
        monkeypatch.setenv(name, value)
    gpu(gpu_count=2)
    journal = tmp_path / "journal"
    trust = {TRUSTED: digest_of(engine), REQUIRED: "true"}
    spec = EngineSpec.of(HOST, given(engine, tmp_path, **trust, **{SPARE_LOADS: "beside"}))
    with started(tmp_path, spec, spare=True) as fleet:
        until(lambda: "spare engine 2 is parked" in caplog.text)
        fleet.call(fleet.engines.end, "by the test")
        fleet.death()
        assert says(fleet.client, ABC) == list(b"abca")
        until(lambda: "spare engine 3 is parked" in caplog.text)  # and the next spare
    assert nothing_compiled(journal)
    assert compiled(journal, "tuned") == []
    assert not any(Path(place).exists() for place in places)
    read = compiled(journal, "read")
    assert len(read) >= 3 * 4  # each opened the seal's kernels
    assert all(Path(path).is_relative_to(tmp_path / "work") for path in read)
    (caches,) = (tmp_path / "work").iterdir()
    assert len(list((caches / AOT).iterdir())) == 2
    held = sorted(path.read_bytes() for path in (caches / AOT).rglob("rank_*/model"))
    assert held == sorted(path.read_bytes() for path in engine.rglob("rank_*/model"))
    assert len(held) == 4

    gpu(gpu_count=1)  # one of them is gone
    one = copied(engine, tmp_path / "one")
    (one / "model.json").write_text("{}")  # without its argument of ranks
    shutil.rmtree(tmp_path / "work")
    with pytest.raises(EngineIncompatible, match="a seal is required"):
        answered(one, tmp_path, **trust)
