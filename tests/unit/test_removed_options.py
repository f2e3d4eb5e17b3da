"""Options of TensorRT-LLM 0.8 to 0.14 that today's scripts lack: each has a rule."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cog_triton.builder.config import BuildConfig
from cog_triton.builder.plan import Families
from cog_triton.builder.translate import Translation, translate
from cog_triton.errors import UnknownArgument

REMOVED = yaml.safe_load((Path(__file__).parent / "golden" / "removed_options.yaml").read_text())
COMMANDS = {"quantize.py": "quantize", "trtllm-build": "build"}
CASES = [(script, option) for script, options in REMOVED.items() for option in options]


def config_of(script: str, args: dict[str, object]) -> BuildConfig:
    step = COMMANDS.get(script, "convert")
    given = {name: args if name == step else {} for name in ("convert", "quantize", "build")}
    return BuildConfig.model_validate(
        {
            "model_id": "m",
            "example_name": "llama" if script in COMMANDS else script,
            "convert": {
                "script": "convert_checkpoint.py",
                "output_dir": "c",
                "args": given["convert"],
            },
            "quantize": {"script": "quantize.py", "output_dir": "q", "args": given["quantize"]},
            "build": {"executable": "trtllm-build", "output_dir": "e", "args": given["build"]},
        }
    )


def translated(script: str, **args: object) -> Translation:
    config, families = config_of(script, args), Families()
    return translate(config, families.find(config.example_name), lambda _: False)


def outcome(script: str, option: str) -> tuple[list[str], dict[str, object]]:
    """Notes or refusals of a translation, and the step's arguments after it."""
    try:
        after = translated(script, **{option: 1})
    except UnknownArgument as error:
        return error.detail.splitlines(), {}
    step = COMMANDS.get(script, "convert")
    return list(after.notes), dict(dict(after.config.steps())[step].args)


@pytest.mark.parametrize(("script", "option"), CASES)
def test_removed_option_is_translated_or_refused_with_a_reason(script: str, option: str) -> None:
    step = COMMANDS.get(script, "convert")
    said, args = outcome(script, option)
    assert any(line.startswith(f"{step}.args.{option}") for line in said)
    assert option not in args


def test_families_that_still_have_an_option_keep_it() -> None:
    kept = {"dataset_cache_dir": "/d", "load_model_on_cpu": True}
    assert translated("gpt", **kept).notes == ()
    assert translated("llama", use_parallel_embedding=None).notes == ()
    assert translated("gemma", **{"ckpt-type": "hf", "world-size": 2}).notes == ()


def test_what_removed_options_become() -> None:
    def convert(script: str, **args: object) -> dict[str, object]:
        step = translated(script, **args).config.convert
        assert step is not None
        return dict(step.args)

    assert convert("qwen", n_layer=32) == {}
    assert convert("enc_dec", skip_cross_qkv=None) == {"skip_cross_kv": None}
    for option, says in (
        ("moe_tp_mode", "moe_ep_size"),
        ("weight_data_type", "give dtype"),
        ("fixed_num_medusa_heads", "before num_medusa_heads"),
    ):
        with pytest.raises(UnknownArgument, match=says):
            convert("llama", **{option: 1})
    with pytest.raises(UnknownArgument, match="reads base_model_checkpoint_dir, which llama's"):
        convert("redrafter", model_dir="model")
    with pytest.raises(UnknownArgument, match="set HF_DATASETS_CACHE in env"):
        convert("qwen", dataset_cache_dir="/d")
    after = translated("quantize.py", max_seq_length=2048).config.quantize
    assert after is not None
    assert after.args == {"tokenizer_max_seq_length": 2048}
    build = translated("trtllm-build", use_fused_mlp=None, strongly_typed=None).config.build
    assert build.args == {"use_fused_mlp": "enable"}


def test_scripts_of_an_older_tree_keep_their_options() -> None:
    config = BuildConfig.model_validate(
        {
            "model_id": "m",
            "example_name": "medusa",
            "convert": {
                "script": "convert_checkpoint.py",
                "output_dir": "c",
                "args": {"use_embedding_sharing": None},
            },
            "build": {"executable": "trtllm-build", "output_dir": "e"},
        }
    )
    assert translate(config, "medusa", lambda _: False, today=False).config is config
    assert translate(config, "medusa", lambda _: False).config is not config


@pytest.mark.parametrize(
    ("short", "value", "name"),
    [("sq", 0.5, "smoothquant"), ("kv", None, "int8_kv_cache"), ("i", "model", "model_dir")],
)
def test_short_names_are_written_out(short: str, value: object, name: str) -> None:
    after = translated("llama", **{short: value}).config.convert
    assert after is not None
    assert after.args == {name: value}
