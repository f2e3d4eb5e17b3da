"""Smoke test: an image builds an engine from a config fetched over HTTP, and serves it.

    LOCAL_TEST=true COG_TRITON_IMAGE=<image> python3 -m pytest tests/smoke

COG_TRITON_IMAGE builds; COG_TRITON_RUNNER_IMAGE serves, by default the same image, which the
CPU image can do. SMOKE_CONFIG is the build config, by default the CPU's demo model.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from containers import docker, running
from http_replies import while_serving

CONFIG = Path(__file__).parents[2] / "configs" / "build" / "smollm2-135m-cpu.yaml"

pytestmark = pytest.mark.skipif(
    os.environ.get("LOCAL_TEST") != "true", reason="needs LOCAL_TEST=true and COG_TRITON_IMAGE"
)


@pytest.fixture(scope="module")
def builder() -> str:
    """The image under test."""
    image = os.environ.get("COG_TRITON_IMAGE")
    assert image, "COG_TRITON_IMAGE: the image to test, such as cog-triton-runner-cpu:TAG"
    return image


@pytest.fixture(scope="module")
def config_url() -> Iterator[str]:
    """URL of the build config."""
    config = Path(os.environ.get("SMOKE_CONFIG", CONFIG)).resolve()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=config.parent)
    with while_serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as url:
        yield f"{url}/{config.name}"


def options_of(image: str) -> tuple[list[str], bool]:
    """Docker options for an image, and whether it is the CPU image."""
    (about,) = json.loads(docker("image", "inspect", image))
    is_cpu = about["Config"]["Labels"]["cog-triton.sm"] == "cpu"
    return ([] if is_cpu else ["--gpus=all", "--shm-size=20g", "--ulimit=memlock=-1"]), is_cpu


def test_build_and_predict(builder: str, config_url: str, tmp_path: Path) -> None:
    options, is_cpu = options_of(builder)
    if is_cpu:
        options += ["--workdir=/src/builder", "--env=COG_TRITON_OUTPUT_DIR=/src"]
        options.append("--env=COG_MAX_CONCURRENCY=1")
    with running(builder, *options) as container:
        container.wait_until_ready()
        built = container.predict(timeout=3600, config=config_url)
        assert built["status"] == "succeeded", built
        assert built["output"] == "/src/engine.tar"
        docker("cp", f"{container.id}:/src/engine.tar", str(tmp_path))
    engine = tmp_path / "engine.tar"

    runner = os.environ.get("COG_TRITON_RUNNER_IMAGE", builder)
    mounted = f"--volume={engine}:/src/engine.tar:ro"
    options = [*options_of(runner)[0], mounted, "--env=COG_WEIGHTS=/src/engine.tar"]
    with running(runner, *options) as container:
        container.wait_until_ready(600)
        question = "What is the capital of France?"
        events = list(container.stream(prompt=question, temperature=0, max_tokens=16))
    text = "".join(data["chunk"] for event, data, _ in events if event == "output")
    assert "Paris" in text
    assert events[-1][1]["status"] == "succeeded"
