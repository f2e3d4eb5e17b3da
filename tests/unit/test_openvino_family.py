"""OpenVINO family: engine directory, options, guides and the rendered model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cog_triton.engines.openvino.family import OpenVINOFamily, OpenVINOOptions, read_config
from cog_triton.engines.openvino.guides import adapted
from cog_triton.errors import (
    EngineCorrupt,
    EngineIncompatible,
    InvalidArgument,
    InvalidPredictorConfig,
)
from cog_triton.serving import engine_preparation
from cog_triton.settings import load_settings
from cog_triton.system.paths import triton_model_repo
from cog_triton.text.guide import Guide, GuideKind
from cog_triton.triton import model_repository
from cog_triton.triton.serve_config import ServeConfig

MODEL = {"vocab_size": 49152, "eos_token_id": 2, "pad_token_id": 1}
BUILD = {"max_input_len": 2047, "max_seq_len": 2048, "max_batch_size": 16}


def engine(directory: Path, model: Any = MODEL, build: Any = BUILD) -> Path:
    directory.mkdir(exist_ok=True)
    config = {"pretrained_config": model, "build_config": build}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "openvino_model.xml").write_text("<net/>")
    (directory / "openvino_model.bin").write_bytes(b"\0")
    return directory


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (0, (0,)), ([2, 7], (2, 7)), ([], ())])
def test_end_ids_may_be_one_several_or_none(eos: Any, ids: tuple[int, ...], tmp_path: Path) -> None:
    assert read_config(engine(tmp_path, {**MODEL, "eos_token_id": eos})).eos_ids == ids


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "\xff\0", "{", "[]", "null", "3", "{}"),
        '{"pretrained_config": [], "build_config": {}}',
    ],
)
def test_a_missing_or_malformed_config_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, "latin-1")
    with pytest.raises(EngineCorrupt, match=r"config\.json"):
        read_config(tmp_path)


SIZES, IDS = ("vocab_size", *BUILD), ("eos_token_id", "pad_token_id")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in SIZES for value in (None, "many", [], 0, -1)),
        *((key, value) for key in IDS for value in ("</s>", ["</s>"], 1.5, {"id": 3})),
    ],
)
def test_sizes_must_be_positive_and_ids_whole(key: str, value: Any, tmp_path: Path) -> None:
    model, build = dict(MODEL), dict(BUILD)
    (model if key in model else build)[key] = value  # type: ignore[assignment]
    with pytest.raises(EngineCorrupt, match=r"config\.json"):
        read_config(engine(tmp_path, model, build))


def test_an_engine_without_weights_is_corrupt(tmp_path: Path) -> None:
    (engine(tmp_path) / "openvino_model.bin").unlink()
    with pytest.raises(EngineCorrupt, match=r"openvino_model\.bin"):
        OpenVINOFamily.open(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_threads": "0x10"}, "num_threads='0x10': must be a whole number, at least 0"),
        ({"triton_max_batch_size": "x"}, "max_batch_size='x': must be"),
        ({"kv_cache_gbs": 1}, r"kv_cache_gbs=1.*did you mean 'kv_cache_gb'"),
        ({"batching_strategy": "inflight_fused_batching"}, "no such option"),
        ({"triton_max_batch_size": 5, "max_batch_size": 6}, "triton_max_batch_size"),
    ],
)
def test_unknown_and_doubled_options_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidPredictorConfig, match=said):
        OpenVINOOptions.parse(arguments)


def rendered(directory: Path, arguments: Mapping[str, Any]) -> tuple[Any, str]:
    config = model_repository.read_config(triton_model_repo() / "tensorrt_llm" / "config.pbtxt")
    code = OpenVINOFamily.open(engine(directory)).render(config, arguments)
    return config, code


def test_the_cache_is_in_f32_and_another_precision_is_asked_for_by_name() -> None:
    assert OpenVINOOptions.parse({}).kv_cache_precision == "f32"
    assert OpenVINOOptions.parse({"kv_cache_precision": "u8"}).kv_cache_precision == "u8"
    with pytest.raises(InvalidPredictorConfig, match=r"'bf16': must be one of f32, f16, u8"):
        OpenVINOOptions.parse({"kv_cache_precision": "bf16"})


def test_rendered_model_has_the_options_as_parameters(tmp_path: Path) -> None:
    config, code = rendered(tmp_path, {})
    assert (config.name, config.backend, config.max_batch_size) == ("tensorrt_llm", "python", 16)
    assert config.model_transaction_policy.decoupled
    assert not config.HasField("dynamic_batching")
    assert config.parameters["engine_dir"].string_value == str(tmp_path)
    compile(code, "model.py", "exec")


def test_kv_cache_size_of_a_token_is_read_where_it_is_known(tmp_path: Path) -> None:
    assert read_config(engine(tmp_path)).kv_values_per_token is None
    sizes = {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_size": 64}
    assert read_config(engine(tmp_path, {**MODEL, **sizes})).kv_values_per_token == 11520
    with pytest.raises(EngineCorrupt, match="head_size=0"):
        read_config(engine(tmp_path, {**MODEL, **sizes, "head_size": 0}))


def test_adapters_are_refused_with_the_reason(tmp_path: Path) -> None:
    family = OpenVINOFamily.open(engine(tmp_path))
    for settings, adapters in (({}, {"sql": "org/sql"}), ({"lora_dir": tmp_path}, {})):
        with pytest.raises(EngineIncompatible, match="must be the same for all requests"):
            engine_preparation._load_adapters(
                load_settings(**settings), family, ServeConfig({}, adapters), tmp_path
            )
    none = engine_preparation._load_adapters(load_settings(), family, ServeConfig(), tmp_path)
    assert none is None


TAG = """{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<"],
"tags": [{"type": "tag", "begin": "<a>", "end": "%s",
          "content": {"type": "json_schema", "json_schema": %s}}]}}"""


@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        ('{"const": "café", "items": true}', '{"const": "café", "items": true}'),
        (
            '{"properties": {"é1": {"$ref": "#/$defs/é"}}, "required": ["é1"], "$defs": {"é": {}}}',
            r'{"properties": {"é\" \"1": {"$ref": "#/$defs/é"}}, "required": ["é\" \"1"],'
            ' "$defs": {"é": {}}}',
        ),
        (
            r'{"items": {"const": "é1|\""}}',
            r'{"items": {"anyOf": [{"type": "string", "pattern": "(é1\\|\\\\\\\")"}]}}',
        ),
        (
            r'{"anyOf": [{"enum": [1, "a", "é1", "é\n1", "éa"]}]}',
            r'{"anyOf": [{"anyOf": [{"enum": [1, "a", "é\n1"]},'
            ' {"type": "string", "pattern": "(é1|éa)"}]}]}',
        ),
        (
            TAG % (r"\nb", '{"const": "é1"}'),
            TAG % (r"\nb", '{"anyOf": [{"type": "string", "pattern": "(é1)"}]}'),
        ),
    ],
)
def test_schemas_are_rewritten(guide: str, expected: str) -> None:
    kind: GuideKind = "structural_tag" if "format" in guide else "json_schema"
    assert json.loads(adapted(Guide(kind, guide))) == json.loads(expected)


CLASSES = {
    r"\xe9d[\xe90]": r"\u00e9d[0\u00e9]",
    r"[^é\d-]": r"[^\d\-é]",
    r"\\x[\\xé0]\[é0]": r"\\x[\\x0é]\[é0]",
    "[à-ÿa-é0-9]": "[0-9a-éà-ÿ]",
    "[é^0]": r"[\^0é]",
}


@pytest.mark.parametrize("regex", CLASSES)
def test_classes_match_the_same_in_another_order(regex: str) -> None:
    assert adapted(Guide("regex", regex)) == CLASSES[regex]
    for text in (*map(chr, range(256)), "éd0", "édé", r"\xé[é0]", r"\x0[é0]"):
        assert bool(re.fullmatch(regex, text)) == bool(re.fullmatch(CLASSES[regex], text))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "[a-éb-è]", "one range"),
        ("structural_tag", TAG % ("é1", "{}"), "'é1': .* write 'é'"),
    ],
)
def test_what_it_would_misread_is_refused(kind: GuideKind, text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"E1005.*{words}"):
        adapted(Guide(kind, text))
