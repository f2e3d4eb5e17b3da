"""Build config schema: accepted configs, and the error text of each mistake."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from http_replies import reply, serving
from hypothesis import given
from hypothesis import strategies as st

from cog_triton.builder import config as sealed_config
from cog_triton.builder import config_source
from cog_triton.builder.config import PATTERNS, BuildConfig, parse_config
from cog_triton.builder.config_source import MAX_BYTES, fetch
from cog_triton.builder.script_options import MODEL, command_line
from cog_triton.errors import BuildConfigInvalid

GOOD = """
model_id: some/model
example_name: gpt
convert_to_ft:
  script: hf_gpt_convert.py
  output_dir: ./c-model/gpt2/1-gpu
  args:
    tensor-parallelism: 1
    storage-type: float16
build:
  script: build.py
  output_dir: ./engine_outputs/
  args:
    use_gpt_attention_plugin:
    remove_input_padding: false
"""


def test_original_config_is_accepted() -> None:
    config = parse_config(GOOD, "x.yaml")
    assert [name for name, _ in config.steps()] == ["convert_to_ft", "build"]
    assert config.build.args == {"use_gpt_attention_plugin": None, "remove_input_padding": False}
    assert parse_config(config.to_yaml(), "again") == config


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("model_id:", "model:", "model_id is missing"),
        ("model_id:", "modelid:", "modelid: unknown key; did you mean 'model_id'?"),
        ("example_name: gpt", "example_name: ../x", "example_name: '../x'"),
        ("some/model", "''", "model_id: ''"),
        ("script: build.py", "scripts: build.py", "build.scripts: unknown key; did you mean 'scr"),
        ("script: build.py", "", "build.script is missing"),
        ("script: build.py", "script: ../../bin/sh", "build.script: '../../bin/sh'"),
        ("script: build.py", "script: build.py\n  executable: bash", "build.executable: 'bash'"),
        ("./engine_outputs/", "/tmp", "build.output_dir: '/tmp': must be a relative path"),
        ("./engine_outputs/", "a/../..", "build.output_dir: 'a/../..': must be a relative"),
        ("use_gpt_attention_plugin:", "x: {a: 1}", "build.args.x: {'a': 1}: must be empty, true"),
        ("use_gpt_attention_plugin:", "x: 2024-01-01", "build.args.x: datetime.date"),
        ("use_gpt_attention_plugin:", "--x:", "must be written without dashes"),
        ("./engine_outputs/", "c-model/gpt2", "build.output_dir 'c-model/gpt2' overlaps"),
        ("./engine_outputs/", f"{MODEL}/x", f"build.output_dir '{MODEL}/x' overlaps"),
        ("use_gpt_attention_plugin:", 'x: "\\0"', "NUL"),
        ("build:", "convert: {script: a.py, output_dir: a}\nbuild:", "convert are one step"),
        ("build:", "biuld:", "biuld: unknown key; did you mean 'build'?"),
        ("storage-type: float16", "tensor-parallelism: 2", "is there twice"),
        ("build:", "draft: {model_id: small}\nbuild:", "draft: a second engine that proposes tok"),
        ("build:", "num_draft_tokens: 4\nbuild:", "in speculative_config of vLLM's arguments"),
        ("args:", "args: [", "not valid YAML"),
        ("args:\n", "args: 3\n", "not valid YAML"),
    ],
)
def test_mistake_is_reported_with_path_value_and_rule(old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(BuildConfigInvalid) as caught:
        parse_config(GOOD.replace(old, new), "x.yaml")
    assert str(caught.value).startswith("E1300 BuildConfigInvalid: x.yaml: ")
    assert says in str(caught.value)


BOMB = "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
BOMB = f"a: &a [lol, lol, lol]\n{BOMB}model_id: *i\n"
HARD = ["? [a, b]\n: 1", "? {a: b}\n: 1", "model_id: &a [*a]", BOMB]


@pytest.mark.parametrize("text", ["", "- a", "7", "a: b: c", "\0", *HARD])
def test_yaml_other_than_a_mapping_is_refused(text: str) -> None:
    with pytest.raises(BuildConfigInvalid):
        parse_config(text, "x.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: " + "9" * 5000, "a number or a date in it is out of range"),
        ("a: 2026-13-45", "a number or a date in it is out of range"),
        ("[" * 5000, "nested too deep"),
    ],
)
def test_yaml_that_cannot_be_used_says_why(text: str, says: str) -> None:
    with pytest.raises(BuildConfigInvalid, match=says):
        parse_config(text, "x.yaml")


def test_argument_values_become_command_line_words() -> None:
    args = {"a": None, "b": True, "c": False, "d": 0, "e": "", "f": ["x", 2, ""], "g": 1e-05}
    words = ["--a", "--b", "--d", "0", "--e", "", "--f", "x", "2", "", "--g", "1e-05"]
    assert command_line(args) == words
    assert command_line({}) == []


scalars = (
    st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
)
values = st.none() | st.booleans() | scalars | st.lists(scalars, max_size=3)


@given(st.dictionaries(st.from_regex(r"[A-Za-z][A-Za-z0-9_-]*", fullmatch=True), values))
def test_any_arguments_survive_a_yaml_round_trip(args: dict[str, object]) -> None:
    step = {"script": "build.py", "output_dir": "engine", "args": args}
    value = {"model_id": "m", "example_name": "e", "build": step}
    text = yaml.safe_dump(value, sort_keys=False)
    config = parse_config(text, "x")
    assert isinstance(config, BuildConfig)
    assert command_line(config.build.args) == command_line(args)
    assert parse_config(config.to_yaml(), "again") == config


def config_with(**changes: object) -> BuildConfig:
    value = {**yaml.safe_load(GOOD), **changes}
    return parse_config(yaml.safe_dump(value, sort_keys=False), "x.yaml")


BUILD = {"script": "b.py", "output_dir": "e"}
TRTLLM = {"executable": "trtllm-build", "output_dir": "e"}
RANKS = {"script": "convert.py", "output_dir": "c", "args": {"tp_size": 2, "pp_size": 2}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"world_size": 0}, "world_size: 0: "),
        ({"timeout": 0}, "timeout: 0: "),
        ({"files": "*.json"}, "files: '*.json': "),
        ({"weight_format": "safetensor"}, "weight_format: 'safetensor': "),
        ({"model_tar_sha256": "a" * 64}, "model_tar_sha256 is given without model_tar_url"),
        ({"model_tar_url": "file:///m.tar", "revision": "main"}, "revision is for the hub"),
        ({"model_tar_url": "m.tar"}, "model_tar_url: 'm.tar': "),
        ({"env": {"HF_TOKEN": "hf_123"}}, "HF_TOKEN may be secret"),
        (
            {"build": {**BUILD, "args": {"hf-token": "hf_123"}}},
            "build.args: hf-token may be secret",
        ),
        ({"env": {"PYTHONPATH": "x"}}, "PYTHONPATH is the builder's own"),
        ({"env": {"A B": "x"}}, "'A B' is no name"),
        ({"env": {"A": ["x"]}}, "env.A: ['x']: "),
        ({"build": None}, "build: None: "),
        ({"lora_adapters": {"a": "x", "c/d": "y"}}, "lora_adapters.c/d: "),
        ({"example_name": "/gpt"}, "example_name: '/gpt': "),
        ({"model_id": "a\nb"}, "model_id: 'a\\nb': "),
        ({"hf_token": 7}, "hf_token: "),
        ({"build": {**TRTLLM, "executable": "trtllm-biuld"}}, "did you mean 'trtllm-build'?"),
        ({"build": {**TRTLLM, "script": "build.py"}}, "build.script 'build.py': "),
        ({"world_size": 2, "convert_to_ft": RANKS}, "world_size 2: convert_to_ft.args has tp_size"),
    ],
)
def test_rules_of_each_key(changes: dict[str, object], says: str) -> None:
    with pytest.raises(BuildConfigInvalid) as caught:
        config_with(**changes)
    assert says in str(caught.value)
    assert "hf_123" not in str(caught.value)


def test_every_pattern_is_told_in_words() -> None:
    found = re.findall(r'"pattern": (".*")', sealed_config.json_schema())
    assert {json.loads(pattern) for pattern in found} <= PATTERNS.keys()
    assert found


def test_token_is_not_written_or_shown() -> None:
    config = config_with(hf_token="hf_secret\n")
    assert config.hf_token is not None
    assert config.hf_token.get_secret_value() == "hf_secret"
    assert "hf_secret" not in config.to_yaml() + repr(config)
    # Nor does another mistake show it.
    with pytest.raises(BuildConfigInvalid) as caught:
        config_with(hf_token="hf_secret", model_tar_sha256="a" * 64)
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("hf_token: hf_secret: x", "line 2, column 20: mapping values are not allowed here"),
        ("hf_token: 'hf_secret", "line 2, column 11: while scanning a quoted scalar"),
        ("hf_token: hf_secret\nhf_token: hf_secret", "line 3, column 1: key 'hf_token' is there"),
        ("hf_token: hf_secret hf_secret", "hf_token: must be one word"),
        ("model_tar_url: ['http://u:hf_secret@h/m.tar']", "model_tar_url: '***': Input should"),
        ("model_tar_url: u:hf_secret@h/m.tar", "model_tar_url: '***': must be an http"),
        ("model_tar_url: ftp://u:hf_secret@h/m.tar?s=hf_secret", "'ftp://h/m.tar': must be an"),
        ("model_tar_url: 'http://[hf_secret'", "model_tar_url: '***': Invalid IPv6 URL"),
    ],
)
def test_errors_show_no_secret(line: str, says: str) -> None:
    with pytest.raises(BuildConfigInvalid) as caught:
        parse_config(f"model_id: m\n{line}\nexample_name: openvino\nbuild: {{}}\n", "c.yaml")
    assert says in str(caught.value)
    assert "hf_secret" not in str(caught.value)


def test_tar_url_is_written_redacted() -> None:
    url = "https://user:pass@host:8/m.tar?sig=abc#part"
    config = config_with(model_tar_url=url)
    assert config.model_tar_url == url
    assert "model_tar_url: https://host:8/m.tar\n" in config.to_yaml()


TEXT = "model_id: größe\n"


def answer(request: BaseHTTPRequestHandler) -> None:
    match request.path.partition("?")[0]:
        case "/c.yaml":
            reply(request, 200, TEXT.encode())
        case "/moved":
            reply(request, 302, Location="/c.yaml")
        case "/away":
            reply(request, 302, Location="file:///etc/hostname")
        case "/latin":
            reply(request, 200, "größe".encode("latin-1"))
        case "/large":
            reply(request, 200, b"#" * (MAX_BYTES + 1))
        case "/endless":
            request.send_response(200)
            request.end_headers()
            try:
                while True:
                    request.wfile.write(b"#" * 65536)
            except OSError:
                request.close_connection = True
        case "/torn":
            request.send_response(200)
            request.send_header("Content-Length", "100")
            request.end_headers()
            request.wfile.write(b"model_id:")
            request.close_connection = True
        case _:
            reply(request, 404)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(answer) as url:
        yield url


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a config.yaml"
    path.write_text(TEXT, "utf-8")
    return path


def test_config_from_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch(str(file)) == (TEXT, str(file))
    monkeypatch.chdir(file.parent)
    assert fetch(file.name)[0] == TEXT
    for host in ("", "localhost"):
        url = f"file://{host}{quote(str(file))}"
        assert fetch(url) == (TEXT, url)


def test_config_from_text_and_data_urls() -> None:
    assert fetch(TEXT) == (TEXT, "the text")
    encoded = base64.b64encode(TEXT.encode()).decode()
    assert fetch(f"data:application/yaml;base64,{encoded}") == (TEXT, "the data URL")
    assert fetch(f"data:,{quote(TEXT)}")[0] == TEXT


def test_config_over_http(server: str) -> None:
    assert fetch(f"{server}/c.yaml?signature=secret") == (TEXT, f"{server}/c.yaml")
    assert fetch(f"{server}/moved")[0] == TEXT


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("/nothing", "HTTP 404 Not Found"),
        ("/latin", "is not UTF-8 text"),
        ("/large", f"is longer than {MAX_BYTES} bytes"),
        ("/endless", f"is longer than {MAX_BYTES} bytes"),
        ("/torn", "peer closed connection"),
        ("/away", "unsupported protocol"),
    ],
)
def test_http_errors_have_a_code_and_are_redacted(server: str, path: str, rule: str) -> None:
    address = server.replace("//", "//user:secret@") + path + "?key=secret"
    with pytest.raises(BuildConfigInvalid) as caught:
        fetch(address)
    assert f"config='{server}{path}': " in str(caught.value)
    assert rule in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("/no/such/file", "no such file"),
        ("/", "no such file"),
        ("x" * 100_000, "cannot be read"),
        ("a\0b", "no such file|embedded null"),
        ("ftp://host/c.yaml", "must be a path, or"),
        ("file://elsewhere/c.yaml", "must be a path, or"),
        ("http://[::1/c.yaml", "not a URL"),
        ("http:///c.yaml", "config='http:///c.yaml'"),
        ("data:nothing", "not a data URL"),
        ("data:;base64,a", "not a data URL"),
        ("data:,%ff%fe", "is not UTF-8"),
        ("a\n\ud800", "is not UTF-8"),
        ("#\n" * MAX_BYTES, "is longer than"),
    ],
)
def test_unusable_addresses(address: str, rule: str) -> None:
    with pytest.raises(BuildConfigInvalid, match=rule) as caught:
        fetch(address)
    assert len(str(caught.value)) < 1000


def test_endless_response_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        with contextlib.suppress(OSError):
            while True:
                request.wfile.write(b"#")
                time.sleep(0.01)

    monkeypatch.setattr(config_source, "_TIMEOUT_S", 1.0)
    with (
        serving(drip) as url,
        pytest.raises(BuildConfigInvalid, match=r"/c\.yaml': is not here after 1 s"),
    ):
        fetch(f"{url}/c.yaml?sig=secret")
