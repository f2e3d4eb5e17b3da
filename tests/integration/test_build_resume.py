"""Build resumption: finished steps and downloads are not repeated after a kill."""

from __future__ import annotations

import threading

import pytest
from build_runs import BuildRuns, gpt, llama, packed
from range_server import Content, Span, serving_file
from stack import wait_until

from cog_triton.artifact.engine_tar import unpack
from cog_triton.download.partial_file import PIECE

pytestmark = pytest.mark.integration


def test_second_build_runs_no_step(build_runs: BuildRuns) -> None:
    build_runs.build(gpt())
    said = build_runs.build(gpt())
    assert [line for line in said if "already" in line] == [
        "[convert] already done",
        "[build] already done",
        "[engine] already done",
        "[package] engine.tar is already written",
    ]
    assert not [line for line in said if "TensorRT-LLM version" in line]


def test_changed_limits_rerun_only_the_build_step(build_runs: BuildRuns) -> None:
    build_runs.build(gpt())
    said = build_runs.build(gpt(max_batch_size=2), tar="other.tar")
    assert "[convert] already done" in said
    assert [line for line in said if "version: 1.2.1" in line and line.startswith("[build]")]
    assert len(build_runs.steps("checkpoint/rank0.safetensors")) == 1
    manifest = unpack(build_runs.directory / "other.tar", build_runs.directory / "unpacked")
    assert manifest is not None
    assert manifest.max_batch_size == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("step", "half", "resumed"),
    [
        ("convert_checkpoint.py", "checkpoint/rank0.safetensors", []),
        ("quantize.py", "quantized/rank0.safetensors", ["convert_to_ft"]),
        ("trtllm-build", "engine/rank0.engine", ["convert_to_ft", "quantize"]),
    ],
)
def test_killed_build_resumes(
    build_runs: BuildRuns, step: str, half: str, resumed: list[str]
) -> None:
    """Killed where the first of two ranks is written: that step runs again, and no other."""
    config = llama(tp=2)
    build_runs.build(config, "--work-dir", "undisturbed", tar="whole.tar")
    build_runs.environment["TENSORRT_LLM_TREE"] = f"{step} sleep 600"
    with build_runs.killed(config):
        wait_until(lambda: build_runs.steps(half))
    del build_runs.environment["TENSORRT_LLM_TREE"]
    assert not (build_runs.directory / "engine.tar").exists()
    said = build_runs.build(config)
    assert [line for line in said if "already" in line] == [f"[{n}] already done" for n in resumed]
    tars = [build_runs.directory / name for name in ("engine.tar", "whole.tar")]
    assert tars[0].read_bytes() == tars[1].read_bytes()


@pytest.mark.full
def test_build_killed_while_downloading_resumes(build_runs: BuildRuns) -> None:
    """What is here of the model is not fetched again."""
    model = build_runs.directory / "tiny-llama"
    (model / "filler.bin").write_bytes(bytes(2 * PIECE))
    data = packed(model, build_runs.directory / "model.tar").read_bytes()
    released = threading.Event()

    def only_the_first_piece(_: int, span: Span | None) -> None:
        if span and span[0]:
            released.wait()

    with serving_file(Content.of(data), only_the_first_piece) as server:
        config = llama(model_tar_url=f"{server.url}/model.tar")
        store = build_runs.directory / "work"
        with build_runs.killed(config):
            wait_until(lambda: "\n0\n" in "".join(j.read_text() for j in store.rglob("*.journal")))
        released.set()
        asked = len(server.requests)
        build_runs.build(config)
        again = server.requests[asked:]
        assert [span for span in again if span and span[0] >= PIECE]
        assert not [span for span in again if span is None or (span[0] < PIECE and span != (0, 1))]
        build_runs.build(config, "--work-dir", "undisturbed", tar="whole.tar")
    tars = [build_runs.directory / name for name in ("engine.tar", "whole.tar")]
    assert tars[0].read_bytes() == tars[1].read_bytes()
