"""Types of environment variables, in which a blank value is often an unset one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

IMAGE_ENGINE_DIR = Path("/src/triton_model_repo/tensorrt_llm/1")


class SettingsGroup(BaseSettings):
    """Settings from the environment; field names are the variables' names in lower case.

    `title` is the group's in docs/settings.md.
    """

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    title: ClassVar[str] = ""


def _blank_is_unset(value: object) -> object:
    return None if value == "" else value


OptionalInt = Annotated[int | None, BeforeValidator(_blank_is_unset)]
OptionalFloat = Annotated[
    float | None, Field(allow_inf_nan=False), BeforeValidator(_blank_is_unset)
]
OptionalBool = Annotated[bool | None, BeforeValidator(_blank_is_unset)]
OptionalPath = Annotated[Path | None, BeforeValidator(_blank_is_unset)]
EngineDir = Annotated[Path, BeforeValidator(lambda value: value or IMAGE_ENGINE_DIR)]
Port = Annotated[int, Field(ge=1, le=65535)]
OptionalPort = Annotated[
    int | None,
    Field(ge=1, le=65535),
    BeforeValidator(lambda value: None if value in ("", "0", 0) else value),
]
OptionalText = Annotated[str | None, BeforeValidator(_blank_is_unset)]
OptionalSecret = Annotated[SecretStr | None, BeforeValidator(_blank_is_unset)]


def _engine_by_name(value: object) -> object:
    """Engine name: only mock, as every other engine is recognised by its directory."""
    if value in (None, "", "mock"):
        return value or None
    raise PydanticCustomError(
        "engine",
        "must be mock; another engine is known by its directory, so name that or its engine.tar",
    )


def _level(value: object) -> object:
    """Levels in any case, with the short name that other programs have for one."""
    text = str(value or "info").lower()
    return "warning" if text == "warn" else text


LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_level)]
_OF_VLLM = re.compile(r"vllm:[\w.-]{1,64}", re.ASCII)


def _parser(*known: str) -> Callable[[object], object]:
    """A parser of ours, or by vLLM's name for it."""

    def checked(value: object) -> object:
        value = value or "auto"
        if value in known or _OF_VLLM.fullmatch(str(value)):
            return value
        raise PydanticCustomError("parser", f"must be {', '.join(known)} or vllm:NAME")

    return checked


ToolCallParser = Annotated[
    str, BeforeValidator(_parser("auto", "hermes", "llama3_json", "mistral", "none"))
]
ReasoningParser = Annotated[str, BeforeValidator(_parser("auto", "think", "mistral", "none"))]
EngineName = Annotated[str | None, BeforeValidator(_engine_by_name)]
