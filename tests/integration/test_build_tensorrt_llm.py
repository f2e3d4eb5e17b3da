"""TensorRT-LLM builds from config to tar, with the scripts of a fake TensorRT-LLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from build_runs import BuildRuns, build_step, gpt, llama, packed
from layers import full
from legacy_configs import TINY_GPT2
from stack import wait_until
from tensorrt_llm_tree import Installation, driver, models
from test_builder_predictions import predict, start_builder

from cog_triton.artifact.engine_tar import unpack
from cog_triton.builder.checks import RULES

pytestmark = pytest.mark.integration

RANKS = [full(1, 1), (2, 1), full(1, 2)]


@pytest.mark.parametrize(("tp", "pp"), RANKS)
def test_convert_quantize_and_build(build_runs: BuildRuns, tp: int, pp: int) -> None:
    said = build_runs.build(llama(tp, pp))
    assert [
        line.split("] ")[1].partition(" (as recorded")[0] for line in said if "[check]" in line
    ] == [
        "convert_to_ft: OK: the arguments are what convert_checkpoint.py accepts",
        "quantize: OK: the arguments are what quantize.py accepts",
        "build: OK: the arguments are what trtllm-build accepts",
        f"combinations: OK: none of {len(RULES)} rules is broken",
    ]
    assert "[build] [TensorRT-LLM] TensorRT-LLM version: 1.2.1" in said
    engine = build_runs.directory / "unpacked"
    manifest = unpack(build_runs.directory / "engine.tar", engine)
    ranks = [f"rank{rank}.engine" for rank in range(tp * pp)]
    assert sorted(path.name for path in engine.glob("*.engine")) == ranks
    config = json.loads((engine / "config.json").read_text())
    assert config["pretrained_config"]["quantization"]["quant_algo"] == "FP8"
    assert config["pretrained_config"]["mapping"]["tp_size"] == tp
    assert manifest is not None
    assert manifest.world_size == tp * pp
    assert (manifest.max_input_len, manifest.max_seq_len, manifest.max_batch_size) == (32, 48, 8)
    assert manifest.versions["tensorrt_llm"] == "1.2.1"
    assert manifest.versions["tensorrt"] == "10.14.1.48"
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", *ranks} <= set(manifest.files)

    shown = build_runs.run("inspect", "--json", "engine.tar")
    assert shown.returncode == 0, shown.stderr
    described = json.loads(shown.stdout)
    assert described["world_size"] == tp * pp


def test_the_manifest_names_the_gpu(build_runs: BuildRuns) -> None:
    of_driver = driver(build_runs.directory / "driver")
    if of_driver is None:
        pytest.skip("the fake driver needs a C compiler")
    build_runs.environment |= of_driver
    build_runs.build(gpt())
    shown = build_runs.run("inspect", "--json", "--check-gpu", "engine.tar")
    assert shown.returncode == 0, shown.stderr
    described = json.loads(shown.stdout)
    assert (described["sm"], described["gpu_name"]) == ([90], "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(("tp", "pp"), RANKS)
def test_convert_and_build(build_runs: BuildRuns, tp: int, pp: int) -> None:
    build_runs.build(gpt(tp, pp))
    manifest = unpack(build_runs.directory / "engine.tar", build_runs.directory / "unpacked")
    assert manifest is not None
    assert manifest.world_size == tp * pp


@pytest.mark.full
def test_build_over_cog(build_runs: BuildRuns) -> None:
    """The builder's real server; its log tells what the scripts say."""
    assert build_runs.tree is not None
    config = {**llama(tp=2), "model_id": str(build_runs.directory / "tiny-llama")}
    builder = start_builder(build_runs.directory / "cog", **build_runs.tree.environment)
    try:
        wait_until(lambda: builder.health() == "READY")
        answer = predict(builder, config=yaml.safe_dump(config))
    finally:
        builder.close()
    assert answer["status"] == "succeeded", answer
    said = "[build] [TRT-LLM] [I] Serializing engine to engine/rank1.engine..."
    assert said in answer["logs"].splitlines()
    manifest = unpack(Path(answer["output"]), build_runs.directory / "unpacked")
    assert manifest is not None
    assert manifest.world_size == 2


def test_wrong_argument_is_refused_before_anything_runs(build_runs: BuildRuns) -> None:
    config = llama()
    config["convert_to_ft"]["args"]["dtpye"] = config["convert_to_ft"]["args"].pop("dtype")
    config["build"]["args"]["max_bach_size"] = 1
    config["quantize"]["args"]["qformat"] = "fp9"
    said = build_runs.refused(config).splitlines()
    assert said[0].startswith("E1303 UnknownArgument: convert_to_ft.args.dtpye: 'float16': ")
    assert "did you mean 'dtype'" in said[0]
    assert said[1].startswith("quantize.args.qformat: 'fp9': must be one of ")
    assert said[2].startswith("build.args.max_bach_size: 1: trtllm-build has no --max_bach_size")
    assert "max_batch_size" in said[2]
    assert not build_runs.steps("")


def test_engine_with_missing_ranks_is_refused(build_runs: BuildRuns) -> None:
    build_runs.environment["TENSORRT_LLM_TREE"] = "trtllm-build lose 1"
    error = build_runs.refused(gpt(tp=2))
    assert error.startswith("E2300 BuildStepFailed: ")
    assert "tp 2 x pp 1" in error
    assert "rank1.engine" in error


