"""Hostile engine.tars of sealed vLLM engines, given to every command that reads one.

Each is made from one that the double of vLLM has built, with a pickle or a library in it that makes
a directory, the mark, when it is opened. `inspect`, `build --add-seal` and `serve` must refuse it
with a code, or leave its seal unread with a warning and answer right; and nothing of it may run,
take long, or take memory that the sound engine does not.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _report import as_data, say
from sealed_engines import (
    CONFIG,
    SEAL,
    SealedBuilds,
    SealedStack,
    compiled,
    copied,
    digest_of,
    unpacked,
)
from stack import processes_of, text_of

from cog_triton.artifact.engine_manifest import MANIFEST_NAME, sha256_of
from cog_triton.engines.vllm.sealed_caches import AOT, GROUP

PLACE = f"sealed/{SEAL}"
UNREAD, UNUSED, RAN = "left unread", "no seal is used", "ran, as it is pinned"
_SERVED = {UNREAD: "its seal is left unread: ", UNUSED: "no seal of the engine is used: "}
_LEAST_S, _ROOM, _DEADLINE_S = 30.0, 64 << 20, 240.0
_TIMES = 4
_TRACEBACK = "Traceback (most recent call last)"
_ESCAPE = "\x1b["
_EMPTY = {"size": 0, "sha256": "0" * 64}


class _Runs:
    """What a pickle can do."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


_LIBRARY = """
#include <sys/stat.h>
__attribute__((constructor)) static void run(void) { mkdir("%s", 0700); }
"""


