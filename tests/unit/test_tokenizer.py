import json
from pathlib import Path

import pytest
from small_tokenizers import byte_fallback, byte_level, save

from cog_triton.errors import InvalidArgument, TritonTokenizerError
from cog_triton.text.tokenizer import EngineTokenizer


def test_settings_are_read_from_both_files(tmp_path: Path) -> None:
    directory = save(
        tmp_path,
        byte_level(),
        bos_token="<|im_start|>",
        eos_token={"content": "<|im_end|>", "lstrip": False},
        chat_template="{{ messages }}",
    )
    loaded = EngineTokenizer.load(directory)
    assert loaded.bos_token == "<|im_start|>"
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.chat_template == "{{ messages }}"
    assert loaded.token_id("<|im_end|>") == 1
    assert loaded.token_id("no such token") is None
    assert loaded.vocab_size == loaded.tokenizer.get_vocab_size(with_added_tokens=True) > 258
    assert loaded.tokenizer.decode(loaded.encode("größer")) == "größer"


def test_optional_settings_may_be_missing(tmp_path: Path) -> None:
    loaded = EngineTokenizer.load(save(tmp_path, byte_level(), bos_token=None))
    assert (loaded.bos_token, loaded.eos_token, loaded.chat_template) == (None, None, None)
    assert len(loaded.encode("a")) == 1


def test_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16, pad_token="<|im_end|>", pad_id=1)
    save(tmp_path, tokenizer)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["padding"] is not None
    loaded = EngineTokenizer.load(tmp_path)
    assert len(loaded.encode("zq" * 20)) == 40
    assert len(loaded.encode("z")) == 1


@pytest.mark.parametrize(
    ("bos_in_json", "flag", "text", "bos_count"),
    [
        (True, None, "hello", 1),
        (True, None, "<s>hello", 1),
        (False, None, "hello", 0),
        (False, None, "<s>hello", 1),
        (False, True, "hello", 1),
        (True, False, "hello", 0),
        (True, True, "", 1),
    ],
)
def test_prompts_have_at_most_one_bos(
    tmp_path: Path, bos_in_json: bool, flag: bool | None, text: str, bos_count: int
) -> None:
    save(tmp_path, byte_fallback(bos=bos_in_json), bos_token="<s>", add_bos_token=flag)
    loaded = EngineTokenizer.load(tmp_path)
    ids = loaded.encode(text)
    assert ids[:bos_count] == [1] * bos_count
    assert ids.count(1) == bos_count
    assert loaded.tokenizer.decode(ids) == text.replace("<s>", "")


def test_text_of_a_chat_template_gets_no_special_tokens(tmp_path: Path) -> None:
    save(tmp_path, byte_fallback(), bos_token="<s>", add_bos_token=True)
    loaded = EngineTokenizer.load(tmp_path)
    assert loaded.encode("hello", add_special_tokens=False).count(1) == 0
    assert loaded.encode("<s>hello", add_special_tokens=False).count(1) == 1
    assert loaded.encode("<s><s>hello", add_special_tokens=False).count(1) == 1
    assert loaded.encode("hello<s><s>", add_special_tokens=False).count(1) == 2


NAMED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": NAMED}, {}, "D"),
        ({}, {"chat_template.json": json.dumps({"chat_template": "J"})}, "J"),
        ({}, {"chat_template.json": json.dumps({"chat_template": NAMED})}, "D"),
        ({}, {"chat_template.jinja": "own\n"}, "own\n"),
        ({"chat_template": "C"}, {"chat_template.json": '{"chat_template": "J"}'}, "C"),
        ({"chat_template": "C"}, {"chat_template.jinja": "own"}, "own"),
    ],
)
def test_the_chat_template_is_read_from_any_of_its_places(
    tmp_path: Path, config: dict[str, object], files: dict[str, str], expected: str
) -> None:
    save(tmp_path, byte_level(), **config)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert EngineTokenizer.load(tmp_path).chat_template == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "cannot be read"),
        ("tokenizer.json", b"{", "not a tokenizer"),
        ("tokenizer_config.json", b"{,}", "not JSON"),
        ("tokenizer_config.json", b"[]", "must be a JSON object"),
        ("tokenizer_config.json", b'{"eos_token": {"text": "x"}, "bos_token": []}', "bos_token"),
        ("tokenizer_config.json", b'{"eos_token": "<nope>"}', "'<nope>' is not in the vocabulary"),
        ("tokenizer_config.json", b'{"add_bos_token": "yes"}', "add_bos_token='yes'"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template"),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "rag", "template": "R"}]}',
            "no 'default' .has rag.",
        ),
    ],
)
def test_a_missing_or_broken_file_is_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    save(tmp_path, byte_level())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TritonTokenizerError, match=f"E2102 .*{name}.*{message}"):
        EngineTokenizer.load(tmp_path)


def test_template_for_tools_is_apart(tmp_path: Path) -> None:
    loaded = EngineTokenizer.load(save(tmp_path, byte_level(), chat_template=NAMED))
    assert (loaded.template_for(tools=False), loaded.template_for(tools=True)) == ("D", "T")


def test_a_file_replaces_the_templates(tmp_path: Path) -> None:
    loaded = EngineTokenizer.load(save(tmp_path, byte_level(), chat_template=NAMED))
    path = tmp_path / "own.jinja"
    with pytest.raises(InvalidArgument, match=r"E1005 .*CHAT_TEMPLATE=.*own.jinja: cannot be read"):
        loaded.with_template(path)
    path.write_text("Own ü", "utf-8")
    own = loaded.with_template(path)
    assert own.template_for(tools=False) == own.template_for(tools=True) == "Own ü"
