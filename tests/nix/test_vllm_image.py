"""The vLLM images, built by the flake out of small wheels, and one of them run by docker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import small_wheels
from containers import Container, docker, running, wait_until
from factory import VERSION, Factory, Image, run
from vllm_engines import vllm_engine

SMS = ("86", "90", "120")
SITE = f"/opt/cog-triton/lib/python{VERSION}/site-packages"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Factory:
    """The flake, with small wheels in place of vLLM's."""
    directory = tmp_path_factory.mktemp("vllm")
    factory = Factory(directory)
    made = small_wheels.replace(factory.source, VERSION, directory / "small")
    run("nix-store", "--add-fixed", "sha256", *map(str, made))
    factory.commit("Small wheels")
    return factory


@pytest.fixture(scope="module")
def images(small: Factory) -> dict[str, Image]:
    """Images of some architectures, built."""
    return {sm: small.image(f"cog-triton-runner-vllm-{sm}") for sm in SMS}


@pytest.fixture(scope="module")
def listed(images: dict[str, Image]) -> dict[str, dict[str, dict[str, Any]]]:
    """Files of each image, by path below site-packages."""
    return {sm: dict(_files(image)) for sm, image in images.items()}


def _files(image: Image) -> Iterator[tuple[str, dict[str, Any]]]:
    for item in image.files():
        if item["path"].startswith(SITE):
            yield item["path"].removeprefix(f"{SITE}/"), item


def test_images_share_all_layers_but_pruned_ones(images: dict[str, Image]) -> None:
    digests = [image.digests for image in images.values()]
    names = ["base", "triton", "cuda", "torch", "vllm", "python", "wheels", "licences", "source"]
    assert [list(found) for found in digests] == [names] * len(SMS)
    for sm, image in images.items():
        assert image.env["COG_TRITON_SM"] == image.labels["cog-triton.sm"] == sm
    for name in names:
        different = len({found[name] for found in digests})
        assert different == (len(SMS) if name in ("torch", "vllm") else 1), name


def test_a_builder_has_all_packages_of_its_runner(small: Factory, images: dict[str, Image]) -> None:
    """What is sealed in it is for the same environment."""
    builder = small.image("cog-triton-builder-vllm-90")
    runner = images["90"]
    other = {name for name, digest in builder.digests.items() if runner.digests[name] != digest}
    assert other == {"source"}
    assert builder.about["config"]["Cmd"] == ["python", "-m", "cog_triton.serve", "--cog-only"]
    assert (builder.env["COG_MAX_CONCURRENCY"], builder.env["COG_TRITON_SM"]) == ("1", "90")
    kept = {name: it for name, it in runner.env.items() if name != "COG_MAX_CONCURRENCY"}
    assert kept.items() <= builder.env.items()


def test_sbom_has_every_wheel_and_says_which_are_pruned(images: dict[str, Image]) -> None:
    sbom = json.loads(run(str(images["90"].result), "sbom"))
    wheels = {item["name"]: item for item in sbom["packages"] if "packageFileName" in item}
    frozen = images["90"].labels["run.cog.pip_freeze"].split()
    assert {f"{name}=={item['versionInfo']}" for name, item in wheels.items()} == set(frozen)
    assert all("sourceInfo" in item for item in wheels.values())
    assert "sm_90" in wheels["torch"]["comment"]
    assert "comment" not in wheels["nvidia-cublas"]


def test_code_of_other_gpus_is_left_out_of_open_libraries(
    listed: dict[str, dict[str, dict[str, Any]]],
) -> None:
    flash_attention_3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
    blackwell, before = (
        f"triton/backends/nvidia/bin/{name}" for name in ("ptxas-blackwell", "ptxas")
    )
    kept = {
        sm: {path for path in (flash_attention_3, blackwell, before) if path in files}
        for sm, files in listed.items()
    }
    assert kept == {"86": {before}, "90": {before, flash_attention_3}, "120": {blackwell}}
    for path, different in (
        ("torch/lib/libtorch_cuda.so", len(SMS)),
        ("vllm/_C.abi3.so", len(SMS)),
        ("nvidia/cu13/lib/libcublas.so.13", 1),  # no open library: not pruned
    ):
        assert len({files[path]["sha256"] for files in listed.values()}) == different, path
    for files in listed.values():
        assert not {"vllm/vllm-rs", "torch/lib/libtorch_static.a"} & files.keys()


def test_no_file_is_in_two_layers(images: dict[str, Image]) -> None:
    for image in images.values():
        paths = [item["path"] for item in image.files()]
        assert len(paths) == len(set(paths))


@pytest.fixture(scope="module")
def server(
    images: dict[str, Image], docker_host: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Container]:
    """The image for an H100, serving a directory with model.json through the double of vLLM."""
    directory = vllm_engine(tmp_path_factory.mktemp("engine") / "model")
    directory.parent.chmod(0o755)
    images["90"].load()
    options = [f"--volume={directory}:/model:ro", "--read-only", "--tmpfs=/tmp"]
    options.append("--volume=/opt/cog-triton/work")
    environment = {"COG_WEIGHTS": "/model", "COG_TRITON_SM": ""}
    with running(images["90"].reference, *options, **environment) as container:
        container.wait_until_ready()
        yield container


def test_it_serves_through_vllm(server: Container) -> None:
    answer = server.predict(prompt="What is Triton?", max_tokens=8, temperature=0)
    assert answer["status"] == "succeeded", answer
    assert "".join(answer["output"])


def test_it_refuses_to_start_without_its_gpu(server: Container, images: dict[str, Image]) -> None:
    with running(images["90"].reference) as container:
        wait_until(lambda: container.health().get("status") == "SETUP_FAILED", 60)
        assert re.search(r"E1305 EngineIncompatible: .*sm_90", container.logs())


def test_it_has_a_compiler_for_the_launchers_of_kernels(server: Container) -> None:
    work = "/opt/cog-triton/work"
    script = (
        f"cd {work} && echo 'int answer(void) {{ return 42; }}' >a.c && $CC -shared -o a.so a.c"
    )
    docker("exec", server.id, "bash", "-c", script)
    load = f"import ctypes; print(ctypes.CDLL('{work}/a.so').answer())"
    assert docker("exec", server.id, "python", "-c", load) == "42\n"
