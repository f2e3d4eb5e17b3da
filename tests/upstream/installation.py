"""Installation of a source tree of TensorRT-LLM: a Python with its package, stand-ins and torch.

What is installed is what a user's machine has: the package, ``trtllm-build`` beside the
interpreter, and the metadata that the builder reads the versions of an engine from.
"""

from __future__ import annotations

import re
import runpy
import subprocess
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
ROOT = _HERE.parents[1]
ENVIRONMENT = ROOT / ".work" / "upstream"
"""What scripts/setup-upstream makes."""
_COMMAND = """#!{python}
from tensorrt_llm.commands.build import main
if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class Installation:
    """A tree of sources, its version, and the Python that runs its scripts."""

    sources: Path
    version: str
    python: Path

    @property
    def environment(self) -> dict[str, str]:
        """What tells cog-triton of it."""
        return {"TRTLLM_DIR": str(self.sources), "COG_TRITON_STEP_PYTHON": str(self.python)}

    def converter(self, example: str) -> Path | None:
        """The script that converts checkpoints in the directory `example` of the examples."""
        examples = self.sources / "examples"
        places = [examples / example, *examples.glob(f"models/*/{example}")]
        found = [place / "convert_checkpoint.py" for place in places]
        return next((script for script in found if script.is_file()), None)


def version_of(sources: Path) -> str:
    """TensorRT-LLM's version in the tree `sources`.

    Raises:
        LookupError: it has no ``tensorrt_llm`` with a version, or no ``examples``.
    """
    file = sources / "tensorrt_llm" / "version.py"
    if not file.is_file() or not (sources / "examples").is_dir():
        raise LookupError(f"{sources}: has no tensorrt_llm/version.py or no examples")
    return str(runpy.run_path(str(file))["__version__"])


def install(sources: Path, directory: Path) -> Installation:
    """Install the tree `sources` into `directory`."""
    version = version_of(sources)
    make = [ENVIRONMENT / "bin" / "python", "-m", "venv", "--without-pip", "--clear", directory]
    subprocess.run(make, check=True)
    (site,) = directory.glob("lib/python*/site-packages")
    (packages,) = ENVIRONMENT.glob("lib/python*/site-packages")
    paths = [_HERE / "stand_ins", packages, sources.resolve()]
    (site / "upstream.pth").write_text(
        "".join(f"{p}\n" for p in paths) + "import stand_in_modules\n"
    )
    requirements = (sources / "requirements.txt").read_text("utf-8")
    tensorrt = re.search(r"^tensorrt(?:-cu12)?[=~]=([\d.]+)", requirements, re.MULTILINE)
    for name, of_it in {"tensorrt_llm": version, "tensorrt": tensorrt and tensorrt[1]}.items():
        if of_it:
            info = site / f"{name}-{of_it}.dist-info"
            info.mkdir()
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {of_it}\n"
            (info / "METADATA").write_text(metadata)
    python = directory / "bin" / "python"
    command = python.parent / "trtllm-build"
    command.write_text(_COMMAND.format(python=python))
    command.chmod(0o755)
    return Installation(sources.resolve(), version, python)
