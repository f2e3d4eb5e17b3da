"""Builds of sealed vLLM engines with the double: what they refuse, resume, add and leave out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_driver import has_compiler
from hub_server import ID as HUB_ID
from hub_server import MAIN, ask_hub, serving_hub
from lora_adapters import adapter
from sealed_engines import CONFIG, SEAL, SealedBuilds, manifest_of, rewritten, unpacked
from stack import processes_of, shared_memory, wait_until

from cog_triton.artifact.engine_manifest import FileEntry, Manifest, sha256_of
from cog_triton.builder import other_user, sealed_package
from cog_triton.builder.config import SealedConfig, parse_any
from cog_triton.errors import BuildConfigInvalid, EngineCorrupt, ModelUnavailable
from cog_triton.serving.sealed_engine import with_weights
from cog_triton.settings import Settings

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")


@pytest.fixture
def builds(tmp_path: Path) -> SealedBuilds:
    return SealedBuilds(tmp_path)


def sealed(text: str) -> SealedConfig:
    config = parse_any(f"engine: vllm\nmodel_id: a/b\n{text}", "c.yaml")
    assert isinstance(config, SealedConfig)
    return config


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("quantize: fp8", "quantize: vLLM quantizes as it loads, and has nothing that writes"),
        ("args: {model: x}", "args: model: model_id names it: leave it out"),
        ("args: {nnodes: 2}", "args: nnodes: an engine of several machines is not sealed"),
        ("args: {max_modellen: 2}", "has no such engine argument; did you mean 'max_model_len'?"),
        ("args: {max_model_len: x}", "must be a whole number (vLLM 0.33.0)"),
        ("args: {hf_token: x}", "args: hf_token may be secret"),
        ("env: {LD_PRELOAD: x}", "env: LD_PRELOAD: must begin with VLLM_, TORCHINDUCTOR_ or NCCL_"),
        ("env: {VLLM_API_KEY: x}", "env: VLLM_API_KEY may be secret"),
        ("weights: linked", "must be one of packed, reference"),
        ("canary: {promt: x}", "canary.promt: unknown key; did you mean 'prompt'?"),
        ("example_name: qwen", "example_name: unknown key"),
    ],
)
def test_mistakes_in_a_config_are_named(text: str, says: str) -> None:
    with pytest.raises(BuildConfigInvalid) as caught:
        sealed(text)
    assert says in str(caught.value)


def test_without_a_gpu_nothing_is_fetched(builds: SealedBuilds) -> None:
    builds.variables["CUDA_VISIBLE_DEVICES"] = ""
    done = builds.run()
    assert done.returncode == 1
    assert "E1305" in done.stderr
    assert "it has 1 ranks, and none of them is here" in done.stderr


@pytest.mark.full
def test_all_that_a_config_has_is_packed(builds: SealedBuilds) -> None:
    adapter(builds.directory / "doll")
    config = {
        **CONFIG,
        "spare": True,
        "env": {"VLLM_USE_V2_MODEL_RUNNER": 1},
        "sealed": "required",
        "lora_adapters": {"doll": "./doll"},
    }
    engine = unpacked(builds.build(config), builds.directory / "engine")
    manifest = manifest_of(engine)
    assert len(manifest.seals[SEAL].aot) == 2  # one that can sleep is another engine
    assert len(builds.compiled("aot")) == 2
    assert manifest.variables == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert manifest.seal_required
    assert json.loads((engine / "multi_lora.json").read_text()) == {"doll": "lora/doll"}
    assert json.loads((engine / "model.json").read_text()) == {"enable_lora": True}
    assert (engine / "lora/doll/adapter_model.safetensors").is_file()
    assert manifest.lora_adapters["doll"].source == "./doll"


REFERENCE = {**CONFIG, "weights": "reference"}


@pytest.fixture(scope="module")
def referring(tmp_path_factory: pytest.TempPathFactory) -> SealedBuilds:
    """Builds of an engine whose weights stay where they are."""
    made = SealedBuilds(tmp_path_factory.mktemp("reference"))
    made.build(REFERENCE)
    return made


@pytest.mark.full
def test_a_seal_of_another_config_is_not_added(referring: SealedBuilds) -> None:
    """That is known before anything is compiled."""
    other = {**REFERENCE, "args": {"max_model_len": 64}}
    journal = referring.journal.read_text()
    refused = referring.run(other, "--add-seal", "engine.tar", tar="other.tar")
    assert "was built of another config" in refused.stderr
    assert not (referring.directory / "other.tar").exists()
    assert referring.journal.read_text() == journal


def test_an_added_tar_that_promises_more_than_seals_is_not_unpacked(tmp_path: Path) -> None:
    header = tarfile.TarInfo(f"sealed/{SEAL}/model")
    header.size = 5 << 30
    tar = tmp_path / "bomb.tar"
    tar.write_bytes(header.tobuf(format=tarfile.PAX_FORMAT))
    model: Any = None
    with pytest.raises(EngineCorrupt, match="more than 4294967296 bytes of seals"):
        sealed_package.unpack_seals(tar, sealed(""), model, tmp_path)
    assert list(tmp_path.iterdir()) == [tar]


def killed(builds: SealedBuilds, there: Callable[[], object]) -> None:
    """Begin a build, and kill it with SIGKILL once `there` is so: none of its processes is left."""
    home = builds.directory / "home"
    environment = {**builds.environment, **builds.variables}
    process = subprocess.Popen(
        builds.command(CONFIG), cwd=builds.directory, env=environment, stdout=subprocess.DEVNULL
    )
    try:
        wait_until(there)
        assert process.poll() is None
        pids = {process.pid, *processes_of(home)}
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not processes_of(home))
    assert shared_memory(pids) == []
    assert not (builds.directory / "engine.tar").exists()


def comparable(manifest: Manifest) -> dict[str, Any]:
    """A manifest, with the sums of all files, without the times that its seals took."""
    took = {"compile_seconds": 0.0, "seconds": 0.0}
    seals = {key: {**seal.model_dump(), **took} for key, seal in manifest.seals.items()}
    return {**manifest.model_dump(), "seals": seals}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The manifest of CONFIG's engine, whose build was not killed."""
    builds = SealedBuilds(tmp_path_factory.mktemp("undisturbed"))
    return comparable(manifest_of(unpacked(builds.build(), builds.directory / "engine")))


