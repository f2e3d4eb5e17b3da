"""Engines of TensorRT-LLM from config to tar, its scripts being the look-alike's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from legacy_configs import TINY_GPT2
from stack import wait_until
from tensorrt_llm_tree import Installation, driver, models
from test_builder_predictions import predict, start_builder
from workshop import Workshop, build_step, gpt, llama, packed

from cog_triton.artifact.engine_tar import unpack

pytestmark = pytest.mark.integration

RANKS = [(1, 1), (2, 1), (1, 2)]


@pytest.mark.parametrize(("tp", "pp"), RANKS)
def test_convert_quantize_and_build(workshop: Workshop, tp: int, pp: int) -> None:
    said = workshop.build(llama(tp, pp))
    assert [line.split("] ")[1] for line in said if line.startswith("[check]")] == [
        "convert_to_ft: OK: the arguments are what convert_checkpoint.py accepts",
        "quantize: OK: the arguments are what quantize.py accepts",
        "build: OK: the arguments are what trtllm-build accepts",
    ]
    assert "[build] [TensorRT-LLM] TensorRT-LLM version: 1.2.1" in said
    engine = workshop.directory / "unpacked"
    manifest = unpack(workshop.directory / "engine.tar", engine).manifest
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

    shown = workshop.run("inspect", "--json", "engine.tar")
    assert shown.returncode == 0, shown.stderr
    described = json.loads(shown.stdout)
    assert described["world_size"] == tp * pp


def test_the_manifest_names_the_gpu(workshop: Workshop) -> None:
    of_driver = driver(workshop.directory / "driver")
    if of_driver is None:
        pytest.skip("the driver's look-alike needs a C compiler")
    workshop.environment |= of_driver
    workshop.build(gpt())
    shown = workshop.run("inspect", "--json", "--check-gpu", "engine.tar")
    assert shown.returncode == 0, shown.stderr
    described = json.loads(shown.stdout)
    assert (described["sm"], described["gpu_name"]) == ([90], "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(("tp", "pp"), RANKS)
def test_convert_and_build(workshop: Workshop, tp: int, pp: int) -> None:
    workshop.build(gpt(tp, pp))
    manifest = unpack(workshop.directory / "engine.tar", workshop.directory / "unpacked").manifest
    assert manifest is not None
    assert manifest.world_size == tp * pp


def test_over_cog(workshop: Workshop) -> None:
    """The builder's real server; its log tells what the scripts say."""
    assert workshop.tree is not None
    config = {**llama(tp=2), "model_id": str(workshop.directory / "tiny-llama")}
    builder = start_builder(workshop.directory / "cog", **workshop.tree.environment)
    try:
        wait_until(lambda: builder.health() == "READY")
        answer = predict(builder, config=yaml.safe_dump(config))
    finally:
        builder.close()
    assert answer["status"] == "succeeded", answer
    said = "[build] [TRT-LLM] [I] Serializing engine to engine/rank1.engine..."
    assert said in answer["logs"].splitlines()
    manifest = unpack(Path(answer["output"]), workshop.directory / "unpacked").manifest
    assert manifest is not None
    assert manifest.world_size == 2


def test_a_wrong_argument_is_refused_before_anything_runs(workshop: Workshop) -> None:
    config = llama()
    config["convert_to_ft"]["args"]["dtpye"] = config["convert_to_ft"]["args"].pop("dtype")
    config["build"]["args"]["max_bach_size"] = 1
    config["quantize"]["args"]["qformat"] = "fp9"
    said = workshop.refused(config).splitlines()
    assert said[0].startswith("E1303 UnknownArgument: convert_to_ft.args.dtpye: 'float16': ")
    assert "did you mean 'dtype'" in said[0]
    assert said[1].startswith("quantize.args.qformat: 'fp9': must be one of ")
    assert said[2].startswith("build.args.max_bach_size: 1: trtllm-build has no --max_bach_size")
    assert "max_batch_size" in said[2]
    assert not workshop.work_of(config).exists()


def test_an_engine_without_all_ranks_is_refused(workshop: Workshop) -> None:
    workshop.environment["TENSORRT_LLM_TREE"] = "trtllm-build lose 1"
    error = workshop.refused(gpt(tp=2))
    assert error.startswith("E2300 BuildStepFailed: ")
    assert "tp 2 x pp 1" in error
    assert "rank1.engine" in error


def test_a_checkpoint_without_all_ranks_stops_the_next_step(workshop: Workshop) -> None:
    workshop.environment["TENSORRT_LLM_TREE"] = "convert_checkpoint.py lose 1"
    error = workshop.refused(gpt(tp=2))
    assert error.startswith("E2300 BuildStepFailed: step build ended with exit code 1:")
    assert "rank1.safetensors does not exist" in error


