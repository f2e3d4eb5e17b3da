#!/usr/bin/env python3
"""Run mutants of 24 modules with the tests of each: the licence to delete tests.

    scripts/mutants.py [MODULE ...]            # exits with 1 where a killed mutant survives now
    scripts/mutants.py --changed REF           # only modules whose source or tests have changed
    scripts/mutants.py --record [MODULE ...]   # makes new mutants, and writes tests/mutants.tsv

A mutant replaces one line of a module. The tests run in a copy of the checkout below .work/mutants.
A row of the table has the outcome of one mutant: killed, timeout (which counts as killed) or
survived. A re-run searches for the line by its text, within its function: `gone` is no failure.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mutations import mutations, place_of, with_line

CHECKOUT = Path(__file__).resolve().parents[1]
TABLE = "tests/mutants.tsv"
COUNT = 15
"""Mutants of a module."""
LEAST_S, TIMES = 60, 10
"""A mutant's time: at least so many seconds, and so many times what the tests take without it."""
PYTEST = "-m pytest -x -q -n 0 -p no:cacheprovider --hypothesis-seed=0"
APART = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
APART += ["--user", "--map-root-user"] if os.geteuid() else []
SHELL = """ulimit -d 6291456; mount -t tmpfs none /dev/shm && mount --bind "$2" "$2" &&
mount --bind "$1" "$1" && mount --bind "$3/.venv" "$1/.venv" && mount --rbind "$1" "$3" &&
mount -o remount,bind,ro / && cd "$3" && export PYTHONPATH="$3" TMPDIR="$2" PYTHONHASHSEED=0 &&
export HYPOTHESIS_STORAGE_DIRECTORY="$2/hypothesis" && shift 3 && "$@"; exit $?"""
"""Has the copy in the place of the checkout, and a machine to kill all processes of."""
Modules = dict[str, tuple[list[str], list[str]]]
MODULES: Modules = {
    name: (
        [f"cog_triton{source}.py" for source in sources.split(",")],
        [f"tests/{of}/test_{test}.py" for test in tests.split(",") for of in ("unit", "process")],
    )
    for name, sources, tests in map(
        str.split,
        """
        tar_members     /artifact/tar_members       engine_tar,tar_hostile
        engine_manifest /artifact/engine_manifest   engine_tar
        url_download    /download/url_download      fetch
        partial_file    /download/partial_file      fetch
        credentials     /oci/credentials            oci_pull
        image_manifest  /oci/image_manifest         oci_pull,oci_push
        translate       /builder/translate          translate
        checks          /builder/checks             build_checks
        plan            /builder/plan               build_checks
        package         /builder/package            build_package
        fatbin          _prune/fatbin               fatbin,prune_plan
        zero_edits      _prune/zero_edits           fatbin,prune_plan
        memory_sum      /sizing/memory_sum          sizing
        run_metrics     /bench/run_metrics          bench_metrics
        http_protocol   /front/http_protocol        front_requests,front_responses
        gates           /front/gate                 front_gates,front_upstreams
        keyring         /front/keyring              front_keyring
        detokenize      /text/detokenize            detokenize
        stop_strings    /text/stop_strings          stop_strings,bls_inputs,bls_responses,generate
        resume          /serving/resume             resume_table,resumed_generation
        admission       /serving/admission,/serving/ticket    admission,generate
        step_items      /engines/step_items         engine_messages
        reaper          /system/reaper              reaper
        settings        /settings/*          settings,work_dir,front_upstreams,server_run
        """.strip().splitlines(),
    )
}
"""Patterns of its sources and tests, by the name of a module."""


class Mutant(NamedTuple):
    """A row of the table; lines are without indentation and comments."""

    module: str
    function: str
    line: int
    original: str
    mutated: str
    outcome: str = ""
    test: str = ""


