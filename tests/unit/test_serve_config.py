"""Serve config: parsed, or refused with file, path and nearest key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cog_triton.errors import InvalidPredictorConfig
from cog_triton.triton.serve_config import MODELS, ServeConfig, find_serve_config, load_serve_config

SCALARS = st.none() | st.booleans() | st.integers() | st.text("abc :#'\"{}[]\n0123")
ARGUMENTS = st.dictionaries(st.text("abc_", min_size=1), SCALARS)
CONFIGS = st.dictionaries(st.sampled_from(MODELS), ARGUMENTS)


def load(directory: Path, text: str) -> ServeConfig:
    path = directory / "serve.yaml"
    path.write_text(text, "utf-8")
    return load_serve_config(path)


def refusal(directory: Path, text: str) -> str:
    with pytest.raises(InvalidPredictorConfig) as caught:
        load(directory, text)
    assert "serve.yaml" in caught.value.detail
    return caught.value.detail


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CONFIGS, st.sampled_from([(), ("server",), ("instantiate", "server")]))
def test_each_model_gets_its_arguments(
    tmp_path: Path, config: dict[str, dict[str, Any]], around: tuple[str, ...]
) -> None:
    document: Any = {model: {"args": arguments} for model, arguments in config.items()}
    for key in reversed(around):
        document = {key: document}
    loaded = load(tmp_path, yaml.safe_dump(document))
    assert {model: loaded.arguments_of(model) for model in MODELS} == {
        m: config.get(m, {}) for m in MODELS
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "instantiate:",
        "tensorrt_llm: {args: }",
        "instantiate: {server: {tensorrt_llm: }}",
    ],
)
def test_empty_configs_have_no_arguments(text: str, tmp_path: Path) -> None:
    config = load(tmp_path, text)
    assert all(config.arguments_of(model) == {} for model in MODELS)


# As configs/example_official_model_config.yaml of the seed, which deployment tools read, too.
OFFICIAL = """
build: {version: 1a40, config: models/mistral/build_config.yaml}
instantiate:
  base_model: r8.im/cog-triton@sha256:4c42
  staging_dest: r8.im/staging
  weights: https://example.com/engine.tar
  system_prompt: You are helpful.
  prompt_template: <s>[INST] {system_prompt} {prompt} [/INST]
"""


@pytest.mark.parametrize("server", ["", "  server: {tensorrt_llm: {args: {decoupled_mode: True}}}"])
def test_deployment_keys_warn_and_are_ignored(
    server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load(tmp_path, OFFICIAL + server)
    assert config.arguments_of("tensorrt_llm") == ({"decoupled_mode": True} if server else {})
    said = caplog.text
    for key, variable in (
        ("weights", "COG_WEIGHTS"),
        ("system_prompt", "SYSTEM_PROMPT"),
        ("prompt_template", "PROMPT_TEMPLATE"),
    ):
        assert f"instantiate.{key} is not read: set {variable}" in said


@pytest.mark.parametrize(
    "text",
    ["a: [", "a: \x00", "!!python/object:os.system {}", "[1]: 2"],
)
def test_invalid_yaml_is_reported(text: str, tmp_path: Path) -> None:
    assert "not valid YAML" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[]", "the file"),
        ("instantiate: {server: [1]}", "instantiate.server"),
        ("instantiate: {server: {ensemble: x}}", "instantiate.server.ensemble"),
        ("ensemble: {args: [1]}", "ensemble.args"),
    ],
)
def test_non_mappings_are_rejected(text: str, where: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, text)
    assert f" {where}: " in said
    assert "is not a mapping" in said


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("tensorrt-llm: {}", "did you mean 'tensorrt_llm'"),
        ("instantiate: {server: {preprocesing: {}}}", "did you mean 'preprocessing'"),
        ("tensorrt_llm: {arg: {}}", "did you mean 'args'"),
        ("instantiate: {server: {}}\nother: 1", "'other'"),
        ("instantiate: {sistem_prompt: x}", "did you mean 'system_prompt'"),
        ("tensorrt_llm: {true: 1}", "unknown key True"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_key(
    text: str, hint: str, tmp_path: Path
) -> None:
    said = refusal(tmp_path, text)
    assert "unknown key" in said
    assert hint in said


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("instantiate: {server: {tensorrt_llm: {args: {a: 1}}}}", {"a": 1}),
        ("build: {}\ninstantiate: {base_model: x}", {}),
        ("tensorrt_llm: {args: {a: 1}}", {}),
        ("model: {id: gpt2}", {}),
        ("[", {}),
        (None, {}),
    ],
)
def test_config_yaml_is_the_default_where_it_is_one_of_the_originals(
    text: str | None, found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    assert find_serve_config(None).arguments_of("tensorrt_llm") == found
    named = tmp_path / "named.yaml"
    named.write_text("tensorrt_llm: {args: {b: 2}}")
    assert find_serve_config(named).arguments_of("tensorrt_llm") == {"b": 2}


def test_adapters_are_named_beside_the_models(tmp_path: Path) -> None:
    text = "lora_adapters: {sql: ./sql, poems: org/poems}\ntensorrt_llm: {args: {tps: 1}}"
    loaded = load(tmp_path, text)
    assert loaded.adapters == {"sql": "./sql", "poems": "org/poems"}
    assert loaded.directory == tmp_path
    changed = loaded.with_overrides("tensorrt_llm", {"tps": 2})
    assert (changed.adapters, changed.directory) == (loaded.adapters, tmp_path)
    assert load(tmp_path, "instantiate: {server: {lora_adapters: {a: b}}}").adapters == {"a": "b"}
