"""Reproducible images: equal source gives equal bytes, a change of it moves one layer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from factory import SYSTEM, Factory, Image, run, wheels

OURS = re.compile(
    r"-(cog-triton-(root|venv|wheels-\w+|source-\w+|prune)|ngc-\S+|tritonserver-\S+|layers\.json"
    r"|config\.json|image-\S+|cog-triton-\S+-image)\.drv$"
)


@pytest.mark.parametrize("name", ["cog-triton-runner-cpu", "cog-triton-runner-86"])
def test_a_second_build_gives_the_same_bytes(name: str, factory: Factory) -> None:
    factory.build(name)
    attribute = factory.attribute(f"packages.{SYSTEM}.{name}.drvPath")
    root = json.loads(factory.nix("eval", "--json", attribute))
    needed = run("nix-store", "--query", "--requisites", root).split()
    ours = [path for path in needed if OURS.search(path)]
    assert len(ours) > 15
    # --check builds once more and fails where a byte differs.
    run("nix-store", "--realise", "--check", *ours)


def test_a_source_change_moves_one_layer(factory: Factory) -> None:
    names = ["cog-triton-runner-86", "cog-triton-runner-cpu"]
    before = [factory.image(name) for name in names]
    module = factory.source / "cog_triton" / "text" / "stop_strings.py"
    module.write_text(module.read_text() + "\n# changed\n")
    revision = factory.commit("Change a module")
    try:
        after = [factory.image(name) for name in names]
    finally:
        factory.take_back()
    for old, new in zip(before, after, strict=True):
        assert new.labels["org.opencontainers.image.revision"] == revision
        assert new.env == old.env
        moved = {name for name in old.digests if old.digests[name] != new.digests[name]}
        assert moved == {"source"}
        (size,) = (
            layer["size"]
            for layer in new.about["layers"]
            if layer["digest"] == new.digests["source"]
        )
        assert size < 3_900_000  # uncompressed


def build(factory: Factory, directory: Path, call: str) -> Image:
    """What this function of our flake's `lib` makes in a flake of a user's own."""
    (directory / "flake.nix").write_text(
        "{\n"
        '  inputs.cog-triton.url = "git+file:///no/such/cog-triton";\n'
        "  outputs = { self, cog-triton }: {\n"
        f"    packages.x86_64-linux.default = cog-triton.lib.{call};\n"
        "  };\n"
        "}\n"
    )
    source = ["--override-input", "cog-triton", f"git+file://{factory.source}"]
    command = "build --no-link --print-out-paths"
    built = factory.nix(command, f"path:{directory}", *source, inputs="cog-triton/")
    return Image(Path(built.strip()))


def test_mk_model_makes_an_image_of_a_model(factory: Factory, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("tensorrt_llm: {args: {}}\n")
    model = build(
        factory,
        tmp_path,
        """x86_64-linux.mkModel {
          name = "mistral-7b";
          runner = cog-triton.packages.x86_64-linux.cog-triton-runner-86;
          weights = "https://example.com/engine.tar";
          systemPrompt = "You are a helpful assistant.";
          promptTemplate = "<s>[INST] {system_prompt} {prompt} [/INST]";
          serve = ./serve.yaml;
        }""",
    )
    runner = factory.image("cog-triton-runner-86")
    assert model.reference.startswith("mistral-7b:")
    assert model.env.items() >= runner.env.items()
    assert model.env["COG_WEIGHTS"] == "https://example.com/engine.tar"
    assert model.env["PROMPT_TEMPLATE"] == "<s>[INST] {system_prompt} {prompt} [/INST]"
    assert model.env["COG_TRITON_CONFIG"] == "/opt/cog-triton/serve.yaml"
    assert "STOP_SEQUENCES" not in model.env
    added = {name: digest for name, digest in model.digests.items() if name not in runner.digests}
    assert set(added) == {"model"}
    assert runner.digests.items() <= model.digests.items()


def test_an_unknown_architecture_is_refused(factory: Factory, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r'sm = "75": not an architecture .*80, 86, 89, 90'):
        build(factory, tmp_path, 'mkRunner { sm = "75"; }')


def test_mk_runner_makes_an_image_for_several_architectures(
    factory: Factory, tmp_path: Path
) -> None:
    several = build(factory, tmp_path, 'mkRunner { sm = [ "80" "89" ]; }')
    assert several.reference.startswith("cog-triton-runner-80-89:")
    assert several.env["COG_TRITON_SM"] == several.labels["cog-triton.sm"] == "80,89"
    assert several.labels["cog-triton.gpus"] == "A100, A30, L4, L40S, RTX 40"
    assert several.labels["cog-triton.fp8"] == "false"
    one = factory.image("cog-triton-runner-80")
    moved = {name for name in one.digests if one.digests[name] != several.digests[name]}
    assert moved == {"torch", "tensorrt_llm"}


def test_a_wheel_with_another_hash_is_refused(factory: Factory) -> None:
    table = factory.source / "nix" / "wheels.json"
    text = table.read_text()
    wheel = wheels("cog")["cog"]["hash"]
    table.write_text(text.replace(wheel, "sha256-" + "A" * 43 + "="))
    try:
        with pytest.raises(AssertionError, match=r"cog-0\.23\.1-py3-none-any\.whl: not in"):
            factory.build("cog-triton-runner-cpu")
    finally:
        table.write_text(text)