class Copy:
    """A copy of the checkout, in which sources are changed and tests run."""

    def __init__(self, checkout: Path, top: Path, scratch: Path) -> None:
        self.checkout, self.top, self.scratch = checkout, top, scratch
        listed = ["git", "-C", str(checkout), "ls-files", "-zco", "--exclude-standard"]
        for file in subprocess.check_output(listed, text=True).split("\0"):
            if (checkout / file).is_file():
                (top / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / file, top / file, follow_symlinks=False)
        (top / ".venv").mkdir()

    def files(self, patterns: list[str]) -> list[str]:
        """Files of these patterns."""
        found = [path for pattern in patterns for path in sorted(self.top.glob(pattern))]
        return [path.relative_to(self.top).as_posix() for path in found]

    def texts(self, sources: list[str]) -> dict[str, str]:
        """Texts of sources, by their paths."""
        return {source: (self.top / source).read_text("utf-8") for source in sources}

    def run(self, tests: list[str], limit: float) -> tuple[str, str]:
        """Outcome of these tests, and the first that fails."""
        for left in self.scratch.iterdir():
            shutil.rmtree(left, ignore_errors=True)
        shell = ["sh", "-c", SHELL, "sh", *map(str, (self.top, self.scratch, self.checkout))]
        with (self.scratch / "output").open("wb") as output:
            process = subprocess.Popen(
                [*APART, *shell, sys.executable, *PYTEST.split(), *tests],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                return "timeout", ""
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = (self.scratch / "output").read_text("utf-8", "replace")
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
        test = failed[0] if failed else f"exit code {code}: {text[-80:].strip()!r}"
        if code in (2, 3, 4, 5) or (failed and "::" not in test):
            return "unusable", test  # a file of tests cannot be imported
        return ("killed", test) if code else ("survived", "")

    @contextmanager
    def changed(self, source: str, number: int, mutated: str) -> Iterator[None]:
        """Have this text in a line of a source."""
        path = self.top / source
        before, times = path.read_text("utf-8"), path.stat()
        path.write_text(with_line(before, number, mutated), "utf-8")
        try:
            yield
        finally:
            path.write_text(before, "utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                compiled.unlink()


def main(arguments: list[str], checkout: Path = CHECKOUT, modules: Modules = MODULES) -> int:
    """Run or record mutants of the modules that the arguments name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("module", nargs="*", help=f"of {', '.join(modules)}; default: all")
    parser.add_argument("--record", action="store_true", help="make new mutants, write the table")
    parser.add_argument("--changed", metavar="REF", help="only what has changed since this commit")
    options = parser.parse_args(arguments)
    if unknown := set(options.module) - set(modules):
        parser.error(f"no such module: {', '.join(sorted(unknown))}; of {', '.join(modules)}")
    names = options.module or list(modules)
    if options.changed:
        command = ["git", "-C", str(checkout), "diff", "--name-only", options.changed]
        changed = subprocess.check_output(command, text=True).splitlines()
        both = {name: [*modules[name][0], *modules[name][1]] for name in names}
        names = [name for name in names if any(fnmatch.filter(changed, x) for x in both[name])]
    (work := checkout / ".work" / "mutants").mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    with (
        tempfile.TemporaryDirectory(dir=work, ignore_cleanup_errors=True) as top,
        tempfile.TemporaryDirectory(prefix="mut", ignore_cleanup_errors=True) as scratch,
    ):
        copy = Copy(checkout, Path(top), Path(scratch))
        for name in names:
            sources, tests = map(copy.files, modules[name])
            if not sources:
                print(f"{name}: gone", flush=True)
                continue
            start = time.monotonic()
            outcome, test = copy.run(tests, 600) if tests else ("without tests", "")
            if outcome != "survived":
                failures.append(f"{name}: its tests fail without a mutant: {outcome} {test}")
                print(failures[-1], flush=True)
                continue
            took = time.monotonic() - start
            print(f"{name}: {' '.join(tests)} pass in {took:.1f} s", flush=True)
            limit = max(LEAST_S, TIMES * took)
            if options.record:
                record(checkout, copy, name, sources, tests, limit)
            else:
                rows = [row for row in table(checkout) if row.module == name]
                failures += rerun(copy, rows, sources, tests, limit)
    print("\n".join(["", *failures]) if failures else "no killed mutant survives", flush=True)
    return bool(failures)


def record(
    checkout: Path, copy: Copy, name: str, sources: list[str], tests: list[str], limit: float
) -> None:
    """Make mutants of a module, run them, and write them into the table."""
    rows: list[Mutant] = []
    for source, function, number, original, mutated in mutations(copy.texts(sources)):
        with copy.changed(source, number, mutated):
            outcome, test = copy.run(tests, limit)
        if outcome != "unusable":
            rows.append(Mutant(name, function, number, original, mutated, outcome, test))
            print(f"{outcome:8} {source}:{number}: {original} -> {mutated} {test}", flush=True)
        if len(rows) == COUNT:
            break
    rows += (row for row in table(checkout) if row.module != name)
    rows.sort(key=lambda row: (row.module, row.line))
    lines = ["\t".join(map(str, row)) for row in (Mutant._fields, *rows)]
    (checkout / TABLE).write_text("\n".join([*lines, ""]), "utf-8")


def table(checkout: Path) -> list[Mutant]:
    """All rows."""
    path = checkout / TABLE
    lines = path.read_text("utf-8").splitlines()[1:] if path.exists() else []
    split = [line.split("\t") for line in lines]
    return [Mutant(name, function, int(line), *rest) for name, function, line, *rest in split]


def rerun(
    copy: Copy, rows: list[Mutant], sources: list[str], tests: list[str], limit: float
) -> list[str]:
    """Run killed mutants; what survives now, as lines."""
    failures = []
    for row in rows:
        if row.outcome == "survived":
            continue
        place = place_of(row.function, row.line, row.original, copy.texts(sources))
        outcome, test = "gone", ""
        if place:
            first = [row.test] if row.test.partition("::")[0] in tests else []
            with copy.changed(*place, row.mutated):
                outcome, test = copy.run([*first, *tests], limit)
                if first and outcome == "unusable":  # that test is no longer there
                    outcome, test = copy.run(tests, limit)
        at = "{}:{}".format(*place) if place else f"{row.module}:{row.line}"
        text = f"{outcome:8} {at}: {row.original} -> {row.mutated}"
        print(f"{text} {test}", flush=True)
        if outcome == "survived":
            failures.append(f"{text} (was killed by {row.test or 'its time'})")
    return failures


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(130))
    sys.exit(main(sys.argv[1:]))
