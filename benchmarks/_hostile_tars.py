"""Hostile engine.tars of sealed vLLM engines, given to every command that reads one.

Each is made from one that the double of vLLM has built, with a pickle or a library in it that makes
a directory, the mark, when it is opened. `inspect`, `build --add-seal` and `serve` must refuse it
with a code, or leave its seal unread with a warning and answer right; and nothing of it may run.
tests/unit has every lie of a manifest and of a member, and the bounds of memory; here is one of a
kind.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sealed_engines import (
    CONFIG,
    SEAL,
    SealedBuilds,
    SealedStack,
    compiled,
    copied,
    digest_of,
    sealed_file,
    unpacked,
)
from stack import text_of, wait_until

from cog_triton.artifact.engine_manifest import MANIFEST_NAME, sha256_of
from cog_triton.engines.vllm.sealed_caches import AOT, GROUP

PLACE = f"sealed/{SEAL}"
UNREAD, UNUSED, RAN = "left unread", "no seal is used", "ran, as it is pinned"
_SERVED = {UNREAD: "its seal is left unread: ", UNUSED: "no seal of the engine is used: "}
COLUMNS = ("engine.tar with", "inspect", "build --add-seal", "serve", "broken rules")
_DEADLINE_S = 240.0
_NEVER = {"a traceback": "Traceback (most recent call last)", "a terminal's escape": "\x1b[2J"}
_LIBRARY = """
#include <sys/stat.h>
__attribute__((constructor)) static void run(void) { mkdir("%s", 0700); }
"""


class _Runs:
    """What a pickle can do."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


Make = Callable[[Path, Path], None]
"""Changes a copy of the sound engine's directory, so that it makes the mark."""


def _pickle(engine: Path, mark: Path) -> None:
    """Make the compiled model one that runs when it is read."""
    sealed_file(engine, "model").write_bytes(pickle.dumps(_Runs(mark)))


def _library(engine: Path, mark: Path) -> None:
    """Put a launcher beside a kernel, as Triton compiles them, that runs when it is loaded."""
    place = sealed_file(engine, "*.cubin").with_name("cuda_utils.so")
    source = place.with_suffix(".c")
    source.write_text(_LIBRARY % mark)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", place, source], check=True)
    source.unlink()


def _summed(change: Callable[[dict[str, Any]], object], make: Make = _pickle) -> Make:
    """`make`, and a manifest that has the right sums of all files, and a lie."""

    def made(engine: Path, mark: Path) -> None:
        make(engine, mark)
        path = engine / MANIFEST_NAME
        given = json.loads(path.read_text())
        given["files"] = {
            file.relative_to(engine).as_posix(): {
                "size": file.stat().st_size,
                "sha256": sha256_of(file),
            }
            for file in sorted(engine.rglob("*"))
            if file.is_file() and file != path
        }
        change(given)
        path.write_text(json.dumps(given))

    return made


def _honest(make: Make) -> Make:
    return _summed(lambda given: None, make)


def _group(content: str) -> Make:
    """A file of Triton's that says which files a kernel has, and a manifest that has its sum."""

    def made(engine: Path, mark: Path) -> None:
        _library(engine, mark)
        sealed_file(engine, f"{GROUP}*.json").write_text(content)

    return _honest(made)


def _environment(**values: object) -> Make:
    return _summed(lambda given: given["seals"][SEAL]["environment"].update(values))


def _huge(given: dict[str, Any]) -> None:
    (model,) = (name for name in given["files"] if name.endswith("/rank_0_0/model"))
    given["files"][model]["size"] = 1 << 60


def _trusted(given: dict[str, Any]) -> None:
    name = f"{PLACE}/../../../../trusted-seals/x"
    given["files"][name] = {"size": 0, "sha256": "0" * 64}


def _deep(engine: Path, _mark: Path) -> None:
    (engine / MANIFEST_NAME).write_text('{"seals":' + "[" * 200_000)


def _member(name: str, *, link: str = "", size: int = 0) -> bytes:
    """The header of a member; a size is said, and the bytes are not there."""
    header = tarfile.TarInfo(name)
    header.size = size
    if link:
        header.type, header.linkname = tarfile.SYMTYPE, link
    return header.tobuf()


@dataclass(frozen=True)
class Attack:
    """One tar: how its directory is changed, what its tar begins with, and how `serve` meets it.

    `pin` is what SEAL_SHA256 has: nothing, the digest of the "sound" engine, or the tar's "own".
    """

    name: str
    make: Make
    serve: str = "E1306"
    pin: str = "own"
    begins: bytes = b""


ATTACKS: tuple[Attack, ...] = (
    Attack("a pickle, pinned", _honest(_pickle), RAN),
    Attack("a pickle", _honest(_pickle), UNREAD, pin=""),
    Attack("a pickle under the sound manifest", _pickle, pin="sound"),
    Attack("a library", _honest(_library), UNREAD, pin=""),
    Attack("a library that no manifest names", _library, pin="sound"),
    Attack("a kernel at /etc/passwd", _group('{"child_paths": {"passwd": "/etc/passwd"}}')),
    Attack("a kernel's group without an end", _group("[" * 500_000)),
    Attack("a size of 2^60", _summed(_huge)),
    Attack("a file above the engine", _summed(_trusted)),
    Attack("variables of the loader", _summed(lambda t: t.update(variables={"LD_PRELOAD": "x"}))),
    Attack("another SM", _environment(sm=100), UNUSED),
    Attack("a GPU that clears the screen", _environment(gpu_name="\x1b[2J")),
    Attack("a manifest of 32 MB", _summed(lambda given: given.update(model_id="x" * (32 << 20)))),
    Attack("a manifest without an end", _deep),
    Attack(
        "a link out of the engine",
        _honest(_pickle),
        begins=_member(f"{PLACE}/{AOT}/x", link="../../../../../../etc/passwd"),
    ),
    Attack("a member of 1 TB", _honest(_pickle), begins=_member("x", size=1 << 40)),
)
"""All tars; the first one shows that what they hold would run."""


