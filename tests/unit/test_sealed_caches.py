"""Seals of vLLM engines: built with the double, used only where they fit and are trusted."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_driver import has_compiler
from rich.console import Console
from sealed_engines import (
    H200,
    SEAL,
    SealedBuilds,
    copied,
    digest_of,
    lying,
    manifest_of,
    rewritten,
    sealed_file,
    unpacked,
)

from cog_triton.artifact.seal import DIRECTORY
from cog_triton.doctor import run_checks
from cog_triton.doctor.report import State
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


def test_no_path_of_the_build_is_in_the_tar(builds: SealedBuilds) -> None:
    data = (builds.directory / "engine.tar").read_bytes()
    assert str(builds.directory).encode() not in data


def test_nothing_is_compiled_twice_and_equal_parts_make_equal_tars(builds: SealedBuilds) -> None:
    before = builds.journal.read_text()
    other = builds.build(tar="other.tar")
    assert builds.journal.read_text() == before
    assert other.read_bytes() == (builds.directory / "engine.tar").read_bytes()


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


def test_doctor_tells_whether_a_seal_is_trusted(
    builds: SealedBuilds, engine: Path, tmp_path: Path
) -> None:
    at_home = Settings(COG_TRITON_WORK_DIR=str(builds.directory / "home"))
    for path in (engine, builds.directory / "engine.tar"):
        trusted = run_checks.seals(Source.open(str(path)), at_home)
        other = run_checks.seals(Source.open(str(path)), settings(tmp_path))
        assert trusted is not None
        assert other is not None
        assert (trusted.state, other.state) == (State.OK, State.WARN)
        assert f"set SEAL_SHA256={digest_of(engine)}" in other.found
        signed = run_checks.seals(
            Source.open(str(path)), settings(tmp_path, SEAL_SIGNER="cosign.pub")
        )
        assert signed is not None
        assert "; SEAL_SIGNER=cosign.pub: is for an engine in a registry" in signed.found


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


@pytest.mark.usefixtures("gpu")
def test_a_users_own_cache_is_not_written_to(
    engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/elsewhere")
    assert seeded(engine, None) is None
    assert "VLLM_CACHE_ROOT set by the user" in caplog.text


def damaged_model(engine: Path) -> str:
    sealed_file(engine, "model").write_bytes(b"x")
    return "model has 1 bytes, the manifest says"


def missing_model(engine: Path) -> str:
    sealed_file(engine, "model").unlink()
    return "No such file"


def changed_kernel(engine: Path) -> str:
    file = sealed_file(engine, "*.cubin")
    file.write_bytes(file.read_bytes()[::-1])
    return r"cubin has sha256 \w+, the manifest says"


def changed_manifest(engine: Path) -> str:
    rewritten(engine, manifest_of(engine).model_copy(update={"model_id": "another"}))
    return r"its manifest is \w+, and \w+ is trusted"


def pipe(engine: Path) -> str:
    """It would be waited on for ever."""
    file = sealed_file(engine, "model")
    file.unlink()
    os.mkfifo(file)
    return "has 0 bytes, the manifest says"


DAMAGES = [damaged_model, missing_model, changed_kernel, changed_manifest, pipe]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_seal_is_refused(
    engine: Path, root: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    copy = copied(engine, tmp_path / "copy")
    options = {TRUSTED: digest_of(copy)}
    text = damage(copy)
    with pytest.raises(EngineCorrupt, match=text):
        Trusted.of(copy, options).seed(root, 1)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("content", "says"),
    [
        *(
            (json.dumps({"child_paths": {path: path}}), "no file beside it")
            for path in ("/etc/passwd", "../../vllm/x", "absent.cubin", "x/fused.cubin")
        ),
        ("[" * 500_000, "is no group of Triton's"),
    ],
    ids=["absolute", "above", "absent", "below", "endless"],
)
def test_a_kernel_that_names_a_file_elsewhere_or_no_file_is_refused(
    engine: Path, root: Path, tmp_path: Path, content: str, says: str
) -> None:
    copy = copied(engine, tmp_path / "copy")
    group = sealed_file(copy, "__grp__fused_kernel.json").relative_to(copy).as_posix()
    lying(copy, group, content.encode())
    with pytest.raises(EngineCorrupt, match=says):
        seeded(copy, root)
    assert not root.exists()
    pinned = settings(tmp_path, SEAL_SHA256=digest_of(copy))
    with pytest.raises(EngineCorrupt, match=says):
        sealed_engine.options(pinned, copy, None)  # before anything is started


@pytest.mark.usefixtures("gpu")
def test_a_manifest_that_names_another_hash_is_refused(
    engine: Path, root: Path, tmp_path: Path
) -> None:
    copy = copied(engine, tmp_path / "copy")
    manifest = manifest_of(copy)
    seal = manifest.seals[SEAL].model_copy(update={"aot": ["0" * 64]})
    rewritten(copy, manifest.model_copy(update={"seals": {SEAL: seal}}))
    with pytest.raises(EngineCorrupt, match=r"its manifest names \['000"):
        seeded(copy, root)
    pinned = settings(tmp_path, SEAL_SHA256=digest_of(copy))
    with pytest.raises(EngineCorrupt, match=r"its manifest names \['000"):
        sealed_engine.options(pinned, copy, None)


@pytest.mark.usefixtures("gpu")
def test_a_file_that_is_said_to_be_huge_is_not_read(
    engine: Path, root: Path, tmp_path: Path
) -> None:
    copy = copied(engine, tmp_path / "copy")
    manifest = manifest_of(copy)
    name = sealed_file(copy, "model").relative_to(copy).as_posix()
    huge = manifest.files[name].model_copy(update={"size": 1 << 60})
    rewritten(copy, manifest.model_copy(update={"files": {**manifest.files, name: huge}}))
    with pytest.raises(EngineCorrupt, match="the manifest says 1152921504606846976"):
        seeded(copy, root)


def with_file(told: dict[str, Any], name: str) -> None:
    told["files"][name] = {"size": 0, "sha256": "0" * 64}


def with_weights_of(told: dict[str, Any], name: str) -> None:
    entry = {"size": 0, "sha256": "0" * 64}
    told["weights"] = {"source": "a/b", "files": {name: entry}}


def environment_with(told: dict[str, Any], key: str, value: object) -> None:
    told["seals"][SEAL]["environment"][key] = value


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        (lambda told: with_file(told, f"{PLACE}/../../../x"), "below the engine's directory"),
        (lambda told: with_file(told, "/etc/x"), "below the engine's directory"),
        (lambda told: with_file(told, "x\0y"), "below the engine's directory"),
        (lambda told: with_file(told, "x" * 300), "1024 characters at most, and 255 bytes a part"),
        (lambda told: with_weights_of(told, "../x.safetensors"), "below the engine's directory"),
        (lambda told: with_weights_of(told, "model.json"), "is a file of the engine, too"),
        (lambda told: environment_with(told, "gpu_name", "\x1b[2J"), "should match pattern"),
        (lambda told: environment_with(told, "sm", 1 << 40), "less than 1000"),
        (lambda told: told["seals"][SEAL].update(driver="9" * 5000), "should match pattern"),
        (lambda told: told.update(variables={"LD_PRELOAD": "x"}), "should match pattern"),
        (lambda told: told.update(model_id="x" * (16 << 20)), "has over 16777216 bytes"),
    ],
)
def test_what_no_manifest_says_is_refused_before_it_is_trusted(
    engine: Path, tmp_path: Path, lie: Callable[[dict[str, Any]], None], says: str
) -> None:
    """Wherever a seal is known, it is by this."""
    copy = copied(engine, tmp_path / "copy")
    told = json.loads((copy / "cog-triton.json").read_text())
    lie(told)
    (copy / "cog-triton.json").write_text(json.dumps(told))
    with pytest.raises(EngineCorrupt, match=says) as caught:
        SealedManifest.of(copy)
    assert str(caught.value).isprintable()
    with pytest.raises(EngineCorrupt, match=says):
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
    remember(tmp_path / "home", digest)
    assert sealed_engine.options(away, engine, None) == own
    (tmp_path / "home" / "trusted-seals").chmod(0o777)
    assert sealed_engine.options(away, engine, None) == {}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"SEAL": "required"}, "left unread.*; a seal is required"),
        ({"SEAL_SHA256": "abc"}, "SEAL_SHA256='abc': must be 64 hexadecimal digits"),
    ],
)
def test_what_is_required_is_refused_where_it_cannot_be(
    engine: Path, tmp_path: Path, values: dict[str, str], text: str
) -> None:
    with pytest.raises(CogTritonError, match=text):
        sealed_engine.options(settings(tmp_path, **values), engine, None)


def test_seals_are_left_where_they_are_off(engine: Path, tmp_path: Path) -> None:
    pinned = {"SEAL_SHA256": digest_of(engine), "SEAL": "off"}
    assert sealed_engine.options(settings(tmp_path, **pinned), engine, None) == {}
    assert SealedManifest.of(engine) is not None
