"""What clients see: recorded requests and their answers, asked again of any commit.

Requests are in `*.yaml`, answers beside them in `answers/`. Servers are started one after the
other, each with the mock engine, on free ports of 127.0.0.1.

    make corpus                              # this tree
    make corpus REF=4ade877b                 # another commit
    make corpus ARGS="--only predictions,openai/chat-stream"
    make corpus ARGS=--keep                  # record: the change is meant
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import clean_environment  # noqa: E402
from stack import Stack  # noqa: E402

from .normal import differences, written  # noqa: E402
from .steps import Case  # noqa: E402

_SHOWN = 400
_LONG_S = 10


def read(name: str) -> Any:
    return yaml.load((HERE / f"{name}.yaml").read_bytes(), yaml.CSafeLoader)


def server(place: Path, work_dir: Path, settings: dict[str, Any]) -> Stack:
    """A server of the tree at `place`, which is not started yet."""
    python = place / ".venv" / "bin" / "python"
    named = {"tree": str(place), "here": str(HERE)}
    values = {name: str(value).format(**named) for name, value in settings["environment"].items()}
    stack = Stack(work_dir, None, **values)
    stack.command = [str(python), *settings["command"]]
    stack.cwd = place / settings.get("directory", ".")
    stack.environment["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    return stack


def recorded(case: dict[str, Any], defaults: dict[str, Any], stack: Stack) -> Any:
    began = time.monotonic()
    try:
        return Case(case, defaults, stack).run()
    except Exception as error:  # noqa: BLE001
        return {"no record": f"{type(error).__name__}: {error}"}
    finally:
        if not case.get("slow") and (took := time.monotonic() - began) > _LONG_S:
            print(f"{case['name']}: {took:.0f} s", file=sys.stderr)


def of_server(place: Path, name: str, settings: dict[str, Any], only: list[str]) -> Iterator[Any]:
    """(file, case, record) of each case that is asked of one server."""
    chosen = []
    for file in settings["files"]:
        surface = read(file)
        defaults = {"headers": settings.get("headers", {}), **surface.get("defaults", {})}
        for case in surface["cases"]:
            path = f"{file}/{case['name']}"
            if not only or any(path.startswith(word) for word in only):
                chosen.append((file, case, defaults))
    if not chosen:
        return
    with tempfile.TemporaryDirectory(prefix="cog-triton-corpus-") as scratch:
        stack = server(place, Path(scratch) / "work", settings)
        began = time.monotonic()
        try:
            if settings.get("started", True):
                stack.start()
                stack.until_ready()
            with ThreadPoolExecutor(32) as pool:
                slow = [
                    (file, case["name"], pool.submit(recorded, case, defaults, stack))
                    for file, case, defaults in chosen
                    if case.get("slow")
                ]
                for file, case, defaults in chosen:
                    if not case.get("slow"):
                        yield file, case["name"], recorded(case, defaults, stack)
                for file, named, work in slow:
                    yield file, named, work.result()
        finally:
            stack.close()
    print(f"{name}: {len(chosen)} cases, {time.monotonic() - began:.0f} s", file=sys.stderr)


def report(path: str, expected: Any, found: Any) -> bool:
    """Print where two records differ; returns whether they do."""
    fields = list(differences(expected, found))
    for field, old, new in fields:
        print(f"{path}: {field or '(record)'}")
        print(f"  expected {shown(old, new)}\n  found    {shown(new, old)}")
    return bool(fields)


def shown(value: Any, other: Any = "") -> str:
    """A value in short: of a long one the part that differs from another."""
    text, beside = (json.dumps(each, ensure_ascii=False) for each in (value, other))
    pairs = enumerate(zip(text, beside, strict=False))
    same = next((place for place, (one, two) in pairs if one != two), 0)
    start = max(0, same - 60) if len(text) > _SHOWN else 0
    return "..." * (start > 0) + text[start : start + _SHOWN] + "..." * (len(text) > start + _SHOWN)


def main() -> int:
    parser = argparse.ArgumentParser(prog="corpus", description=__doc__.splitlines()[0])
    parser.add_argument("ref", nargs="?", help="the commit to ask; by default this tree")
    parser.add_argument("--only", default="", help="files, or FILE/CASE, with commas between")
    parser.add_argument("--keep", action="store_true", help="record the answers")
    args = parser.parse_args()
    clean_environment.clean()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place = ROOT
    if args.ref:
        import against_commit

        place = against_commit.checkout(args.ref)
    only = [word for word in args.only.split(",") if word]
    found: dict[str, dict[str, Any]] = {}
    wrong = count = 0
    for name, settings in read("servers").items():
        for file, case, record in of_server(place, name, settings, only):
            found.setdefault(file, {})[case] = record
    for file, records in found.items():
        path = HERE / "answers" / f"{file}.json"
        kept = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        for case, record in records.items():
            count += 1
            failed = isinstance(record, dict) and "no record" in record
            if failed or (not args.keep and case not in kept):
                print(f"{file}/{case}: {shown(record) if failed else 'no answer is recorded'}")
                wrong += 1
            else:
                wrong += report(f"{file}/{case}", kept.get(case, record), record) and not args.keep
        if args.keep:
            names = [case["name"] for case in read(file)["cases"]]
            kept |= records
            ordered = {case: kept[case] for case in names if case in kept}
            path.write_text(written(ordered) + "\n", "utf-8")
        elif not only and (lost := kept.keys() - records.keys()):
            print(f"{file}: recorded, but no cases any more: {', '.join(sorted(lost))}")
            wrong += 1
    print(f"{count} cases, {wrong} differ" if not args.keep else f"{count} cases recorded")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
