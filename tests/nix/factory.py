"""Offline builds of the real flake, with stand-ins for nixpkgs and nix2container (standin/).

What is real: every file of nix/, Nix itself, the locked wheels, this machine's Python, docker.
What is not: nixpkgs' packages, nix2container's Go program, NVIDIA's root file system.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from unit import fatbins

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
SYSTEM = "x86_64-linux"
_NOT_SOURCE = {".git", ".venv", ".work", "dist", "engine.tar", "result", "__pycache__"}
# The look-alikes run this machine's programs, which no sandbox has.
NIX_OPTIONS = [
    "--extra-experimental-features",
    "nix-command flakes",
    "--option",
    "sandbox",
    "false",
]
_WHEEL = re.compile(r"(?P<pname>[^-]+)-(?P<version>[^-]+)-(?P<tags>[^-]+-[^-]+-[^-]+)\.whl")


def _python() -> tuple[str, str]:
    """Python that has pip, and the version: 3.12, as in the flake, where it is, else this one."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which("python3.12"), *sorted(root.glob("versions/3.12.*/bin/python3.12"))]
    for candidate in (*filter(None, found), sys.executable):
        script = "import pip, sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", script], capture_output=True, text=True)
        if done.returncode == 0:
            return str(candidate), done.stdout.strip()
    pytest.fail("no Python here has pip")


PYTHON, VERSION = _python()


def run(*command: str, cwd: Path | None = None, stdin: IO[bytes] | None = None) -> str:
    """Run a command; returns its output, and fails with its stderr."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, stdin=stdin)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


class Factory:
    """Factory of images: a commit of this repository in its own directory, and its flake."""

    def __init__(self, directory: Path, groups: Sequence[str] = ("cog", "cpu")) -> None:
        """`groups` of nix/wheels.json are put into the store."""
        if shutil.which("nix") is None:
            sys.exit("no nix 2.20 or newer here: see docs/images.md, or CI=true scripts/ci-nix.sh")
        self.source = directory / "source"
        self._standin = directory / "standin"
        ignored = shutil.ignore_patterns(*_NOT_SOURCE, "*.egg-info", ".*_cache", ".hypothesis")
        shutil.copytree(REPOSITORY, self.source, ignore=ignored, symlinks=True)
        shutil.copytree(HERE / "standin", self._standin)
        run("git", "init", "--quiet", "--initial-branch=main", str(self.source))
        self.revision = self.commit("The source under test")
        installer = _wheels_into_store(directory / "wheels", groups)
        host = {"python": {"version": VERSION, "executable": _interpreter()}} | installer
        (self._standin / "nixpkgs" / "host.json").write_text(json.dumps(host))
        images = [fatbins.Image(number=sm) for sm in (75, 80, 86, 89, 90, 100, 103, 120)]
        embedded = b"".join(fatbins.cubin(image.number, abi=8) for image in images)
        library = fatbins.library(fatbins.container(*images), embedded)
        (self._standin / "nixpkgs" / "device_code.so").write_bytes(library)

    def commit(self, message: str) -> str:
        """Commit everything in `source` but a line of the change log; returns the flake's revision.

        With inputs overridden, Nix (2.26) hides the revision of a clean tree, not of a dirty one.
        """
        me = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        run("git", "add", "--all", cwd=self.source)
        run("git", *me, "commit", "--quiet", "--message", message, cwd=self.source)
        self._make_dirty()
        return run("git", "rev-parse", "HEAD", cwd=self.source).strip() + "-dirty"

    def take_back(self) -> None:
        """Take the last commit back."""
        run("git", "reset", "--hard", "--quiet", "HEAD~1", cwd=self.source)
        self._make_dirty()

    def _make_dirty(self) -> None:
        with (self.source / "CHANGELOG.md").open("a") as file:
            file.write("\n")

    def nix(self, verb: str, *arguments: str, inputs: str = "") -> str:
        """Run nix with stand-ins for the inputs whose names begin with `inputs`."""
        overridden = [
            word
            for name in ("nixpkgs", "nix2container", "nix2container/nixpkgs")
            for word in (
                "--override-input",
                f"{inputs}{name}",
                f"path:{self._standin / Path(name).name}",
            )
        ]
        options = ["--offline", "--no-write-lock-file", *overridden]
        return run("nix", *verb.split(), *NIX_OPTIONS, *options, *arguments)

    def build(self, *names: str) -> list[Path]:
        """Build packages; returns their outputs."""
        paths = self.nix("build --no-link --print-out-paths", *map(self.attribute, names))
        return [Path(line) for line in paths.split()]

    def evaluated(self, expression: str, *more: str) -> Path:
        """Build what no output names, with `more` options.

        In the expression, SOURCE is the source and pkgs nixpkgs.
        """
        pkgs = f'(builtins.getFlake "path:{self._standin}/nixpkgs").legacyPackages.{SYSTEM}'
        text = f"let pkgs = {pkgs}; in {expression.replace('SOURCE', str(self.source))}"
        options = ["--no-link", "--print-out-paths", "--impure", "--offline", *more, "--expr"]
        return Path(run("nix", "build", *NIX_OPTIONS, *options, text).strip())

    def attribute(self, name: str) -> str:
        """Nix installable of a package."""
        return f"git+file://{self.source}#{name}"

    def image(self, name: str) -> Image:
        """Build a package."""
        (path,) = self.build(name)
        return Image(path)


class Image:
    """Image as `nix build` leaves it: an executable file."""

    def __init__(self, result: Path) -> None:
        self.result = result
        self.about: dict[str, Any] = json.loads(run(str(result), "inspect"))
        self.reference: str = self.about["reference"]
        config = self.about["config"]
        self.env: dict[str, str] = dict(item.split("=", 1) for item in config["Env"])
        self.labels: dict[str, str] = config["Labels"]
        self.digests = {
            layer["created_by"].removeprefix("cog-triton: "): layer["digest"]
            for layer in self.about["layers"]
        }

    def files(self) -> Iterator[dict[str, Any]]:
        """A row for each regular file of each layer."""
        names = {digest.removeprefix("sha256:"): name for name, digest in self.digests.items()}
        process = subprocess.Popen([self.result], stdout=subprocess.PIPE)
        with process, tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for item in archive:
                digest = next((digest for digest in names if digest in item.name), None)
                if digest and item.isfile():
                    yield from _files_of(names.pop(digest), archive.extractfile(item))
        assert not names, f"{self.result} has no layer {', '.join(names.values())}"

    def load(self) -> str:
        """Load the image into docker; returns the loader's output."""
        return run(str(self.result), "load")


