#!/usr/bin/env python3
"""Bump: vLLM, Triton or Cog to a version, in the checkout, with one report of what breaks.

    .venv/bin/python scripts/bump.py [--vllm V] [--triton V] [--cog V] [--offline] [--integration]

V is a version, or a wheel by path, which with --offline needs no index (coglet's wheel is taken
from beside Cog's). --triton is of nvidia-pytriton, which carries tritonserver. Raises pins,
resolves locks, sets up .venv, records vLLM's interface, and checks every use of what upstream has
not published (bump_hooks.py). The report is .work/bump/report.md, too; nothing is committed.
Exit status: 0 all holds, 1 something broke, 2 refused, 3 nothing broke, and something was not done.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bring_uv
from bump_hooks import BROKE, HELD, NOT_DONE, Row, hooks_of, interface_changes, vllm_hooks
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PINS = {
    "vllm": {"vllm": ["requirements/vllm.in"]},
    "triton": {"nvidia-pytriton": ["requirements/serve.in", "requirements/vllm.in"]},
    "cog": {"cog": ["pyproject.toml"], "coglet": ["pyproject.toml"]},
}
"""By option: the distributions, and the files that pin each."""
INTEGRATION = {
    "cog": ["test_predictions.py", "test_coglet_directory.py"],
    "triton": ["test_ensemble.py", "test_mock.py"],
}
RECORDS = "cog_triton/engines/vllm"
_INSTALL = ["pip", "install", "--quiet", "--no-deps"]


class Refused(Exception):
    """Reason for which nothing was begun."""


class Target:
    """What one option asks for: the version, and the wheel if it was given by path."""

    def __init__(self, option: str, text: str) -> None:
        self.option = option
        self.wheels: list[Path] = []
        names = list(PINS[option])
        path = Path(text)
        if path.suffix == ".whl":
            if not path.is_file():
                raise Refused(f"{text}: there is no such wheel")
            try:
                name, version, _, _ = parse_wheel_filename(path.name)
            except InvalidWheelFilename as error:
                raise Refused(str(error)) from None
            if name != names[0]:
                raise Refused(f"{path.name}: is a wheel of {name}; {option.upper()} is {names[0]}")
            if not zipfile.is_zipfile(path):
                raise Refused(f"{text}: is no whole wheel: no zip")
            self.version = str(version)
            self.wheels = [path.resolve()]
            for other in names[1:]:
                beside = sorted(path.parent.glob(f"{other}-{version}-*.whl"))
                if not beside:
                    raise Refused(f"{path.name}: no {other}-{version}-*.whl lies beside it")
                self.wheels.append(beside[0].resolve())
        else:
            try:
                self.version = str(Version(text))
            except ValueError:  # InvalidVersion, or a number that has too many digits
                raise Refused(
                    f"{option.upper()}={text[:80]}: is neither a version nor a wheel"
                ) from None

    def other_here(self) -> str | None:
        """The version that .venv has where it is another one; vLLM's tests have doubles of it."""
        importlib.invalidate_caches()
        try:
            here = importlib.metadata.version(next(iter(PINS[self.option])))
        except importlib.metadata.PackageNotFoundError:
            return None
        return here if here != self.version else None


