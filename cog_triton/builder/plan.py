"""Plan: the steps of a build config as command lines, and the scripts that they run.

Scripts are those of the example families: of this package, and of TensorRT-LLM.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import cog_triton
from cog_triton.builder.config import BuildConfig, StepConfig
from cog_triton.builder.script_options import (
    MODEL,
    ArgumentValue,
    command_line,
    named,
    recorded,
    relative,
    resolved,
    shown,
)
from cog_triton.errors import (
    InvalidArgument,
    UnknownArgument,
    UnknownExample,
    UnknownScript,
    nearest,
)
from cog_triton.settings import load_group
from cog_triton.settings.programs import BuilderSettings

OWN = Path(cog_triton.__file__).parent / "build_scripts"
"""The example families that come with this package."""
# TensorRT-LLM's layout from 0.18 on. Before, families lay in examples itself, as `gpt`.
_GROUPS = ("models/core", "models/contrib")
_SHARED = "quantization"
_MODEL = PurePosixPath(MODEL)
# Families whose scripts are another one's, as TensorRT-LLM's READMEs have it.
_ALIASES = {
    **dict.fromkeys(("internlm", "skywork", "smaug", "arctic", "exaone"), "llama"),
    **dict.fromkeys(("mistral", "mixtral"), "llama"),
    **dict.fromkeys(("nemotron", "jais", "starcoder", "starcoder2", "gpt2"), "gpt"),
    **dict.fromkeys(("qwen2", "qwen3"), "qwen"),
    **{"chatglm": "glm-4-9b", "phi3": "phi", "gemma2": "gemma"},
}
# Directories of TensorRT-LLM's examples that are no family, and what to name instead.
_NO_FAMILY = {
    "multimodal": "name the family of its language model; encoders of images are not built",
    "draft_target_model": "a draft model is named in vLLM's speculative_config, and not built",
    "sample_weight_stripping": "name the model's family; executable trtllm-prune strips weights",
}


@dataclass(frozen=True)
class Script:
    """A script or command that a step runs: `name` is its path below the examples, or its name.

    `argv` begins the command line, `python` is what its code runs in, and `problem` says why it
    cannot be run on this machine. `recorded` is whether the recorded options are of its time.
    """

    name: str
    argv: tuple[str, ...]
    path: Path
    python: str
    problem: str | None = None
    recorded: bool = True


class Families:
    """Example families on this machine, and TensorRT-LLM's as recorded if it is not installed."""

    def __init__(self, own: Path = OWN, tensorrt_llm: Path | None = None) -> None:
        """`tensorrt_llm` is what holds its ``examples``, by default TRTLLM_DIR.

        Raises:
            InvalidArgument: there are no examples in TRTLLM_DIR, or COG_TRITON_STEP_PYTHON cannot
                be run.
        """
        settings = load_group(BuilderSettings)
        self._own = own
        self._root = tensorrt_llm or settings.trtllm_dir
        if self._root is not None and not (self._root / "examples").is_dir():
            raise InvalidArgument(f"TRTLLM_DIR={str(self._root)!r}: has no directory examples")
        self.python = str(settings.cog_triton_step_python or sys.executable)
        if shutil.which(self.python) is None:
            raise InvalidArgument(f"COG_TRITON_STEP_PYTHON={self.python!r}: is no program")

    @functools.cached_property
    def _scripts(self) -> dict[str, Path | None]:
        """Every script by its path below the examples, and where it is; None for not here."""
        scripts: dict[str, Path | None]
        if self._root is not None:
            places = ("*", *(f"{group}/*" for group in _GROUPS))
            scripts = {**_scripts_below(self._root / "examples", places)}
        else:
            names = [name for name in recorded() if "/" in name]
            families = {_parent(name) for name in names}
            # An older layout had some elsewhere.
            moved = {family for family in families for g in _GROUPS if f"{g}/{family}" in families}
            scripts = {name: None for name in names if _parent(name) not in moved}
        return {**scripts, **_scripts_below(self._own, ("*",))}

    def find(self, name: str) -> str:
        """Find the family that a config calls `name`; its path below the examples.

        Raises:
            UnknownExample: lists what there is.
        """
        there = {_parent(path) for path in self._scripts} - {_SHARED}
        for wanted in (name, _ALIASES.get(name, name)):
            for path in (wanted, f"models/{wanted}", *(f"{g}/{wanted}" for g in _GROUPS)):
                if path in there:
                    return path
        if name in _NO_FAMILY:
            raise UnknownExample(f"example_name {name!r}: {_NO_FAMILY[name]}")
        short = sorted(PurePosixPath(path).name for path in there)
        aliases = [alias for alias, meant in _ALIASES.items() if meant in short]
        where = "recorded, as TRTLLM_DIR is not set" if self._root is None else str(self._root)
        raise UnknownExample(
            f"example_name {name!r}: there is {', '.join(short)}"
            f"{nearest(name, [*short, *aliases, *sorted(there)])}"
            f" (TensorRT-LLM's families: {where})"
        )

    def offers(self, family: str, script: str) -> bool:
        """Whether `family` has `script`, on this machine or as recorded."""
        return f"{family}/{script}" in self._scripts

    def script(self, family: str, step: StepConfig, where: str) -> Script:
        """Find what `step`, which the config calls `where`, runs; `family` is `find`'s.

        Raises:
            UnknownScript: lists the scripts of the family.
        """
        if step.script is None:
            name = step.executable
            beside = Path(self.python).parent / name
            command = str(beside) if beside.is_file() else shutil.which(name)
            problem = None if command else _absent(name)
            argv, path = (command or name,), Path(command or name)
            return Script(name, argv, path, self.python, problem, self.is_of_today)
        own = (self._own / family).is_dir()
        places = [family] if own else [family, _SHARED, ""]
        names = [str(PurePosixPath(place, step.script)) for place in places]
        found = next((name for name in names if name in self._scripts), None)
        if found is None:
            offered = sorted(PurePosixPath(p).name for p in self._scripts if _parent(p) in places)
            raise UnknownScript(
                f"{where}.script {step.script!r}: {family} has {', '.join(offered)}"
                f"{nearest(step.script, offered)}"
            )
        there = self._scripts[found]
        if there is None:
            absent = f"$TRTLLM_DIR/examples/{found}"
            return Script(found, ("python", absent), Path(absent), self.python, _absent(found))
        # Ours have the packages of our own Python.
        python = sys.executable if there.is_relative_to(self._own) else self.python
        recorded = own or self.is_of_today
        return Script(found, (python, str(there)), there, python, recorded=recorded)

    @property
    def is_of_today(self) -> bool:
        """Whether TensorRT-LLM has the layout of 0.18 and later, whose options are recorded."""
        return self._root is None or (self._root / "examples" / "models").is_dir()


