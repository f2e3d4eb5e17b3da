"""Run the suites that take too long for CI, one after another, and write nightly.json.

    make nightly                           # every suite
    make nightly SUITES="stores slurm"     # these; results of the same commit stay in the file

nightly.json has the commit, the date, and each suite with its result (passed, failed or not run),
its seconds, and the reason of the last two. A suite that needs something that this machine lacks is
not run. A suite's output is in .work/nightly/NAME.log. Ctrl-C stops the suite that runs and keeps
the results of the others. The exit status is 1 if a suite failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, LOGS = ROOT / "nightly.json", ROOT / ".work" / "nightly"
MOST_COMMITS = 40
"""Commits after which results are old."""
PYTEST = ".venv/bin/python -m pytest -q -n 2 --dist loadgroup"
SUITES = {
    "properties": f"{PYTEST} tests/unit -m hypothesis --hypothesis-profile nightly",
    "long": f"{PYTEST} -m nightly",
    "tools": "make test-tools",
    "mutants": "make mutants",
    "stores": "make test-stores",
    "slurm": "scripts/setup-slurm && make test-slurm",
    "clients": "make test-clients CLIENT=rest",
    "bench-against": 'make bench-against ARGS="--rounds 7 --seconds 3 --hold"',
    "attack": 'make attack ARGS="--inputs 20000"',
    "faults": 'make faults ARGS="--minutes 20"',
    "kubernetes": "make test-kubernetes",
    "upstream": "make test-upstream",
}
"""Each suite's command, for a shell; one that changes no other's conditions."""
NEEDS = {
    "kubernetes": ("KUBE_BIN", "KUBECONFIG"),
    "upstream": ("TRTLLM",),
}
"""Suites with the variables of which they need one."""


def main() -> int:
    """Run what is asked for; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; all")
    parser.add_argument("--age", action="store_true", help="warn if nightly.json is old, then end")
    options = parser.parse_args()
    if options.age:
        print(f"nightly: {age()}")
        return 0
    if unknown := set(options.suites) - SUITES.keys():
        parser.error(f"unknown suite {', '.join(sorted(unknown))}: must be of {', '.join(SUITES)}")
    if changed := git("status", "--porcelain", "--", ".", ":!docs", f":!{RESULTS.name}"):
        print(
            f"nightly: commit these first, for results name a commit:\n{changed}", file=sys.stderr
        )
        return 2
    results = read_results()
    try:
        for name in options.suites or SUITES:
            results["suites"][name] = result_of(name)
            RESULTS.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    except KeyboardInterrupt:
        print("nightly: interrupted", file=sys.stderr)
        return 130
    failed = [name for name, one in results["suites"].items() if one["result"] == "failed"]
    print(f"nightly: failed: {', '.join(failed)}" if failed else "nightly: no suite failed")
    return 1 if failed else 0


def git(*words: str) -> str:
    """The output of a git command, without the last line's end."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n")


def read_results() -> dict[str, Any]:
    """What the file has of this commit; else all suites as not run."""
    commit = git("rev-parse", "HEAD")
    missing = {name: {"result": "not run", "why": "not asked for"} for name in SUITES}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    results: dict[str, Any] = {"commit": commit, "date": date, "suites": missing}
    if RESULTS.exists():
        before = json.loads(RESULTS.read_text("utf-8"))
        if before["commit"] == commit:
            results["suites"] |= before["suites"]
    return results


def result_of(name: str) -> dict[str, Any]:
    """Run a suite; its result, its seconds and, unless it passed, why."""
    needs = NEEDS.get(name, ())
    given = {word: os.environ[word] for word in needs if os.environ.get(word)}
    if needs and not given:
        print(f"nightly: {name}: not run", flush=True)
        return {"result": "not run", "why": f"{' or '.join(needs)} is not given"}
    log = LOGS / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"nightly: {name}: begun ({log.relative_to(ROOT)})", flush=True)
    began = time.monotonic()
    with log.open("wb") as output:
        # In the group of this process, so that Ctrl-C reaches it.
        code = subprocess.run(
            ["sh", "-c", SUITES[name]],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        ).returncode
    seconds = round(time.monotonic() - began)
    if code == 0:
        print(f"nightly: {name}: passed in {seconds} s", flush=True)
        return {"result": "passed", "seconds": seconds}
    last = log.read_text("utf-8", "replace").splitlines()[-20:]
    print(f"nightly: {name}: failed in {seconds} s:", *last, sep="\n  ", flush=True)
    return {"result": "failed", "seconds": seconds, "why": f"exit status {code}"}


def age() -> str:
    """How many commits the results are old, with a warning beyond `MOST_COMMITS`."""
    if not RESULTS.exists():
        return f"WARNING: there is no {RESULTS.name}: run make nightly"
    commit = json.loads(RESULTS.read_text("utf-8"))["commit"]
    try:
        commits = int(git("rev-list", "--count", f"{commit}..HEAD"))
    except subprocess.CalledProcessError:
        return f"WARNING: commit {commit[:8]} of {RESULTS.name} is not in this checkout"
    found = f"{RESULTS.name} is {commits} commits old"
    return f"WARNING: {found}: run make nightly" if commits > MOST_COMMITS else found


if __name__ == "__main__":
    sys.exit(main())