def resumed(builds: SealedBuilds, undisturbed: dict[str, Any]) -> str:
    """Build again, and compare the tar with an undisturbed one; returns what the build said."""
    done = builds.run(CONFIG)
    assert done.returncode == 0, done.stderr
    made = manifest_of(unpacked(builds.directory / "engine.tar", builds.directory / "made"))
    assert comparable(made) == undisturbed
    left = {path.name for path in builds.directory.iterdir()}
    assert left == {
        *("config.yaml", "driver", "engine.tar", "home", "journal", "made", "model", "python"),
        *("tmp", "work"),
    }
    assert list((builds.directory / "tmp").iterdir()) == []
    assert not [path for path in (builds.directory / "work").rglob("*") if path.name == "proof"]
    return done.stdout


@pytest.fixture
def watched(builds: SealedBuilds) -> SealedBuilds:
    """Builds whose temporary files are in a directory of their own."""
    (builds.directory / "tmp").mkdir()
    builds.variables["TMPDIR"] = str(builds.directory / "tmp")
    return builds


@pytest.mark.full
@pytest.mark.parametrize("stage", ["compile", "prove"])
def test_a_killed_build_resumes(
    watched: SealedBuilds, stage: str, undisturbed: dict[str, Any]
) -> None:
    builds, work, hold = watched, watched.directory / "work", watched.directory / "tmp" / "hold"
    if stage == "compile":
        builds.variables["VLLM_DOUBLE_COMPILING"] = str(hold)
        hold.touch()
        killed(builds, lambda: builds.journal.exists() and builds.compiled("aot"))
        hold.unlink()
    else:
        builds.variables["VLLM_DOUBLE_HOLD"] = str(hold)

        def proves() -> object:
            if list(work.glob("steps/*/compiled.json")):
                hold.touch()
            try:
                return list(work.rglob("proof/caches/*/vllm/modelinfos"))
            except FileNotFoundError:  # a directory went meanwhile
                return []

        killed(builds, proves)
        hold.unlink()
    compiled_before = len(builds.compiled("aot"))
    said = resumed(builds, undisturbed)
    apart = "by another user" in said
    assert apart or "[prove] by the same user, at another path" in said
    assert ("[compile] already done" in said) == (stage != "compile")
    assert "[prove] already done" not in said
    made = compiled_before + (1 if stage == "compile" else 0)
    assert len(builds.compiled("aot")) == made
    seals = manifest_of(builds.directory / "made").seals
    assert {name: seal.apart for name, seal in seals.items()} == {SEAL: apart}


def test_a_proof_with_another_answer_ends_the_build(referring: SealedBuilds) -> None:
    """Its record of what was compiled has another answer."""
    steps = referring.directory / "work" / "steps"
    (record,) = steps.glob("*/compiled.json")
    (proven,) = steps.glob("*/seal.json")
    kept = record.read_text()
    told = json.loads(kept)
    told["started"]["output_ids"] = [1, 2, 3, 4]
    record.write_text(json.dumps(told))
    shutil.rmtree(proven.parent)
    done = referring.run(REFERENCE, tar="another.tar")
    record.write_text(kept)
    assert done.returncode == 1
    told_text = "prove: the canary was answered with [97, 98, 99, 97], and with [1, 2, 3, 4]"
    assert told_text in done.stderr
    assert not (referring.directory / "another.tar").exists()


