"""Builds of sealed vLLM engines with the double: what they refuse, resume, add and leave out."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cuda_driver import has_compiler
from hub_server import ID as HUB_ID
from hub_server import MAIN, ask_hub, serving_hub
from lora_adapters import adapter
from range_server import Content, Span, serving_file
from sealed_engines import CONFIG, SEAL, SealedBuilds, manifest_of, rewritten, unpacked
from stack import processes_of, shared_memory, wait_until

from cog_triton.artifact.engine_manifest import FileEntry, sha256_of
from cog_triton.builder import other_user, sealed_package
from cog_triton.builder.config import SealedConfig, parse_any
from cog_triton.download.partial_file import PIECE
from cog_triton.errors import BuildConfigInvalid, EngineCorrupt, ModelUnavailable
from cog_triton.serving.sealed_engine import with_weights
from cog_triton.settings import Settings

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "build").glob("vllm-*.yaml"))
pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")


@pytest.fixture
def builds(tmp_path: Path) -> SealedBuilds:
    return SealedBuilds(tmp_path)


def sealed(text: str) -> SealedConfig:
    config = parse_any(f"engine: vllm\nmodel_id: a/b\n{text}", "c.yaml")
    assert isinstance(config, SealedConfig)
    return config


def test_config_as_it_is_run_is_the_same_again() -> None:
    config = sealed("hf_token: hf_1\nargs: {max_model_len: '64'}\nenv: {VLLM_X: 1}\nspare: true\n")
    assert config.args == {"max_model_len": 64}
    text = config.to_yaml()
    assert "hf_1" not in text
    again = parse_any(text, "again")
    assert again == config.model_copy(update={"hf_token": None})
    assert again.fingerprint == config.fingerprint


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


def test_check_and_plan_build_nothing(builds: SealedBuilds) -> None:
    for option in ("--check", "--plan"):
        done = builds.run(CONFIG, option)
        assert done.returncode == 0, done.stderr
        assert "compiles  for NVIDIA H200" in done.stdout
    assert not (builds.directory / "work").exists()
    assert not builds.journal.exists()


def test_without_a_gpu_nothing_is_fetched(builds: SealedBuilds) -> None:
    builds.variables["CUDA_VISIBLE_DEVICES"] = ""
    done = builds.run()
    assert done.returncode == 1
    assert "E1305" in done.stderr
    assert "it has 1 ranks, and none of them is here" in done.stderr


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


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_is_sealed(path: Path, tmp_path: Path) -> None:
    config = {**yaml.safe_load(path.read_text("utf-8")), "model_id": "./model"}
    ranks = config["args"].get("tensor_parallel_size", 1)
    builds = SealedBuilds(tmp_path, {"gpu_count": ranks})
    if "lora_adapters" in config:
        adapter(tmp_path / "adapter")
        config["lora_adapters"] = dict.fromkeys(config["lora_adapters"], "./adapter")
    engine = unpacked(builds.build(config), tmp_path / "engine")
    manifest = manifest_of(engine)
    assert [seal.environment.ranks for seal in manifest.seals.values()] == [ranks]
    packed = config.get("weights") != "reference"
    assert bool([*engine.rglob("model.safetensors")]) == packed
    assert list(manifest.lora_adapters) == list(config.get("lora_adapters", {}))
    written = json.loads((engine / "model.json").read_text())
    assert {name: written[name] for name in config["args"]} == config["args"]


REFERENCE = {**CONFIG, "weights": "reference"}


@pytest.fixture(scope="module")
def referring(tmp_path_factory: pytest.TempPathFactory) -> SealedBuilds:
    """Builds of an engine whose weights stay where they are."""
    made = SealedBuilds(tmp_path_factory.mktemp("reference"))
    made.build(REFERENCE)
    return made


def test_seals_of_other_gpus_are_added(referring: SealedBuilds, tmp_path: Path) -> None:
    tar = str(referring.directory / "engine.tar")
    second = SealedBuilds(tmp_path / "two", {"gpu_name": "NVIDIA H100 80GB HBM3"})
    both = unpacked(second.build(REFERENCE, "--add-seal", tar), tmp_path / "both")
    manifest = manifest_of(both)
    assert list(manifest.seals) == ["nvidia-h100-80gb-hbm3-sm90-x1", SEAL]
    assert manifest.gpu_name == "NVIDIA H100 80GB HBM3, NVIDIA H200"
    assert sorted(path.name for path in (both / "sealed").iterdir()) == list(manifest.seals)


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


def killed(builds: SealedBuilds, config: dict[str, Any], there: Callable[[], object]) -> None:
    """Begin a build, and kill it with SIGKILL once `there` is so: none of its processes is left."""
    home = builds.directory / "home"
    environment = {**builds.environment, **builds.variables}
    process = subprocess.Popen(
        builds.command(config), cwd=builds.directory, env=environment, stdout=subprocess.DEVNULL
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


def resumed(builds: SealedBuilds, config: dict[str, Any]) -> str:
    """Build again, and compare the tar with an undisturbed one; returns what the build said."""
    done = builds.run(config)
    assert done.returncode == 0, done.stderr
    made = [manifest_of(unpacked(builds.directory / "engine.tar", builds.directory / "made"))]
    builds.build(config, "--work-dir", "undisturbed", tar="whole.tar")
    made.append(manifest_of(unpacked(builds.directory / "whole.tar", builds.directory / "whole")))
    took = {"compile_seconds": 0.0, "seconds": 0.0}
    told = [
        {**one.model_dump(), "seals": {k: {**v.model_dump(), **took} for k, v in one.seals.items()}}
        for one in made
    ]
    assert told[0] == told[1]  # with the sums of all files
    left = {path.name for path in builds.directory.iterdir()}
    assert left == {
        *("config.yaml", "driver", "engine.tar", "home", "journal", "made", "model", "python"),
        *("tmp", "undisturbed", "whole", "whole.tar", "work"),
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


def test_a_build_that_is_killed_while_it_fetches_goes_on(watched: SealedBuilds) -> None:
    """What it has of the model is not fetched again."""
    model = watched.directory / "model"
    (model / "filler.bin").write_bytes(bytes(2 * PIECE))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as file:
        for path in sorted(model.iterdir()):
            file.add(path, path.name)
    released = threading.Event()

    def only_the_first_piece(_: int, span: Span | None) -> None:
        if span and span[0]:
            released.wait()

    with serving_file(Content.of(packed.getvalue()), only_the_first_piece) as server:
        config = {**CONFIG, "model_tar_url": f"{server.url}/model.tar"}
        store = watched.directory / "work"
        killed(
            watched,
            config,
            lambda: "\n0\n" in "".join(path.read_text() for path in store.rglob("*.journal")),
        )
        released.set()
        asked = len(server.requests)
        said = resumed(watched, config)
        again = server.requests[asked:]
    assert [span for span in again if span and span[0] >= PIECE]
    assert "already" not in said


@pytest.mark.parametrize("stage", ["compile", "prove", "package"])
def test_a_build_that_is_killed_goes_on_where_it_was(watched: SealedBuilds, stage: str) -> None:
    builds, work, hold = watched, watched.directory / "work", watched.directory / "tmp" / "hold"
    if stage == "compile":
        builds.variables["VLLM_DOUBLE_COMPILING"] = str(hold)
        hold.touch()
        killed(builds, CONFIG, lambda: builds.journal.exists() and builds.compiled("aot"))
        hold.unlink()
    elif stage == "prove":
        builds.variables["VLLM_DOUBLE_HOLD"] = str(hold)

        def proves() -> object:
            if list(work.glob("steps/*/compiled.json")):
                hold.touch()
            return list(work.rglob("proof/caches/*/vllm/modelinfos"))

        killed(builds, CONFIG, proves)
        hold.unlink()
    else:
        os.truncate(builds.directory / "model" / "model.safetensors", 256 << 20)
        killed(
            builds,
            CONFIG,
            lambda: [p for p in builds.directory.glob(".engine.tar.*") if p.stat().st_size],
        )
    compiled_before = len(builds.compiled("aot"))
    said = resumed(builds, CONFIG)
    apart = "by another user" in said
    assert apart or stage == "package" or "[prove] by the same user, at another path" in said
    assert ("[compile] already done" in said) == (stage != "compile")
    assert ("[prove] already done" in said) == (stage == "package")
    made = compiled_before + (1 if stage == "compile" else 0) + 1  # and the undisturbed one's
    assert len(builds.compiled("aot")) == made
    seals = manifest_of(builds.directory / "made").seals
    if stage != "package":
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


def test_an_engine_with_its_weights_is_served_as_it_is(settings: Settings, tmp_path: Path) -> None:
    assert with_weights(settings, tmp_path) == tmp_path


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