def _parent(path: str) -> str:
    return str(PurePosixPath(path).parent)


def _absent(name: str) -> str:
    return (
        f"{name} of TensorRT-LLM is not on this machine: build in the image cog-triton-builder, or"
        " install TensorRT-LLM and set TRTLLM_DIR (its sources, which have the examples) and"
        " COG_TRITON_STEP_PYTHON (the Python that has it)"
    )


def _scripts_below(root: Path, places: Sequence[str]) -> dict[str, Path]:
    """Scripts in `places`; a name that begins with an underscore is a helper of its family."""
    found = (path for place in places for path in root.glob(f"{place}/*.py"))
    return {p.relative_to(root).as_posix(): p for p in found if not p.name.startswith("_")}


@dataclass(frozen=True)
class Step:
    """One subprocess: `argv` run in a directory, of which it reads `input` and writes `output_dir`.

    `args` are the arguments that end `argv`, `env` is what it gets beside our environment, and
    `timeout` is in seconds.
    """

    name: str
    script: Script
    args: dict[str, ArgumentValue]
    input: str
    output_dir: str
    env: dict[str, str]
    timeout: float | None = None

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line."""
        return (*self.script.argv, *command_line(self.args))


@dataclass(frozen=True)
class Plan:
    """The steps of `config` in order; the last one's output is the engine.

    `model` is where the steps find the model, `family` is `Families.find`'s.
    """

    config: BuildConfig
    model: str
    steps: tuple[Step, ...]
    family: str = ""


def make_plan(config: BuildConfig, families: Families) -> Plan:
    """Find the scripts of `config` and write out their command lines.

    Args:
        config: for the scripts that `families` has, see `translate`; it names the model ``model``,
            and its steps get the model's own name.

    Raises:
        UnknownExample, UnknownScript: list what there is.
        UnknownArgument: no step writes what an argument wants read.
    """
    family = families.find(config.example_name)
    check_inputs(config)
    model = named(config.model_id)
    steps: list[Step] = []
    for name, step in config.steps():
        env = {key: str(value) for key, value in {**config.env, **step.env}.items()}
        args: dict[str, ArgumentValue] = {}
        for key, value in step.args.items():
            path = resolved(value, config.model_id, MODEL) if isinstance(value, str) else value
            is_model = isinstance(path, str) and path and PurePosixPath(path) == _MODEL
            args[key] = model if is_model else path
        steps.append(
            Step(
                name=name,
                script=families.script(family, step, name),
                args=args,
                input=steps[-1].output_dir if steps else model,
                output_dir=str(PurePosixPath(relative(step.output_dir))),
                env=env,
                timeout=config.timeout if step.timeout is None else step.timeout,
            )
        )
    return Plan(config, model, tuple(steps), family)


def check_inputs(config: BuildConfig) -> None:
    """Refuse a directory that is neither the model nor an earlier step's output.

    An absolute path may be anything, but for ``/src/...``, which is the work directory.

    Raises:
        UnknownArgument: one line for each of them: YAML path, value and rule.
    """
    lines: list[str] = []
    available = [_MODEL]
    for name, step in config.steps():
        for key in ("model_dir", "checkpoint_dir"):
            value = step.args.get(key)
            path = PurePosixPath(resolved(str(value), config.model_id, MODEL))
            known = any(path.is_relative_to(one) or one.is_relative_to(path) for one in available)
            if isinstance(value, str) and not path.is_absolute() and not known:
                lines.append(
                    f"{name}.args.{key}: {shown(value)}: no step before {name} writes it, and it"
                    " is not the model: is the convert step missing?"
                )
        # A script may also write beside its output_dir, where its arguments say.
        texts = [step.output_dir, *(v for v in step.args.values() if isinstance(v, str) and v)]
        available += [PurePosixPath(relative(text)) for text in texts]
    if lines:
        raise UnknownArgument("\n".join(lines))