class Bump:
    """One bump: its targets, what was done, and the report."""

    def __init__(self, targets: Sequence[Target], *, offline: bool, root: Path = ROOT) -> None:
        self.targets = targets
        self.offline = offline
        self.root = root
        self.work = root / ".work" / "bump"
        self.steps: list[Row] = []
        self.hooks: list[Row] = []
        self.changes: list[str] = []
        self.old: dict[str, str] = {}
        # Without .venv/bin in PATH, whose uv scripts/setup would take, and remove.
        self.environment = {**os.environ, **bring_uv.uv_settings()}

    def step(self, name: str, where: str, do: Callable[[], Row | None]) -> None:
        """Do a step, and keep how it ended; what it raises is its end, not ours."""
        print(f"bump: {name} ...", flush=True)
        try:
            row = do()
        except subprocess.CalledProcessError as error:
            told = f"{error.stdout or ''}{error.stderr or ''}".strip().splitlines()
            row = Row(name, where, NOT_DONE, " ".join(told[-3:]) or f"{shlex.join(error.cmd)}")
        except (OSError, SyntaxError, ValueError, subprocess.TimeoutExpired) as error:
            row = Row(name, where, BROKE, f"{type(error).__name__}: {error}")
        row = row or Row(name, where, HELD, "")
        self.steps.append(row)
        print(
            f"bump: {name}: {row.outcome}" + (f": {row.advice}" if row.advice else ""), flush=True
        )

    def run(self, *command: str | Path, timeout: float = 3600) -> str:
        """Output of a command; raises CalledProcessError."""
        words = [str(word) for word in command]
        return subprocess.run(
            words, cwd=self.root, env=self.environment, check=True, capture_output=True,
            text=True, stdin=subprocess.DEVNULL, timeout=timeout,
        ).stdout  # fmt: skip

    def pin(self) -> None:
        """Write the new pins."""
        for target in self.targets:
            for name, files in PINS[target.option].items():
                for file in files:
                    path = self.root / file
                    pattern = rf'(?m)((?:^|")){name}==([^"\s]+)'
                    text = path.read_text("utf-8")
                    found = re.findall(pattern, text)
                    if len(found) != 1:
                        raise ValueError(f"{file}: {len(found)} pins of {name}, which needs one")
                    self.old[target.option] = found[0][1]
                    new = re.sub(pattern, rf"\g<1>{name}=={target.version}", text)
                    path.write_text(new, "utf-8")

    def lock(self) -> Row | None:
        """Resolve the locks."""
        if self.offline:
            return Row("locks", "requirements/*.lock", NOT_DONE, "--offline: run `make lock` later")
        self.run("scripts/lock")
        return None

    def set_up(self) -> Row | None:
        """Make .venv of the new locks, or put the given wheels into it."""
        wheels = [wheel for one in self.targets if one.option != "vllm" for wheel in one.wheels]
        if not self.offline:
            self.run("scripts/setup")
            return None
        if not wheels:
            return Row(
                ".venv", "", NOT_DONE, "--offline, and no wheel was given: it has the old ones"
            )
        programs = self.root / ".venv" / "bin"
        self.run(
            programs / "uv", *_INSTALL, "--no-config", "--python", programs / "python", *wheels
        )
        return Row(".venv", "", HELD, "has the given wheels; `make setup` takes them out again")

    def source_of_vllm(self, target: Target) -> Path:
        """vLLM's Python sources, unpacked from its wheel."""
        wheels = target.wheels
        if not wheels:
            cache = self.work / "wheels"
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
            command += [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(35, 16, -1)]
            command += ["--python-version=3.12", "--dest", str(cache), f"vllm=={target.version}"]
            self.run(*command)
            wheels = sorted(cache.glob(f"vllm-{target.version}*.whl"))
        site = self.work / "site"
        shutil.rmtree(site, ignore_errors=True)
        with zipfile.ZipFile(wheels[0]) as archive:
            for name in archive.namelist():
                if name.startswith("vllm/") and name.endswith(".py"):
                    archive.extract(name, site)
        return site

    def record_vllm(self, target: Target) -> Row | None:
        """Record its interface, compare it with the last record, and check the hooks."""
        if self.offline and not target.wheels:
            return Row("vLLM's interface", "", NOT_DONE, "--offline: give its wheel, VLLM=FILE.whl")
        site = self.source_of_vllm(target)
        self.hooks += vllm_hooks(site, self.root)
        text = self.run(sys.executable, "scripts/record_vllm.py", site)
        minor = "_".join(target.version.split(".")[:2])
        path = self.root / RECORDS / f"argument_types_{minor}.json"
        old_minor = "_".join(self.old["vllm"].split(".")[:2])
        old = self.root / RECORDS / f"argument_types_{old_minor}.json"
        self.changes = interface_changes(old.read_text("utf-8"), text)
        old.unlink()
        path.write_text(text, "utf-8")
        advice = f"{len(self.changes)} changes, listed below" if self.changes else "as it was"
        return Row("vLLM's interface", str(path.relative_to(self.root)), HELD, advice)

    def check_hooks(self, *, integration: bool) -> None:
        """Run the tests of each place that uses what is not published."""
        for target in self.targets:
            rows = [
                self.tested(hook.name, hook.file, hook.tests, hook.advice)
                for hook in hooks_of(target.option, self.root)
            ]
            for name in INTEGRATION.get(target.option, []) if integration else []:
                file = f"tests/integration/{name}"
                rows.append(self.tested(name, file, [file], "its failures say what broke"))
            if other := target.other_here():
                why = f"holds with {other}, which is installed: not tried with {target.version}"
                rows = [
                    Row(one.name, one.file, NOT_DONE, why) if one.outcome == HELD else one
                    for one in rows
                ]
            self.hooks += rows

    def tested(self, name: str, file: str, tests: Sequence[str], advice: str) -> Row:
        """The row of a hook, by its tests."""
        if not tests:
            return Row(name, file, NOT_DONE, "it has no test of its own: read it")
        print(f"bump: {file} by {', '.join(tests)}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command, cwd=self.root, env=self.environment, capture_output=True, text=True
            )
        except OSError as error:  # a set-up that broke off leaves no Python
            return Row(name, file, NOT_DONE, f"its tests cannot be run: {error}")
        if done.returncode == 0:
            return Row(name, file, HELD, "")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", done.stdout, re.MULTILINE)
        told = "; ".join(f"{test}: {why}" if why else test for test, why in failed[:3])
        told = told or (done.stdout + done.stderr).strip()[-300:]
        return Row(name, file, BROKE, f"{told}. {advice}")

    def old_names(self) -> list[str]:
        """Lines that still name an old version, but those of locks and generated files."""
        found = []
        for target in self.targets:
            old = self.old.get(target.option, "")
            if not old or old == target.version:
                continue
            command = ["git", "grep", "-nIF", old, "--", ".", ":!*.lock", ":!nix/wheels.json"]
            command += [":!CHANGELOG.md", ":!*.json", ":!docs/gpu*"]
            done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
            found += [line[:140] for line in done.stdout.splitlines()]
        return found

    def report(self) -> str:
        """The report, as Markdown."""
        was = {one.option: self.old.get(one.option, "?") for one in self.targets}
        titles = [f"{one.option} {was[one.option]} to {one.version}" for one in self.targets]
        broken = [row for row in (*self.steps, *self.hooks) if row.outcome == BROKE]
        undone = [row for row in (*self.steps, *self.hooks) if row.outcome == NOT_DONE]
        lines = [f"# Bump: {', '.join(titles)}", ""]
        lines += [
            f"{len(broken)} broke, {len(undone)} not done, {len(self.hooks)} hooks looked at."
        ]
        for title, rows in (("Broke", broken), ("Not done", undone)):
            if rows:
                lines += ["", f"## {title}", "", "| what | file | what to do |", "|---|---|---|"]
                lines += [f"| {row.name} | {row.file} | {_cell(row.advice)} |" for row in rows]
        lines += ["", "## All", "", "| what | file | outcome |", "|---|---|---|"]
        lines += [
            f"| {one.name} | {one.file} | {one.outcome} |" for one in (*self.steps, *self.hooks)
        ]
        if self.changes:
            lines += ["", "## What changed in vLLM's interface", "", *self.changes]
        if names := self.old_names():
            lines += ["", "## Lines that name an old version", "", *(f"- `{one}`" for one in names)]
        lines += ["", "## By hand", "", *(f"- {one}" for one in self.by_hand())]
        return "\n".join(lines) + "\n"

    def by_hand(self) -> list[str]:
        """What no script can do."""
        found = ["`make test`"]
        options = [target.option for target in self.targets]
        if "vllm" in options:
            found += [
                "`tests/doubles/vllm`: the record's names",
                f"`{RECORDS}/tested_versions.json`: a row once `scripts/verify-gpu` ran on a GPU",
                "`tests/gpu/vllm_interface.py` in an environment with this vLLM",
                "docs/vllm.md, nix/vllm-image.json",
            ]
        if "triton" in options:
            found.append("front/triton_gate.py: what the new Triton's HTTP API adds")
        return found

    def make(self, *, integration: bool) -> int:
        """Do it all; returns the exit status."""
        self.work.mkdir(parents=True, exist_ok=True)
        self.step("pins", ", ".join(sorted(_pinned(self.targets))), lambda: self.pin())
        if self.steps[-1].outcome == HELD:
            self.step("locks", "requirements/*.lock", self.lock)
            self.step(".venv", "", self.set_up)
            for target in self.targets:
                if target.option == "vllm":
                    name, script = "vLLM's interface", "scripts/record_vllm.py"
                    self.step(name, script, lambda target=target: self.record_vllm(target))  # type: ignore[misc]
            self.check_hooks(integration=integration)
        text = self.report()
        (self.work / "report.md").write_text(text, "utf-8")
        print(
            f"\n{text}\nbump: the report is .work/bump/report.md; git diff shows what was written"
        )
        outcomes = {row.outcome for row in (*self.steps, *self.hooks)}
        return 1 if BROKE in outcomes else 3 if NOT_DONE in outcomes else 0


def _pinned(targets: Sequence[Target]) -> set[str]:
    return {file for one in targets for files in PINS[one.option].values() for file in files}


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Parse the command line, and bump."""
    parser = argparse.ArgumentParser(description="Raise versions.", allow_abbrev=False)
    for option, names in PINS.items():
        parser.add_argument(
            f"--{option}", metavar="V", help=f"version or wheel of {next(iter(names))}"
        )
    parser.add_argument("--offline", action="store_true", help="without a package index")
    parser.add_argument("--integration", action="store_true", help="with real servers, minutes")
    given: Any = parser.parse_args(arguments)
    try:
        asked = [(option, getattr(given, option)) for option in PINS]
        targets = [Target(option, text) for option, text in asked if text]
        if not targets:
            raise Refused("which one? VLLM=0.34.0, TRITON=0.8.0 (nvidia-pytriton) or COG=0.24.0")
    except Refused as refusal:
        print(f"bump: refused: {refusal}", file=sys.stderr)
        return 2
    try:
        return Bump(targets, offline=given.offline, root=root).make(integration=given.integration)
    except KeyboardInterrupt:
        print("\nbump: stopped: git diff shows what was written, and no report", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
