"""Fake TensorRT-LLM installation for builds on a machine without a GPU.

`install` makes the Python that steps run in, with the package and its commands, beside the
sources that TRTLLM_DIR names. Scripts have the options of the real ones, read the real files of
a Hugging Face model, and write files of the real names and shapes.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import venv
from dataclasses import asdict, dataclass
from pathlib import Path

from cog_triton.builder.script_options import known_options

_HERE = Path(__file__).parent
COMMANDS = ("trtllm-build", "trtllm-refit")
SCRIPTS = (
    "models/core/gpt/convert_checkpoint.py",
    "models/core/llama/convert_checkpoint.py",
    "quantization/quantize.py",
    *COMMANDS,
)
LEGACY_SCRIPTS = ("gpt/hf_gpt_convert.py", "gpt/build.py")
# Other packages of NVIDIA's container.
_OTHER_PACKAGES = {"tensorrt": "10.14.1.48"}
_COMMAND = """#!{python}
import sys
from tensorrt_llm.commands.{module} import main
if __name__ == "__main__":
    sys.exit(main())
"""


@dataclass(frozen=True)
class Installation:
    """TensorRT-LLM's sources, and the Python that has its package."""

    sources: Path
    python: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"TRTLLM_DIR": str(self.sources), "COG_TRITON_STEP_PYTHON": str(self.python)}

    def path_of(self, script: str) -> Path:
        """The file of one of SCRIPTS or LEGACY_SCRIPTS."""
        is_command = script in COMMANDS
        return (self.python.parent if is_command else self.sources / "examples") / script


def install(directory: Path, *, legacy: bool = False) -> Installation:
    """Install 1.2.1 or, if `legacy`, a release of the layout before 0.8 into `directory`."""
    version = "0.7.1" if legacy else "1.2.1"
    shutil.copytree(_HERE / ("legacy" if legacy else "modern"), directory / "sources")
    venv.create(directory / "python", symlinks=True, with_pip=False)
    (site,) = (directory / "python").glob("lib/python*/site-packages")
    package, left_out = site / "tensorrt_llm", ["__pycache__", *(["commands"] if legacy else [])]
    patterns = shutil.ignore_patterns(*left_out)
    shutil.copytree(_HERE / "packages" / "tensorrt_llm", package, ignore=patterns)
    (package / "version.py").write_text(f'__version__ = "{version}"\n')
    options = {name: _options(name) for name in (LEGACY_SCRIPTS if legacy else SCRIPTS)}
    (package / "options.json").write_text(json.dumps(options))
    for name, of_it in {"tensorrt_llm": version, **_OTHER_PACKAGES}.items():
        _distribution(site, name, of_it)
    python = directory / "python" / "bin" / "python"
    for name in () if legacy else COMMANDS:
        command = python.parent / name
        command.write_text(_COMMAND.format(python=python, module=name.removeprefix("trtllm-")))
        command.chmod(0o755)
    return Installation(directory / "sources", python)


def _options(script: str) -> list[dict[str, object]]:
    known = known_options(script)
    if known is None:
        raise LookupError(f"the options of {script} are not recorded")
    return [asdict(option) for option in known.options]


def _distribution(site: Path, name: str, version: str) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("")


def driver(directory: Path) -> dict[str, str] | None:
    """Environment with a fake driver of an H100; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    directory.mkdir()
    library = directory / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, _HERE / "libcuda.c"], check=True)
    return {"LD_LIBRARY_PATH": str(directory)}


def backends(directory: Path) -> Path:
    """Triton's backends with a look-alike of ``tensorrtllm``, for TRITONSERVER_BACKEND_DIR.

    It is the Python backend under another name, which runs the model.py beside it.
    """
    found = importlib.util.find_spec("pytriton")
    assert found is not None
    (package,) = found.submodule_search_locations or ()
    root = Path(package) / "tritonserver"
    python, ours = root / "backends" / "python", directory / "tensorrtllm"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(python, directory / "python")
    shutil.copytree(python, ours)
    (ours / "libtriton_python.so").rename(ours / "libtriton_tensorrtllm.so")
    shutil.copy(root / "python_backend_stubs" / version / "triton_python_backend_stub", ours)
    (ours / "triton_python_backend_stub").chmod(0o755)
    shutil.copy(_HERE / "backend" / "model.py", ours)
    return directory
