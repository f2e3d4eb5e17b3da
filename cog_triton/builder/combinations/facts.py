"""Facts that rules of combinations look at: a config's arguments, its model, GPUs and TensorRT-LLM.

An option is named with underscores here, whatever the config and the script have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cog_triton.builder.command_line import ArgumentValue
from cog_triton.builder.config import BuildConfig, StepConfig
from cog_triton.settings import load_settings
from cog_triton.sizing.model_shape import ModelShape

Role = Literal["convert", "quantize", "build"]
ROLES: tuple[Role, ...] = ("convert", "quantize", "build")
Version = tuple[int, int]
RECORDED: Version = (1, 0)
"""TensorRT-LLM of the recorded scripts, as far as rules tell releases apart."""
_OLDEST: Version = (0, 9)
ABSENT = object()
ON = (None, True, "enable")
OFF = (False, "disable")
_RANKS = ("tp_size", "tensor_parallelism", "world_size")


@dataclass(frozen=True)
class Facts:
    """One config: `sms` are the GPUs it is for, `model` is its config.json.

    `sms` or `model` is empty, `shape` None, where it is not known, and rules that need it hold.
    """

    config: BuildConfig
    family: str
    version: Version = RECORDED
    sms: tuple[int, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    shape: ModelShape | None = None

    def args(self, role: Role) -> dict[str, ArgumentValue]:
        """Arguments of a step without those left out; empty if there is no such step."""
        step = self._step(role)
        given = {} if step is None else step.args
        return {key.replace("-", "_"): value for key, value in given.items() if value is not False}

    def value(self, role: Role, name: str) -> ArgumentValue:
        """What is given for `name`; false if nothing is."""
        return self.args(role).get(name, False)

    def number(self, role: Role, *names: str, default: int | None = None) -> int | None:
        """What is given for the first of `names` that is a whole number; else `default`."""
        args = self.args(role)
        for name in names:
            value = args.get(name)
            if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return default

    def given(self, role: Role, name: str) -> object:
        """What the config has for `name`, false included; `ABSENT` if it has nothing."""
        step = self._step(role)
        args = {} if step is None else step.args
        return next((v for key, v in args.items() if key.replace("-", "_") == name), ABSENT)

    def on(self, role: Role, name: str) -> bool:
        """Whether `name` is a bare flag there, or ``enable``."""
        return self.given(role, name) in ON

    def label(self, role: Role, name: str) -> str:
        """The YAML path of an option, as the config writes it."""
        step = self._step(role)
        keys = [] if step is None else [key for key in step.args if key.replace("-", "_") == name]
        section = self._key(role)
        return f"{section}.args.{keys[0] if keys else name}"

    @property
    def checkpoint(self) -> Role | None:
        """The step whose output the engine is built from; None if it is made elsewhere."""
        return next((role for role in ("quantize", "convert") if self._step(role)), None)

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share every layer."""
        role = self.checkpoint
        return (role and self.number(role, *_RANKS)) or 1

    @property
    def ranks(self) -> int:
        """Ranks that have a part of the model: of layers, of experts, or whole layers."""
        role = self.checkpoint
        return self.tensor_parallel * ((role and self.number(role, "pp_size")) or 1)

    def _key(self, role: Role) -> str:
        old = role == "convert" and self.config.convert_to_ft is not None
        return "convert_to_ft" if old else role

    def _step(self, role: Role) -> StepConfig | None:
        step: StepConfig | None = getattr(self.config, self._key(role))
        return step


def installed_version(recorded: bool) -> Version:
    """TensorRT-LLM that TRTLLM_DIR has, whose ``version.py`` says it.

    Without one it is that of the recorded scripts, or, if `recorded` is false, the oldest.
    """
    root = load_settings().trtllm_dir
    path = None if root is None else Path(root) / "tensorrt_llm" / "version.py"
    if path is not None and path.is_file():
        found = re.search(r"__version__\s*=\s*[\"'](\d+)\.(\d+)", path.read_text("utf-8"))
        if found:
            return int(found[1]), int(found[2])
    return RECORDED if recorded else _OLDEST