@pytest.fixture
def engine(referring: SealedBuilds, tmp_path: Path) -> Path:
    return unpacked(referring.directory / "engine.tar", tmp_path / "engine")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(COG_TRITON_WORK_DIR=str(tmp_path / "server"))


def test_weights_are_fetched_and_compared(
    referring: SealedBuilds, engine: Path, settings: Settings
) -> None:
    model = referring.directory / "model"
    weights = manifest_of(engine).weights
    assert weights is not None
    assert list(weights.files) == ["model.safetensors"]
    assert weights.source == str(model)
    assert not (engine / "model.safetensors").exists()
    view = with_weights(settings, engine)
    assert (view / "model.safetensors").resolve() == model / "model.safetensors"
    assert (view / "model.json").resolve() == engine / "model.json"
    assert with_weights(settings, engine) == view


def test_weights_that_are_gone_are_looked_for_again(
    referring: SealedBuilds, engine: Path, settings: Settings
) -> None:
    file = referring.directory / "model" / "model.safetensors"
    with_weights(settings, engine)
    file.rename(file.with_suffix(".kept"))
    try:
        with pytest.raises(EngineCorrupt, match=r"has no model\.safetensors, which the"):
            with_weights(settings, engine)
        file.write_bytes(b"x")
        with pytest.raises(EngineCorrupt, match="has 1 bytes, the manifest says 0"):
            with_weights(settings, engine)
    finally:
        file.with_suffix(".kept").replace(file)


def refer(engine: Path, **values: Any) -> None:
    """Have an engine's manifest name its weights by other values."""
    manifest = manifest_of(engine)
    assert manifest.weights is not None
    other = manifest.weights.model_copy(update=values)
    rewritten(engine, manifest.model_copy(update={"weights": other}))


def test_weights_of_a_directory_that_is_gone_or_is_all_of_the_machine(
    engine: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    refer(engine, source="/absent")
    with pytest.raises(ModelUnavailable, match="/absent: is not here"):
        with_weights(settings, engine)
    refer(engine, source="/")
    monkeypatch.setattr(Path, "rglob", None)  # it would be searched for minutes
    with pytest.raises(EngineCorrupt, match=r"/: has no model\.safetensors, which the"):
        with_weights(settings, engine)


def test_weights_of_the_hub_are_what_they_were(
    engine: Path, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commit that was built of; a hub that has another file there is not believed."""
    content = bytes(range(256)) * 64
    kept = tmp_path / "kept"
    kept.write_bytes(content)
    entry = FileEntry(size=len(content), sha256=sha256_of(kept))
    refer(engine, source=HUB_ID, revision=MAIN, files={"model.safetensors": entry})
    model = {"config.json": b"{}", "model.safetensors": content}
    places = iter(f"server-{number}" for number in range(9))

    def served(files: dict[str, bytes]) -> Path:
        fresh = Settings(COG_TRITON_WORK_DIR=str(tmp_path / (place := next(places))))
        with serving_hub(files) as hub:
            ask_hub(monkeypatch, hub.url, tmp_path / place)
            view = with_weights(fresh, engine)
        assert not [line for line in hub.requests if MAIN not in line and "/api/" not in line]
        return view

    view = served(model)
    assert (view / "model.safetensors").read_bytes() == content
    with pytest.raises(EngineCorrupt, match=r"model\.safetensors has sha256"):
        served({**model, "model.safetensors": content[::-1]})
    with pytest.raises(EngineCorrupt, match=r"model\.safetensors has 1 bytes"):
        served({**model, "model.safetensors": b"x"})
    with pytest.raises((EngineCorrupt, ModelUnavailable), match=r"safetensors"):
        served({"config.json": b"{}"})
    with pytest.raises(EngineCorrupt, match=r"has no model\.safetensors, which the"):
        served({"config.json": b"{}", "other.safetensors": content})


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not Path("/usr/bin/python3").exists(),
    reason="needs root, who may become another user, and a Python for all",
)
def test_a_proof_is_by_another_user_who_can_read_all() -> None:
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        place.chmod(0o755)
        package = place / "packages" / "cog_triton"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        file = place / "model"
        file.touch(0o644)
        environment = {"PYTHONPATH": str(package.parent)}
        given = ("/usr/bin/python3", environment, [file], place / "caches")
        begin = other_user.command(*given)
        assert (place / "caches").stat().st_uid == other_user.NOBODY
        script = f"import os; open({str(place / 'caches' / 'x')!r}, 'w'); print(os.getuid())"
        done = subprocess.run(
            [*begin, "/usr/bin/python3", "-c", script], capture_output=True, text=True
        )
        assert done.stdout == f"{other_user.NOBODY}\n"
        file.chmod(0o600)
        assert other_user.command(*given) == ()
