"""Precision in one word: filled into the scripts' arguments, and checked against the SM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cog_triton.builder import translate
from cog_triton.builder.config import BuildConfig, parse_config
from cog_triton.builder.plan import Families
from cog_triton.builder.translate import spelled_out
from cog_triton.cli.build import look
from cog_triton.errors import BuildConfigInvalid, CogTritonError

BUILD = {"executable": "trtllm-build", "output_dir": "engine", "args": {"max_batch_size": 8}}
CONVERT = {
    "script": "convert_checkpoint.py",
    "output_dir": "c",
    "args": {"model_dir": "model", "output_dir": "c"},
}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The SM of this machine's GPUs; none, unless a test adds one."""
    sms: list[int] = []
    monkeypatch.setattr(translate, "visible_gpus", lambda: sms)
    return sms


def config(example_name: str = "llama", **changes: Any) -> BuildConfig:
    value = {"model_id": "org/m", "example_name": example_name, "build": BUILD, **changes}
    return parse_config(yaml.safe_dump(value), "c.yaml")


def spell_out(given: BuildConfig, echo: Callable[[str], None]) -> BuildConfig:
    return spelled_out(given, Families().find(given.example_name), echo)


def steps(**changes: Any) -> dict[str, dict[str, Any]]:
    """The arguments of each step once the words are spelled out; the words are gone."""
    said: list[str] = []
    after = spell_out(config(**changes), said.append)
    assert all(getattr(after, word) is None for word in translate.WORDS)
    assert said
    return {name: dict(step.args) for name, step in after.steps()}


def test_quantized_engine_in_three_words() -> None:
    found = steps(quantization="fp8", kv_cache_dtype="fp8", tensor_parallel=2)
    assert found == {
        "quantize": {
            "model_dir": "model",
            "output_dir": "quantized",
            "dtype": "auto",
            "qformat": "fp8",
            "kv_cache_dtype": "fp8",
            "tp_size": 2,
        },
        "build": {"checkpoint_dir": "quantized", "output_dir": "engine", "max_batch_size": 8},
    }


def test_words_fill_in_the_steps_that_are_there() -> None:
    found = steps(convert=CONVERT, kv_cache_dtype="int8", tensor_parallel=4)
    assert found["convert"] == {**CONVERT["args"], "int8_kv_cache": True, "tp_size": 4}  # type: ignore[dict-item]
    assert found["build"]["checkpoint_dir"] == "c"
    quantize = {"script": "quantize.py", "output_dir": "q", "args": {"qformat": "int4_awq"}}
    found = steps(quantize=quantize, quantization="int4_awq", kv_cache_dtype="auto")
    assert found["quantize"] == {"qformat": "int4_awq"}
    found = steps(example_name="gemma", quantization="none", tensor_parallel=2)
    assert (found["convert"]["ckpt-type"], found["convert"]["world-size"]) == ("hf", 2)


@pytest.mark.parametrize(
    "words",
    [
        *({"quantization": word} for word in ("none", "fp8", "int8_sq", "int4_awq")),
        *({"quantization": word, "kv_cache_dtype": "fp8"} for word in ("w4a8_awq", "nvfp4")),
        {"kv_cache_dtype": "int8", "tensor_parallel": 2},
    ],
)
def test_what_is_filled_in_passes_the_check(words: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(config(**words).to_yaml())
    lines: list[str] = []
    assert look(
        tmp_path / "c.yaml",
        tmp_path / "w",
        tmp_path / "e.tar",
        lines.append,
        check=True,
        plan=False,
    )
    assert sum(": OK: " in line for line in lines) == 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"quantization": "fp8", "convert": CONVERT},
            "quantization fp8: the word stands for the whole step: leave convert out",
        ),
        ({"kv_cache_dtype": "fp8", "convert": CONVERT}, "makes no such cache: quantize.py does"),
        ({"quantization": "int9"}, "quantization: 'int9': must be one of none, fp8, int8_sq"),
        ({"tensor_parallel": 0}, "tensor_parallel: 0"),
        ({"tensor_parallel": 2, "world_size": 4}, "world_size 4: convert.args has tp_size 2"),
        (
            {
                "convert": {**CONVERT, "args": {"tp_size": 4}},
                "tensor_parallel": 2,
            },
            "convert.args.tp_size: 4: the config's own word says 2",
        ),
        (
            {"example_name": "openvino", "quantization": "fp8"},
            "quantization: is for scripts of TensorRT-LLM since 0.18, and openvino is none",
        ),
    ],
)
def test_words_that_do_not_fit_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BuildConfigInvalid) as caught:
        steps(**changes)
    assert says in str(caught.value)


def test_config_without_words_is_left_alone(here: list[int]) -> None:
    plain = config(convert=CONVERT)
    assert spell_out(plain, print) is plain
    here.append(86)
    with pytest.raises(CogTritonError, match="E1305"):
        spell_out(config(convert=CONVERT, sm=90), print)