@dataclass(slots=True)
class Outcome:
    """What the commands said of a tar: a code, or what they did; `problems` must not be."""

    name: str
    inspect: str = ""
    added: str = ""
    served: str = ""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        line = (
            f"{'FAILED ' if self.problems else ''}{self.name}: inspect {self.inspect},"
            f" --add-seal {self.added}, serve {self.served}"
        )
        return "\n    ".join([line, *self.problems])

    def row(self) -> tuple[str, ...]:
        """Its row in the table."""
        problems = "; ".join(self.problems) or "none"
        return self.name, self.inspect, self.added, self.served, problems


class _Tars:
    """The sound engine, from which the hostile ones are made."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.builds = SealedBuilds(directory / "sound")
        self.tar = self.builds.build()
        self.sound = unpacked(self.tar, directory / "engine")

    def strike(self, attack: Attack) -> Outcome:
        """Make the tar, give it to each command, and say what became of it."""
        place = self.directory / "hostile"
        engine, mark = copied(self.sound, place / "engine"), place / "mark"
        attack.make(engine, mark)
        tar = place / "hostile.tar"
        with tar.open("wb") as bare:
            bare.write(attack.begins)
            with tarfile.open(fileobj=bare, mode="w") as file:
                for path in sorted(engine.rglob("*")):
                    if path.is_file():
                        file.add(path, path.relative_to(engine).as_posix())
        pins = {"": "", "sound": digest_of(self.sound), "own": digest_of(engine)}
        outcome = self.meet(attack.name, tar, place, pins[attack.pin])
        if outcome.served != attack.serve:
            outcome.problems.append(f"serve: {outcome.served}, not {attack.serve}")
        if mark.exists() != (attack.serve == RAN):
            said = "nothing ran, so nothing was tried" if attack.serve == RAN else "it ran"
            outcome.problems.append(said)
        for at in (self.builds.directory / "home", place / "server" / "work"):
            if (at / "trusted-seals" / "x").exists():
                outcome.problems.append(f"{at}: trusts what the tar says")
        shutil.rmtree(place)
        return outcome

    def meet(self, name: str, tar: Path, place: Path, pin: str) -> Outcome:
        """Give a tar to each command."""
        outcome = Outcome(name)
        inspect = [sys.executable, "-m", "cog_triton", "inspect", str(tar)]
        outcome.inspect = self._run(inspect, outcome, "described")
        add = self.builds.command(CONFIG, "--add-seal", str(tar), tar="both.tar")
        outcome.added = self._run(add, outcome, "added, unread")
        outcome.served = self._serve(tar, place, pin, outcome)
        return outcome

    def _run(self, command: list[str], outcome: Outcome, done: str) -> str:
        """Run a command to its end: its code, or `done`."""
        ran = subprocess.run(
            command,
            cwd=self.builds.directory,
            env={**self.builds.environment, "TMPDIR": str(self.directory)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_DEADLINE_S,
        )
        return _said(command[3], ran.stdout, ran.returncode, done, outcome)

    def _serve(self, tar: Path, place: Path, pin: str, outcome: Outcome) -> str:
        stack = SealedStack(place / "server", self.builds, tar, SEAL_SHA256=pin)
        stack.start()
        try:
            process = stack.process
            assert process is not None
            wait_until(
                lambda: "Ready in" in stack.output or process.poll() is not None, _DEADLINE_S
            )
            code = process.poll()
            if code is None and text_of(stack.predict("abc", max_tokens=4)) != "abca":
                outcome.problems.append("serve: another answer")
            logs = [path.read_text() for path in (stack.work_dir / "run").rglob("engine-1.log")]
            text = "\n".join([stack.output, *logs])
            reads = len(compiled(stack.journal, "read")), len(compiled(stack.journal, "aot"))
        finally:
            stack.close()
        found = [name for name, line in _SERVED.items() if line in text]
        done = found[0] if found else RAN if reads[0] else "no seal"
        if code is None and done in _SERVED and reads != (0, 1):
            outcome.problems.append(f"serve: {done}, and {reads[0]} kernels of it were read")
        return _said("serve", text, code, done, outcome)


def _said(command: str, text: str, code: int | None, done: str, outcome: Outcome) -> str:
    """The last code of a command that failed, else `done`: Cog may say E2105 before the cause."""
    outcome.problems += [f"{command}: {what}" for what, sign in _NEVER.items() if sign in text]
    if not code:
        return done
    seen = re.findall(r"\bE[12]\d{3}\b", text)
    if not seen:
        outcome.problems.append(f"{command}: exit {code} without a code: {text[-300:]}")
    return seen[-1] if seen else f"exit {code}"


def try_each(wanted: str) -> Iterator[Outcome]:
    """Try the sound engine, and every tar that has `wanted` in its name."""
    with tempfile.TemporaryDirectory(prefix="cog-triton-tars-") as made:
        tars = _Tars(Path(made))
        yield tars.meet("none", tars.tar, tars.directory / "usual", "")
        for attack in ATTACKS:
            if wanted in attack.name:
                yield tars.strike(attack)
