"""Options of build scripts: of TensorRT-LLM's, as recorded, and of those of this package.

They are in ``options.json``, a line for each script: TensorRT-LLM's need not be installed, and are
not run, for a config to be checked.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Option:
    """One option; `nargs` and `required` as in argparse, 0 being a bare flag.

    `names` are its long names without dashes, as a config writes them. `type` is ``str``, ``int``
    or ``float``, None for argparse's default; for anything else only the script itself can say
    what it accepts.
    """

    names: tuple[str, ...]
    nargs: int | str | None = None
    type: str | None = None
    choices: tuple[str, ...] | None = None
    required: bool = False
    default: str | None = None


@dataclass(frozen=True)
class ScriptOptions:
    """All that a script accepts, and the file of TensorRT-LLM that it was read from, or blank."""

    source: str
    options: tuple[Option, ...]

    @property
    def names(self) -> list[str]:
        """The long names of all options."""
        return [name for option in self.options for name in option.names]


def known_options(script: str) -> ScriptOptions | None:
    """The options of `script`; None if they are not recorded.

    `script` is a path in TensorRT-LLM's ``examples``, as ``quantization/quantize.py``, one in our
    own families, as ``openvino/build.py``, or the name of a command, as ``trtllm-build``.
    """
    return recorded().get(script)


@functools.cache
def recorded() -> dict[str, ScriptOptions]:
    """The options of all scripts that are recorded."""
    text = (resources.files(__package__) / "options.json").read_text("utf-8")
    return {
        script: ScriptOptions(record["source"], tuple(map(_option, record["options"])))
        for script, record in json.loads(text).items()
    }


def _option(fields: dict[str, object]) -> Option:
    as_tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return Option(**as_tuples)  # type: ignore[arg-type]