def test_a_world_size_that_the_steps_do_not_make_is_refused(workshop: Workshop) -> None:
    error = workshop.refused({**gpt(tp=2), "world_size": 4})
    assert error.startswith("E1300 BuildConfigInvalid: ")
    assert "world_size 4: convert.args has tp_size 2" in error


def test_a_step_that_dies_without_a_word(workshop: Workshop) -> None:
    workshop.environment["TENSORRT_LLM_TREE"] = "trtllm-build exit 137"
    error = workshop.refused(gpt())
    assert error.startswith("E2300 BuildStepFailed: step build ended with exit code 137:")
    assert "[TRT-LLM] [I] Serializing engine to engine/rank0.engine..." in error


def test_a_step_that_does_not_end_in_time(workshop: Workshop) -> None:
    workshop.environment["TENSORRT_LLM_TREE"] = "quantize.py sleep 600"
    config = llama()
    config["quantize"]["timeout"] = 2
    error = workshop.refused(config)
    assert error.startswith("E2301 BuildStepTimeout: step quantize ran longer than its timeout")
    assert "quantize.py sleeps" in error


def test_refit_gives_an_engine_other_weights(workshop: Workshop) -> None:
    """A stripped engine and the checkpoint make the engine that was not stripped."""
    config = gpt()
    stripped = build_step("checkpoint", strip_plan=True)
    stripped["output_dir"] = stripped["args"]["output_dir"] = "stripped"
    refit = {
        "executable": "trtllm-refit",
        "output_dir": "engine",
        "args": {"engine_dir": "stripped", "checkpoint_dir": "checkpoint", "output_dir": "engine"},
    }
    workshop.build({**config, "quantize": stripped, "build": refit})
    unpack(workshop.directory / "engine.tar", workshop.directory / "unpacked")
    engine = (workshop.directory / "unpacked" / "rank0.engine").read_bytes()
    work = workshop.work_of({**config, "quantize": stripped, "build": refit})
    weights = (work / "checkpoint" / "rank0.safetensors").read_bytes()
    assert engine.endswith(weights)
    assert not (work / "stripped" / "rank0.engine").read_bytes().endswith(weights)


def test_a_directory_without_examples_is_no_tensorrt_llm(workshop: Workshop) -> None:
    workshop.environment["TRTLLM_DIR"] = str(workshop.directory)
    error = workshop.refused(gpt())
    assert error.startswith(f"E1005 InvalidArgument: TRTLLM_DIR='{workshop.directory}'")


def test_a_machine_without_tensorrt_llm_is_told_what_to_do(workshop: Workshop) -> None:
    workshop.tree = None
    error = workshop.refused(llama())
    assert error.startswith("E1302 UnknownScript: convert_to_ft: ")
    for name in ("TRTLLM_DIR", "COG_TRITON_STEP_PYTHON", "cog-triton-builder", "quantize: "):
        assert name in error


def test_the_quick_start_of_the_older_builder_runs_as_it_is(
    workshop: Workshop, old_tree: Installation
) -> None:
    """Its own scripts are there, so nothing is translated; the model comes as a tar."""
    tar = packed(workshop.directory / "tiny-gpt2", workshop.directory / "model.tar")
    config = {**yaml.safe_load(TINY_GPT2), "model_tar_url": tar.as_uri()}
    workshop.tree = old_tree
    said = workshop.build(config)
    assert not [line for line in said if line.startswith("[translate]")]
    assert "[convert_to_ft] in_file: model" in said
    work = workshop.work_of(config)
    assert (work / "c-model" / "gpt2" / "1-gpu" / "config.ini").is_file()
    assert (work / "engine_outputs" / "gpt_float16_tp1_rank0.engine").is_file()


def test_the_quick_start_of_the_older_builder_runs_on_newer_scripts(workshop: Workshop) -> None:
    """They are not there any more, so it is translated, and says so."""
    models.gpt2(workshop.directory / "sshleifer" / "tiny-gpt2")
    said = workshop.build(yaml.safe_load(TINY_GPT2))
    assert "[translate] build: build.py -> trtllm-build" in said
    assert "[build] [TensorRT-LLM] TensorRT-LLM version: 1.2.1" in said
    manifest = unpack(workshop.directory / "engine.tar", workshop.directory / "unpacked").manifest
    assert manifest is not None
    assert (manifest.model_id, manifest.world_size) == ("sshleifer/tiny-gpt2", 1)


def test_a_directory_that_a_script_chooses_is_found(
    workshop: Workshop, old_tree: Installation
) -> None:
    """Whoever names the argument's directory, and not the script's, gets the engine too."""
    models.gpt2(workshop.directory / "sshleifer" / "tiny-gpt2")
    workshop.tree = old_tree
    changed = TINY_GPT2.replace("./c-model/gpt2/1-gpu", "./c-model/gpt2")
    said = workshop.build(yaml.safe_load(changed))
    assert "[convert_to_ft] wrote c-model/gpt2/1-gpu" in said
