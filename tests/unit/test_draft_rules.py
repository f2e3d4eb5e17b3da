"""Configs with a draft model: what both must say, and which tokenizers are one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cog_triton.builder import draft_model
from cog_triton.builder.config import BuildConfig, load_config, parse_config
from cog_triton.builder.planning import planned
from cog_triton.builder.workspace import Workspace
from cog_triton.errors import BuildConfigInvalid, EngineIncompatible

SHIPPED = Path(__file__).parents[2] / "configs" / "build" / "llama-3.1-8b-instruct-draft.yaml"


def changed(where: str, value: Any) -> str:
    """The shipped config with another value; None takes the key out."""
    config = copy.deepcopy(yaml.safe_load(SHIPPED.read_text()))
    *path, last = where.split(".")
    place = config
    for key in path:
        place = place[key]
    place[last] = value
    if value is None:
        del place[last]
    return yaml.safe_dump(config)


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        ("build.args.speculative_decoding_mode", None, "must be draft_tokens_external with a dra"),
        ("build.args.speculative_decoding_mode", "eagle", "'eagle': must be draft_tokens_extern"),
        ("build.args.max_draft_len", 3, "max_draft_len: 3: must be num_draft_tokens, 4, or more"),
        ("draft.build.args.max_seq_len", 4096, "4096: must not be less than the target's, 8192"),
        ("draft.build.args.speculative_decoding_mode", "medusa", "a draft is an engine like any"),
        ("draft.convert.args.tp_size", 2, "draft.convert.args.tp_size: 2: must be 1"),
        ("world_size", 2, "world_size"),
        ("draft.runtime", {"enable_chunked_context": True}, "draft.runtime: is of the whole"),
        ("draft.build.args.max_bach_size", [{}], "draft.build.args.max_bach_size"),
        ("draft.modle_id", "m", "draft.modle_id: unknown key; did you mean 'model_id'"),
        ("draft.example_name", "openvino", "draft: is for engines of TensorRT-LLM"),
        ("draft", None, "num_draft_tokens: 4: is for a config with a draft"),
        ("num_draft_tokens", 65, "num_draft_tokens: 65"),
    ],
)
def test_a_pair_that_cannot_be_is_refused(where: str, value: Any, says: str) -> None:
    with pytest.raises(BuildConfigInvalid) as caught:
        parse_config(changed(where, value), "c.yaml")
    assert says in caught.value.detail


def test_a_draft_is_a_build_of_its_own_with_the_configs_token(tmp_path: Path) -> None:
    config = parse_config(changed("hf_token", "hf_secret"), "c.yaml")
    workspace = Workspace(tmp_path)
    plan = planned(config, workspace, lambda _: None)
    assert plan.draft is not None
    assert config.draft is not None
    assert plan.draft.work_dir == workspace.of(config.draft) != plan.work_dir
    assert plan.draft.request.token == "hf_secret"
    assert [step.name for step in plan.all_steps] == [
        "draft.convert",
        "draft.build",
        "convert",
        "build",
    ]
    again = parse_config(config.to_yaml(), "again.yaml")
    assert again.draft == config.draft
    assert "hf_secret" not in config.to_yaml()
    same = changed("num_draft_tokens", 2)
    assert workspace.of(parse_config(same, "c.yaml")) == workspace.of(config)
    other = changed("draft.build.args.max_batch_size", 32)
    assert workspace.of(parse_config(other, "c.yaml")) != workspace.of(config)


def test_secrets_of_a_drafts_url_are_not_packed() -> None:
    text = load_config(SHIPPED).to_yaml()
    value = yaml.safe_load(text)
    value["draft"]["model_tar_url"] = "https://me:pass@host/a.tar?sig=1"
    shown = BuildConfig.model_validate(value).to_yaml()
    assert "https://host/a.tar" in shown
    assert "pass" not in shown


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ({"a": 0, "b": 1}, None),
        ({"a": 1, "b": 0}, r"token 'a' is 1 there and 0 here"),
        ({"a": 0}, r"token 'b' is None there and 1 here"),
    ],
)
def test_tokenizers_are_one_if_every_token_is(
    theirs: dict[str, int], says: str | None, tmp_path: Path
) -> None:
    for name, vocabulary in (("target", {"a": 0, "b": 1}), ("draft", theirs)):
        (tmp_path / name).mkdir()
        value = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 9, "content": "</s>"}]}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(value))
    if says is None:
        draft_model.check_tokenizers(tmp_path / "target", tmp_path / "draft")
        return
    with pytest.raises(EngineIncompatible, match=says):
        draft_model.check_tokenizers(tmp_path / "target", tmp_path / "draft")


def test_tokenizers_of_other_files_are_one_if_the_files_are(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.model").write_bytes(b"one")
    draft_model.check_tokenizers(tmp_path / "target", tmp_path / "draft")
    (tmp_path / "draft" / "tokenizer.model").write_bytes(b"other")
    with pytest.raises(EngineIncompatible, match=r"tokenizer\.model: differs"):
        draft_model.check_tokenizers(tmp_path / "target", tmp_path / "draft")
    (tmp_path / "draft" / "tokenizer.model").unlink()
    with pytest.raises(EngineIncompatible, match="is in one of the two models alone"):
        draft_model.check_tokenizers(tmp_path / "target", tmp_path / "draft")
