"""Outputs of the flake: images, their configuration, labels and shared layers."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from containers import docker
from factory import SYSTEM, VERSION, Factory, Image, run

SMS = ("80", "86", "89", "90", "100", "103", "120")
RUNNERS = [f"cog-triton-runner-{sm}" for sm in SMS]
NAMES = ["cog-triton-builder", *RUNNERS, "cog-triton-runner-cpu"]
VLLM = [f"cog-triton-{kind}-vllm-{sm}" for kind in ("runner", "builder") for sm in SMS]
"""See test_vllm_image.py."""
SHARED = {"os", "python", "cuda", "tensorrt", "triton", "wheels", "licences", "source"}
PRUNED = {"torch", "tensorrt_llm"}


@pytest.fixture(scope="module")
def images(factory: Factory) -> dict[str, Image]:
    """All images, built."""
    return {name: factory.image(name) for name in NAMES}


def test_flake_has_the_documented_packages(factory: Factory) -> None:
    shown = json.loads(factory.nix("flake show", "--json", f"git+file://{factory.source}"))
    assert set(shown["packages"][SYSTEM]) == {*NAMES, *VLLM, "default"}
    assert set(shown["apps"][SYSTEM]) == {*NAMES, *VLLM, "update-pins"}
    assert set(shown["devShells"][SYSTEM]) == {"default"}
    assert {"formatter", "checks", "lib"} <= set(shown)


def test_flake_check(factory: Factory) -> None:
    factory.nix("flake check", "--no-build", f"git+file://{factory.source}")


@pytest.mark.parametrize("name", NAMES)
def test_configuration_of_an_image(name: str, factory: Factory, images: dict[str, Image]) -> None:
    image, builder, cpu = images[name], name == "cog-triton-builder", name.endswith("cpu")
    config, env = image.about["config"], image.env
    site = f"/opt/cog-triton/lib/python{VERSION if cpu else '3.12'}/site-packages"
    reaper = ["/opt/cog-triton/bin/python", "-S", "-I", f"{site}/cog_triton/system/reaper.py", "--"]
    assert config["Entrypoint"] == reaper
    assert config["Cmd"] == ["python", "-m", "cog_triton.serve", *["--cog-only"] * builder]
    assert (config["WorkingDir"], config["User"]) == ("/src", "1000:1000")
    assert set(config["ExposedPorts"]) == {"5000/tcp", "8000/tcp"}
    assert env["COG_HOST"] == "0.0.0.0"
    assert not {"TRITON_HOST", "OPENAI_PORT", "PYTHONPATH"} & env.keys()
    assert env["COG_MAX_CONCURRENCY"] == ("1" if builder else "500")
    assert image.labels["org.opencontainers.image.revision"] == factory.revision
    assert factory.revision[:40] not in json.dumps([image.about["layers"], env])
    layers = [layer["created_by"] for layer in image.about["layers"]]
    assert layers[-3:] == [f"cog-triton: {name}" for name in ("wheels", "licences", "source")]
    assert all(layer["comment"] for layer in image.about["layers"])
    assert all(layer["size"] < 8_000_000_000 for layer in image.about["layers"])
    paths = env["PATH"].split(":")
    assert paths[0] == "/opt/cog-triton/bin"
    if not cpu:
        assert env["TRITONSERVER"] == "/opt/tritonserver/bin/tritonserver"
        assert (env["NVIDIA_VISIBLE_DEVICES"], env["OPAL_PREFIX"]) == ("all", "/opt/hpcx/ompi")
        # Without our own bin, the first python3 is TensorRT-LLM's.
        assert paths[1] == "/opt/venv-tritonserver/bin"
        assert env["LD_LIBRARY_PATH"].split(":")[0] == "/usr/local/tensorrt/lib"
    theirs = "/opt/venv-tritonserver/bin/python3"
    assert env.get("COG_TRITON_STEP_PYTHON") == (theirs if builder else None)


@pytest.mark.parametrize("sm", SMS)
def test_labels_of_a_runner(sm: str, images: dict[str, Image]) -> None:
    image = images[f"cog-triton-runner-{sm}"]
    assert image.env["COG_TRITON_SM"] == image.labels["cog-triton.sm"] == sm
    assert image.labels["cog-triton.tensorrt_llm"] == "1.2.1"
    assert image.labels["cog-triton.tensorrt"] == "10.14.1.48"
    assert image.labels["cog-triton.cuda"] == "13.1"
    assert image.labels["cog-triton.driver"] == ">=590.44"
    assert image.labels["cog-triton.fp8"] == ("false" if sm in ("80", "86") else "true")
    assert image.labels["cog-triton.fp4"] == ("true" if int(sm) >= 100 else "false")


def test_runners_share_all_layers_but_pruned_ones(images: dict[str, Image]) -> None:
    runners = [images[name].digests for name in RUNNERS]
    for digests in runners:
        assert digests.keys() == SHARED | PRUNED
    for layer in SHARED:
        assert len({digests[layer] for digests in runners}) == 1, layer
    for layer in PRUNED:
        assert len({digests[layer] for digests in runners}) == len(SMS), layer


Files = dict[str, tarfile.TarInfo]


@pytest.fixture(scope="module")
def files(images: dict[str, Image], docker_host: str) -> Callable[[str], Files]:
    """Files of an image as docker exports them, by name without a leading slash."""
    known: dict[str, Files] = {}

    def files_of(name: str) -> Files:
        if name not in known:
            image = images[name]
            assert image.reference in image.load()
            known[name] = dict(_exported(image.reference))
        return known[name]

    return files_of


def _exported(reference: str) -> Iterator[tuple[str, tarfile.TarInfo]]:
    identity = docker("create", reference).strip()
    with (
        subprocess.Popen(["docker", "export", identity], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for item in archive:
            item.mode &= 0o7777
            yield item.name.rstrip("/"), item
    docker("rm", identity)


def test_layout_of_ubuntu_is_kept(files: Callable[[str], Files]) -> None:
    found = files("cog-triton-runner-86")
    for name in ("bin", "sbin", "lib", "lib64"):
        assert found[name].issym(), name
        assert found[name].linkname == f"usr/{name}"
    assert found["usr/local/cuda"].linkname == "cuda-13.1"
    made_by_docker = {".dockerenv", "dev", "proc", "sys", "etc"}
    ngc = {"bin", "sbin", "lib", "lib64", "usr", "etc", "tmp", "var", "root", "opt", "app"}
    assert {name.split("/")[0] for name in found} <= ngc | made_by_docker | {"src"}
    ours = {name for name in found if name.startswith(("src/", "opt/cog-triton/"))}
    assert {
        "src/predict.py",
        "src/.cog/openapi_schema.json",
        "opt/cog-triton/bin/cog-triton",
    } <= ours


def test_only_documented_directories_are_writable(files: Callable[[str], Files]) -> None:
    for name in ("cog-triton-runner-86", "cog-triton-runner-cpu"):
        found = files(name)
        for directory in ("tmp", "var/tmp", "src", "opt/cog-triton/work"):
            assert found[directory].mode == 0o1777, f"{name}: {directory}"
        writable = {
            path
            for path, item in found.items()
            if item.mode & 0o002 and not item.issym() and not path.startswith("dev")
        }
        assert writable == {"tmp", "var/tmp", "src", "opt/cog-triton/work"}


STATIC = "usr/local/cuda-13.1/lib64/libcudart_static.a"
SITE = "opt/venv-tritonserver/lib/python3.12/site-packages"
HEADERS = {"usr/include/x.h", "usr/local/cuda-13.1/include/cuda.h", f"{SITE}/torch/include/torch.h"}
RESOURCES = {
    f"usr/local/TensorRT-10.14.1.48/lib/libnvinfer_builder_resource_{which}.so.10.14.1"
    for which in ("sm80", "sm86", "sm90", "ptx")
}


def test_unneeded_files_are_left_out(files: Callable[[str], Files]) -> None:
    runner, builder = files("cog-triton-runner-86").keys(), files("cog-triton-builder").keys()
    for found in (runner, builder):
        assert not {STATIC, "root/.cache/pip/x", "var/cache/apt/x", "usr/share/man/page"} & found
        assert {"usr/share/doc/libc6/copyright", f"{SITE}/torch-2.10.dist-info/LICENSE"} <= found
        assert "usr/share/doc/libc6/changelog" not in found
        assert f"{SITE}/transformers/model.py" in found
        assert "usr/local/TensorRT-10.14.1.48/doc/Acknowledgements.txt" in found
        assert f"{SITE}/tensorrt_llm/include/fp8_gemm.cuh" in found  # read by its JIT compiler
    assert not (HEADERS | RESOURCES | {"app/examples/build.py"}) & runner
    assert HEADERS | RESOURCES | {"app/examples/build.py"} <= builder


@pytest.mark.parametrize("name", ["cog-triton-runner-86", "cog-triton-builder"])
def test_variables_name_only_files_of_the_image(
    name: str, images: dict[str, Image], files: Callable[[str], Files]
) -> None:
    found = files(name)
    links = {path: item.linkname for path, item in found.items() if item.issym()}
    searched = {"PATH", "LD_LIBRARY_PATH"}
    given = {key: text for key, text in images[name].env.items() if text.startswith("/")}
    assert "CUDA_HOME" in given
    for key in given.keys() - searched:
        path = given[key].strip("/")
        for link in ("usr/local/cuda", "usr/local/tensorrt"):
            if path.startswith(f"{link}/"):
                path = path.replace(link, f"usr/local/{links[link]}", 1)
        assert path in found, key
    assert ("TRITON_PTXAS_PATH" in given) == (name == "cog-triton-builder")
    assert ("/usr/local/cuda/bin" in given["PATH"].split(":")) == (name == "cog-triton-builder")


@pytest.mark.parametrize("sm", ["80", "90", "103"])
def test_a_runner_has_device_code_of_its_own_gpu_only(
    sm: str, images: dict[str, Image], files: Callable[[str], Files], tmp_path: Path
) -> None:
    libraries = (
        "torch/lib/libtorch_cuda.so",
        "tensorrt_llm/libs/libtensorrt_llm.so",
        "transformer_engine/libtransformer_engine.so",
    )
    for name, own in ((f"cog-triton-runner-{sm}", {f"sm_{sm}"}), ("cog-triton-builder", ALL)):
        files(name)
        identity = docker("create", images[name].reference).strip()
        for library in libraries:
            docker("cp", f"{identity}:/{SITE}/{library}", str(tmp_path))
            found = tmp_path / Path(library).name
            assert device_code(found, sm, "found") == own, f"{name}: {library}"
            # Of embedded cubins stay all of its major version, up to its own number.
            embedded = {f"sm_{older}" for older in SMS if sm[:-1] == older[:-1] and older <= sm}
            expected = embedded if name.endswith(sm) else ALL
            assert device_code(found, sm, "embedded") == expected, f"{name}: {library}"
        docker("rm", identity)


ALL = {"sm_75", *(f"sm_{sm}" for sm in SMS)}


def device_code(library: Path, sm: str, where: str) -> set[str]:
    """Architectures that `cog-triton prune` finds in a library: in fat binaries, or embedded."""
    command = [sys.executable, "-m", "cog_triton", "prune", "--sm", sm, "--dry-run", "--json"]
    (row,) = json.loads(run(*command, str(library)))["files"]
    return set(row[where])


def test_image_command_refuses_a_terminal_and_unknown_words(images: dict[str, Image]) -> None:
    result = images["cog-triton-runner-90"].result
    assert "./result push REF" in run(str(result), "--help")
    leader, follower = pty.openpty()
    done = subprocess.run([result], stdout=follower, stderr=subprocess.PIPE, text=True)
    os.close(follower)
    os.close(leader)
    assert (done.returncode, done.stderr) == (64, "An image is no text; try: ./result load\n")
    done = subprocess.run([result, "lode"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("unknown: lode\n")


def test_streamed_image_has_the_layers(images: dict[str, Image], docker_host: str) -> None:
    image = images["cog-triton-runner-cpu"]
    with subprocess.Popen([image.result], stdout=subprocess.PIPE) as stream:
        said = run("docker", "load", stdin=stream.stdout)
    assert (stream.returncode, said) == (0, f"Loaded image: {image.reference}\n")
    (about,) = json.loads(docker("image", "inspect", image.reference))
    assert about["RootFS"]["Layers"] == [layer["digest"] for layer in image.about["layers"]]
    assert about["Config"]["Labels"] == image.labels
    assert about["Architecture"] == "amd64"
