"""Example families: the build scripts of this package and those of TensorRT-LLM."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import cog_triton
from cog_triton.builder.config import StepConfig
from cog_triton.builder.options.recorded import known_scripts
from cog_triton.errors import InvalidArgument, UnknownExample, UnknownScript, nearest
from cog_triton.settings import load_group
from cog_triton.settings.programs import BuilderSettings

OWN = Path(cog_triton.__file__).parent / "build_scripts"
"""The example families that come with this package."""
# TensorRT-LLM's layout from 0.18 on. Before, families lay in examples itself, as `gpt`.
_GROUPS = ("models/core", "models/contrib")
_SHARED = "quantization"
# Families whose scripts are another one's, as TensorRT-LLM's READMEs have it.
_ALIASES = {
    **dict.fromkeys(("internlm", "skywork", "smaug", "arctic", "exaone"), "llama"),
    **dict.fromkeys(("nemotron", "jais"), "gpt"),
    "mistral": "llama",
    "mixtral": "llama",
    "starcoder": "gpt",
    "starcoder2": "gpt",
    "gpt2": "gpt",
    "chatglm": "glm-4-9b",
    "phi3": "phi",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "gemma2": "gemma",
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

    @property
    def here(self) -> bool:
        """Whether it can be run, or read, on this machine."""
        return self.problem is None


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

    def find(self, name: str) -> str:
        """Find the family that a config calls `name`; its path below the examples.

        Raises:
            UnknownExample: lists what there is.
        """
        there = sorted({str(PurePosixPath(path).parent) for path in self._paths()} - {_SHARED})
        short = _ALIASES.get(name, name)
        for wanted in dict.fromkeys((name, short)):
            for path in (wanted, f"models/{wanted}", *(f"{g}/{wanted}" for g in _GROUPS)):
                if path in there:
                    return path
        short_names = {PurePosixPath(path).name: path for path in there}
        aliases = [name for name, meant in _ALIASES.items() if meant in short_names]
        known = [*short_names, *aliases, *there]
        if name in _NO_FAMILY:
            raise UnknownExample(f"example_name {name!r}: {_NO_FAMILY[name]}")
        raise UnknownExample(
            f"example_name {name!r}: there is {', '.join(sorted(short_names))}"
            f"{nearest(name, known)}{self._hint()}"
        )

    def offers(self, family: str, script: str) -> bool:
        """Whether `family` has `script`, on this machine or as recorded."""
        return f"{family}/{script}" in self._paths()

    def script(self, family: str, step: StepConfig, where: str) -> Script:
        """Find what `step`, which the config calls `where`, runs; `family` is `find`'s.

        Raises:
            UnknownScript: lists the scripts of the family.
        """
        if step.script is None:
            return self._command(step.executable)
        there = set(self._paths())
        own = (self._own / family).is_dir()
        places = [family] if own else [family, _SHARED]
        names = [f"{place}/{step.script}" for place in places] + ([] if own else [step.script])
        name = next((name for name in names if name in there), None)
        if name is None:
            offered = sorted(
                PurePosixPath(path).name
                for path in there
                if str(PurePosixPath(path).parent) in places
            )
            raise UnknownScript(
                f"{where}.script {step.script!r}: {family} has {', '.join(offered)}"
                f"{nearest(step.script, offered)}"
            )
        for root, python in self._roots():
            if (root / name).is_file():
                argv = (python, str(root / name))
                return Script(name, argv, root / name, python, recorded=self.is_of_today)
        absent = f"$TRTLLM_DIR/examples/{name}"
        return Script(name, ("python", absent), Path(absent), self.python, _absent(name))

    def _command(self, name: str) -> Script:
        beside = Path(self.python).parent / name
        found = str(beside) if beside.is_file() else shutil.which(name)
        if found is not None:
            argv = (found,)
            return Script(name, argv, Path(found), self.python, recorded=self.is_of_today)
        return Script(name, (name,), Path(name), self.python, _absent(name))

    @property
    def is_of_today(self) -> bool:
        """Whether TensorRT-LLM has the layout of 0.18 and later, whose options are recorded."""
        return self._root is None or (self._root / "examples" / "models").is_dir()

    def _hint(self) -> str:
        where = "recorded, as TRTLLM_DIR is not set" if self._root is None else str(self._root)
        return f" (TensorRT-LLM's families: {where})"

    def _roots(self) -> Iterator[tuple[Path, str]]:
        """Directories of families, and the Python of each: ours has the packages of our own."""
        yield self._own, sys.executable
        if self._root is not None:
            yield self._root / "examples", self.python

    def _paths(self) -> Iterator[str]:
        """Every script there is, by its path below the examples."""
        yield from _scripts_below(self._own, ["*"])
        if self._root is not None:
            places = ["*", *(f"{group}/*" for group in _GROUPS)]
            yield from _scripts_below(self._root / "examples", places)
        else:
            yield from _recorded()


def _recorded() -> Iterator[str]:
    """TensorRT-LLM's recorded scripts, without those that an older layout had elsewhere."""
    families = {name: str(PurePosixPath(name).parent) for name in known_scripts() if "/" in name}
    for name, family in families.items():
        if not any(f"{group}/{family}" in families.values() for group in _GROUPS):
            yield name


def _absent(name: str) -> str:
    return (
        f"{name} of TensorRT-LLM is not on this machine: build in the image cog-triton-builder, or"
        " install TensorRT-LLM and set TRTLLM_DIR (its sources, which have the examples) and"
        " COG_TRITON_STEP_PYTHON (the Python that has it)"
    )


def _scripts_below(root: Path, places: list[str]) -> Iterator[str]:
    """Scripts in `places`; a name that begins with an underscore is a helper of its family."""
    for place in places:
        for path in root.glob(f"{place}/*.py"):
            if not path.name.startswith("_"):
                yield path.relative_to(root).as_posix()