def _files_of(layer: str, content: IO[bytes] | None) -> Iterator[dict[str, Any]]:
    with tarfile.open(fileobj=content, mode="r|") as members:
        for member in members:
            if file := members.extractfile(member) if member.isfile() else None:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                yield {"layer": layer, "path": "/" + member.name.strip("/"), "sha256": digest}


def _interpreter() -> str:
    script = "import sys; print(sys.base_prefix)"
    return os.path.realpath(Path(run(PYTHON, "-c", script).strip()) / "bin" / f"python{VERSION}")


def wheels(*groups: str, python: str = VERSION) -> dict[str, dict[str, Any]]:
    """Rows of nix/wheels.json for a Python, by name."""
    table = json.loads((REPOSITORY / "nix" / "wheels.json").read_text())
    wanted = {f"{python} {group}" for group in groups}
    return {row["name"]: row for row in table if wanted & {*row["groups"]}}


def _wheels_into_store(cache: Path, groups: Sequence[str]) -> dict[str, Any]:
    """Add the images' wheels to the store, so that `fetchPypi` finds them."""
    wanted = wheels(*groups)
    lines = []
    for name, wheel in wanted.items():
        version = wheel["file"].split("-")[1]
        digest = base64.b64decode(wheel["hash"].removeprefix("sha256-")).hex()
        lines.append(f"{name}=={version} --hash=sha256:{digest}")
    requirements = cache.with_suffix(".txt")
    own = (HERE / "requirements.txt").read_text()
    requirements.write_text("\n".join(lines) + "\n" + own)
    options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "download"]
    run(*pip, *options, "--dest", str(cache), "--requirement", str(requirements))
    files = sorted(cache.glob("*.whl"))
    assert {path.name for path in files} >= {wheel["file"] for wheel in wanted.values()}
    run("nix-store", "--add-fixed", "sha256", *map(str, files))
    (installer,) = cache.glob("installer-*.whl")
    (digest,) = re.findall(r"sha256:(\w+)", own)
    fields = _WHEEL.fullmatch(installer.name)
    assert fields is not None
    python, abi, platform = fields["tags"].split("-")
    described = {"pname": fields["pname"], "version": fields["version"], "format": "wheel"}
    described |= {"dist": python, "python": python, "abi": abi, "platform": platform}
    described["hash"] = "sha256-" + base64.b64encode(bytes.fromhex(digest)).decode()
    return {"installer": described}