@dataclass(frozen=True)
class Copy:
    """A copy of the sound engine's directory, which an attack changes."""

    engine: Path
    mark: Path

    def find(self, pattern: str) -> str:
        """Name of the seal's first file of a pattern."""
        found = sorted((self.engine / PLACE).rglob(pattern))[0]
        return found.relative_to(self.engine).as_posix()

    def write(self, name: str, content: bytes) -> None:
        """Give a file other bytes, of which the manifest knows nothing."""
        (self.engine / name).write_bytes(content)

    def pickle(self) -> None:
        """Make the compiled model one that runs when it is read."""
        self.write(self.find("model"), pickle.dumps(_Runs(self.mark)))

    def library(self) -> None:
        """Put a launcher beside a kernel, as Triton compiles them, that runs when it is loaded."""
        place = (self.engine / self.find("*.cubin")).with_name("cuda_utils.so")
        source = place.with_suffix(".c")
        source.write_text(_LIBRARY % self.mark)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", place, source], check=True)
        source.unlink()

    def manifest(self, change: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        """Write a manifest with the right sums of all files, changed."""
        path = self.engine / MANIFEST_NAME
        told = json.loads(path.read_text())
        files = {file.relative_to(self.engine).as_posix(): file
                 for file in self.engine.rglob("*") if file.is_file() and file != path}  # fmt: skip
        told["files"] = {
            name: {"size": file.stat().st_size, "sha256": sha256_of(file)}
            for name, file in sorted(files.items())
        }
        change(told)
        path.write_text(json.dumps(told))


Make = Callable[[Copy], None]
Members = Callable[[tarfile.TarFile], None]


@dataclass(frozen=True)
class Attack:
    """One tar: how its directory is changed, what its tar has more, and how `serve` meets it.

    `pin` is what SEAL_SHA256 has: nothing, the digest of the "sound" engine, or the tar's "own".
    """

    name: str
    make: Make
    serve: str
    pin: str = "own"
    members: Members = lambda _: None


def _with(*steps: Callable[[Copy], None]) -> Make:
    def make(copy: Copy) -> None:
        for step in steps:
            step(copy)

    return make


def _lie(change: Callable[[dict[str, Any]], None]) -> Make:
    """The hostile pickle, and a manifest that has its sum and a lie."""
    return _with(Copy.pickle, lambda copy: copy.manifest(change))


def _group(content: Callable[[Copy], str]) -> Make:
    """A file of Triton's that says which files a kernel has, and a manifest that has its sum."""
    return _with(
        Copy.library,
        lambda copy: copy.write(copy.find(f"{GROUP}*.json"), content(copy).encode()),
        Copy.manifest,
    )


def _environment(**values: object) -> Make:
    return _lie(lambda told: told["seals"][SEAL]["environment"].update(values))


def _file(name: str) -> Make:
    return _lie(lambda told: told["files"].update({name: _EMPTY}))


def _model_entry(**values: object) -> Make:
    def change(told: dict[str, Any]) -> None:
        (model,) = (name for name in told["files"] if name.endswith("/rank_0_0/model"))
        told["files"][model].update(values)

    return _lie(change)


def _weights(**values: Any) -> Make:
    given = {"source": "/", "files": {"x.safetensors": _EMPTY}, **values}
    return _lie(lambda told: told.update(weights=given))


def _member(name: str, *, link: str = "", size: int = 0) -> Members:
    header = tarfile.TarInfo(name)
    header.size = size
    if link:
        header.type, header.linkname = tarfile.SYMTYPE, link

    def add(tar: tarfile.TarFile) -> None:
        if size > 1 << 20:  # said, and not there
            tar.fileobj.write(header.tobuf())  # type: ignore[union-attr]
        else:
            tar.addfile(header, io.BytesIO(bytes(size)))

    return add


def _paths(path: str) -> Make:
    return _group(lambda _copy: json.dumps({"child_paths": {Path(path).name: path}}))


def _large(copy: Copy) -> None:
    copy.manifest(lambda told: told.update(model_id="x" * (32 << 20)))


def _deep(copy: Copy) -> None:
    (copy.engine / MANIFEST_NAME).write_text('{"seals":' + "[" * 200_000)


_PICKLED = _with(Copy.pickle, Copy.manifest)
ATTACKS: tuple[Attack, ...] = (
    Attack("a pickle, pinned", _PICKLED, RAN),
    Attack("a pickle", _PICKLED, UNREAD, pin=""),
    Attack("a pickle, the sound engine pinned", _PICKLED, UNREAD, pin="sound"),
    Attack("a pickle under the sound manifest", Copy.pickle, "E1306", pin="sound"),
    Attack("a library", _with(Copy.library, Copy.manifest), UNREAD, pin=""),
    Attack("a library that no manifest names", Copy.library, "E1306", pin="sound"),
    Attack(
        "a kernel of the same size",
        lambda copy: copy.write(copy.find("*.cubin"), b"\x7fELF" + bytes(13)),
        "E1306",
        pin="sound",
    ),
    Attack("a kernel at /etc/passwd", _paths("/etc/passwd"), "E1306"),
    Attack("a kernel above its directory", _paths("../../../x"), "E1306"),
    Attack("a kernel that is not there", _paths("absent.cubin"), "E1306"),
    Attack("a kernel's group without an end", _group(lambda _: "[" * 500_000), "E1306"),
    Attack("another size", _model_entry(size=1), "E1306"),
    Attack("a size of 2^60", _model_entry(size=1 << 60), "E1306"),
    Attack("a size below 0", _model_entry(size=-1), "E1306"),
    Attack("another sum", _model_entry(sha256="0" * 64), "E1306"),
    Attack("a file above the engine", _file(f"{PLACE}/../../../../trusted-seals/x"), "E1306"),
    Attack("a file of the machine", _file("/etc/passwd"), "E1306"),
    Attack("weights above the engine", _weights(files={"../x.bin": _EMPTY}),
           "E1306"),
    Attack("weights of the whole machine", _weights(), "E1306"),
    Attack("variables of the loader", _lie(lambda told: told.update(variables={"LD_PRELOAD": "x"})),
           "E1306"),
    Attack("another hash of vLLM's",
           _lie(lambda told: told["seals"][SEAL].update(aot=["0" * 64])), "E1306"),
    Attack("another SM", _environment(sm=100), UNUSED),
    Attack("another GPU", _environment(gpu_name="NVIDIA H20"), UNUSED),
    Attack("other packages", _environment(packages="0" * 64), UNUSED),
    Attack("an SM of 2^40", _environment(sm=1 << 40), "E1306"),
    Attack("a GPU that clears the screen", _environment(gpu_name=f"{_ESCAPE}2J"), "E1306"),
    Attack("a driver of 5000 digits",
           _lie(lambda told: told["seals"][SEAL].update(driver="9" * 5000)), "E1306"),
    Attack("a manifest of 32 MB", _large, "E1306"),
    Attack("a manifest without an end", _deep, "E1306"),
    Attack("a member above the engine", _PICKLED, "E1306",
           members=_member(f"{PLACE}/../../../../trusted-seals/x")),
    Attack("a link out of the engine", _PICKLED, "E1306",
           members=_member(f"{PLACE}/{AOT}/x", link="../../../../../../etc/passwd")),
    Attack("a member that is there twice", _PICKLED, "E1306", members=_member("model.json")),
    Attack("a member of 1 TB", _PICKLED, "E1306", members=_member("x", size=1 << 40)),
)  # fmt: skip
"""All tars; the first one shows that what they hold would run."""


@dataclass(slots=True)
class Outcome:
    """What the commands said of a tar: a code, or what they did; `problems` must not be."""

    name: str
    inspect: str = ""
    added: str = ""
    served: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0
    problems: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """As data."""
        return {**as_data(self), "failed": bool(self.problems)}


class _Tars:
    """The sound engine, and what it costs, which the hostile ones are compared with."""

    def __init__(self, directory: Path, growth: float) -> None:
        self.directory = directory
        self.builds = SealedBuilds(directory / "sound")
        self.builds.build()
        self.sound = unpacked(self.builds.directory / "engine.tar", directory / "engine")
        self._growth = growth
        self._building = threading.Lock()  # builds of one work directory take turns
        self.usual = Outcome("none")
        self._meet(self.builds.directory / "engine.tar", directory / "usual", "", self.usual)

    def strike(self, number: int, attack: Attack) -> Outcome:
        """Make the tar, give it to each command, and say what became of it."""
        place = self.directory / f"{number:02}"
        copy = Copy(copied(self.sound, place / "engine"), place / "mark")
        attack.make(copy)
        tar = place / "hostile.tar"
        with tarfile.open(tar, "w") as file:
            attack.members(file)
            for path in sorted(copy.engine.rglob("*")):
                if path.is_file():
                    file.add(path, path.relative_to(copy.engine).as_posix())
        pins = {"": "", "sound": digest_of(self.sound), "own": digest_of(copy.engine)}
        outcome = Outcome(attack.name)
        self._meet(tar, place, pins[attack.pin], outcome)
        self._judge(outcome, attack, copy.mark)
        shutil.rmtree(place)
        return outcome

    def _meet(self, tar: Path, place: Path, pin: str, outcome: Outcome) -> None:
        place.mkdir(exist_ok=True)
        began = time.monotonic()
        begin = [sys.executable, "-m", "cog_triton"]
        outcome.inspect = self._run([*begin, "inspect", str(tar)], outcome, "told")
        with self._building:
            command = self.builds.command(CONFIG, "--add-seal", str(tar), tar="both.tar")
            outcome.added = self._run(command, outcome, "added, unread")
        outcome.served = self._serve(tar, place, pin, outcome)
        outcome.seconds = time.monotonic() - began

    def _run(self, command: list[str], outcome: Outcome, done: str) -> str:
        """Run a command to its end: its code, or `done`."""
        environment = {**self.builds.environment, "TMPDIR": str(self.directory)}
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            process = subprocess.Popen(
                command, cwd=self.builds.directory, env=environment, stdout=log, stderr=log
            )
            end = time.monotonic() + _DEADLINE_S
            while process.poll() is None:
                if time.monotonic() > end:
                    process.kill()
                outcome.megabytes = max(
                    [outcome.megabytes, *_peaks(self.builds.directory / "home")]
                )
                time.sleep(0.1)
            log.seek(0)
            text = log.read()
        return self._said(command[3], text, process.returncode, done, outcome)

    def _serve(self, tar: Path, place: Path, pin: str, outcome: Outcome) -> str:
        stack = SealedStack(place / "server", self.builds, tar, SEAL_SHA256=pin)
        stack.start()
        try:
            assert stack.process is not None
            end = time.monotonic() + _DEADLINE_S
            while stack.process.poll() is None and "Ready in" not in stack.output:
                if time.monotonic() > end:
                    outcome.problems.append(f"serve: neither ready nor ended in {_DEADLINE_S:g} s")
                    break
                outcome.megabytes = max([outcome.megabytes, *_peaks(stack.work_dir)])
                time.sleep(0.1)
            code = stack.process.poll()
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
        return self._said("serve", text, code, done, outcome)

    def _said(self, command: str, text: str, code: int | None, done: str, outcome: Outcome) -> str:
        for sign, what in ((_TRACEBACK, "a traceback"), (_ESCAPE + "2J", "a terminal's escape")):
            if sign in text:
                outcome.problems.append(f"{command}: {what}")
        if not code:
            return done
        told = re.findall(r"\bE[12]\d{3}\b", text)
        if not told:
            outcome.problems.append(f"{command}: exit {code} without a code: {text[-300:]}")
        return told[0] if told else f"exit {code}"

    def _judge(self, outcome: Outcome, attack: Attack, mark: Path) -> None:
        problems, usual = outcome.problems, self.usual
        if outcome.served != attack.serve:
            problems.append(f"serve: {outcome.served}, not {attack.serve}")
        if mark.exists() != (attack.serve == RAN):
            problems.append(
                "nothing ran, so nothing was tried" if attack.serve == RAN else "it ran"
            )
        for at in (self.builds.directory / "home", mark.parent / "server" / "work"):
            if (at / "trusted-seals" / "x").exists():
                problems.append(f"{at}: trusts what the tar says")
        if outcome.seconds > usual.seconds * _TIMES + _LEAST_S:
            problems.append(f"{outcome.seconds:.0f} s, and {usual.seconds:.0f} s without")
        if outcome.megabytes > usual.megabytes * self._growth + _ROOM / 1e6:
            problems.append(f"{outcome.megabytes:.0f} MB, and {usual.megabytes:.0f} MB without")


def _peaks(work_dir: Path) -> Iterator[float]:
    """Megabytes that each process with this COG_TRITON_WORK_DIR has held at most so far."""
    for pid in processes_of(work_dir):
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            yield int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def try_each(wanted: str, jobs: int, growth: float) -> list[Outcome]:
    """Try every tar that has `wanted` in its name, and the sound one before."""
    with tempfile.TemporaryDirectory(prefix="cog-triton-tars-") as made:
        tars = _Tars(Path(made), growth)
        chosen = [one for one in enumerate(ATTACKS) if wanted in one[1].name]
        say(f"the sound engine: {shown(tars.usual)}")

        def strike(one: tuple[int, Attack]) -> Outcome:
            outcome = tars.strike(*one)
            print(shown(outcome), flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            return [tars.usual, *pool.map(strike, chosen)]


def shown(outcome: Outcome) -> str:
    """One line, and one for each problem."""
    told = (
        f"{'FAILED ' if outcome.problems else ''}{outcome.name}: inspect {outcome.inspect},"
        f" --add-seal {outcome.added}, serve {outcome.served}; {outcome.seconds:.1f} s,"
        f" {outcome.megabytes:.0f} MB"
    )
    return "\n    ".join([told, *outcome.problems])