def test_checkpoint_with_missing_ranks_fails_the_next_step(build_runs: BuildRuns) -> None:
    build_runs.environment["TENSORRT_LLM_TREE"] = "convert_checkpoint.py lose 1"
    error = build_runs.refused(gpt(tp=2))
    assert error.startswith("E2300 BuildStepFailed: step build ended with exit code 1 (")
    assert "rank1.safetensors does not exist" in error


def test_world_size_that_differs_from_the_steps_is_refused(build_runs: BuildRuns) -> None:
    error = build_runs.refused({**gpt(tp=2), "world_size": 4})
    assert error.startswith("E1300 BuildConfigInvalid: ")
    assert "world_size 4: convert.args has tp_size 2" in error


def test_step_that_fails_silently_is_reported_with_exit_code(build_runs: BuildRuns) -> None:
    build_runs.environment["TENSORRT_LLM_TREE"] = "trtllm-build exit 137"
    error = build_runs.refused(gpt())
    assert error.startswith("E2300 BuildStepFailed: step build ended with exit code 137 (")
    assert "[TRT-LLM] [I] Serializing engine to engine/rank0.engine..." in error


def test_step_that_exceeds_its_timeout_is_stopped(build_runs: BuildRuns) -> None:
    build_runs.environment["TENSORRT_LLM_TREE"] = "quantize.py sleep 600"
    config = llama()
    config["quantize"]["timeout"] = 2
    error = build_runs.refused(config)
    assert error.startswith("E2301 BuildStepTimeout: step quantize ran longer than its timeout")
    assert "quantize.py sleeps" in error


def test_refit_replaces_the_weights(build_runs: BuildRuns) -> None:
    """A stripped engine and the checkpoint make the engine that was not stripped."""
    config = gpt()
    stripped = build_step("checkpoint", strip_plan=True)
    stripped["output_dir"] = stripped["args"]["output_dir"] = "stripped"
    refit = {
        "executable": "trtllm-refit",
        "output_dir": "engine",
        "args": {"engine_dir": "stripped", "checkpoint_dir": "checkpoint", "output_dir": "engine"},
    }
    build_runs.build({**config, "quantize": stripped, "build": refit})
    unpack(build_runs.directory / "engine.tar", build_runs.directory / "unpacked")
    engine = (build_runs.directory / "unpacked" / "rank0.engine").read_bytes()
    (checkpoint,) = build_runs.steps("checkpoint/rank0.safetensors")
    (without,) = build_runs.steps("stripped/rank0.engine")
    assert engine.endswith(checkpoint.read_bytes())
    assert not without.read_bytes().endswith(checkpoint.read_bytes())


def test_trtllm_dir_without_examples_is_refused(build_runs: BuildRuns) -> None:
    build_runs.environment["TRTLLM_DIR"] = str(build_runs.directory)
    error = build_runs.refused(gpt())
    assert error.startswith(f"E1005 InvalidArgument: TRTLLM_DIR='{build_runs.directory}'")


def test_missing_tensorrt_llm_says_how_to_install_it(build_runs: BuildRuns) -> None:
    build_runs.tree = None
    error = build_runs.refused(llama())
    assert error.startswith("E1302 UnknownScript: convert_to_ft: ")
    for name in ("TRTLLM_DIR", "COG_TRITON_STEP_PYTHON", "cog-triton-builder", "quantize: "):
        assert name in error


def test_legacy_quick_start_runs_unchanged_on_legacy_scripts(
    build_runs: BuildRuns, legacy_tree: Installation
) -> None:
    """Its own scripts are there, so nothing is translated; the model comes as a tar."""
    tar = packed(build_runs.directory / "tiny-gpt2", build_runs.directory / "model.tar")
    config = {**yaml.safe_load(TINY_GPT2), "model_tar_url": tar.as_uri()}
    build_runs.tree = legacy_tree
    said = build_runs.build(config)
    assert not [line for line in said if line.startswith("[translate]")]
    assert "[convert_to_ft] in_file: models/sshleifer/tiny-gpt2" in said
    assert len(build_runs.steps("c-model/gpt2/1-gpu/config.ini")) == 1
    assert len(build_runs.steps("engine_outputs/gpt_float16_tp1_rank0.engine")) == 1


def test_legacy_quick_start_runs_translated_on_todays_scripts(build_runs: BuildRuns) -> None:
    """The legacy scripts are not installed, so the config is translated and the changes printed."""
    models.gpt2(build_runs.directory / "sshleifer" / "tiny-gpt2")
    said = build_runs.build(yaml.safe_load(TINY_GPT2))
    assert "[translate] build: build.py -> trtllm-build" in said
    assert "[build] [TensorRT-LLM] TensorRT-LLM version: 1.2.1" in said
    manifest = unpack(build_runs.directory / "engine.tar", build_runs.directory / "unpacked")
    assert manifest is not None
    assert (manifest.model_id, manifest.world_size) == ("sshleifer/tiny-gpt2", 1)


def test_output_directory_chosen_by_a_script_is_found(
    build_runs: BuildRuns, legacy_tree: Installation
) -> None:
    """The config may name the argument's directory in place of the script's."""
    models.gpt2(build_runs.directory / "sshleifer" / "tiny-gpt2")
    build_runs.tree = legacy_tree
    changed = TINY_GPT2.replace("./c-model/gpt2/1-gpu", "./c-model/gpt2")
    said = build_runs.build(yaml.safe_load(changed))
    assert "[convert_to_ft] wrote c-model/gpt2/1-gpu" in said
