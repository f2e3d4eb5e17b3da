"""Run a command that outlives the call which starts it, over a copy of this tree; follow it.

    scripts/run-detached ROOT SECONDS [COMMAND...]

With COMMAND: copies this tree to ROOT/tree, and starts COMMAND there in a session of its own, with
OUT=ROOT/out. Then, and without COMMAND: shows what it prints for at most SECONDS, and copies
ROOT/out and the servers' logs to $OUT. Ends earlier when the command does, with its exit code; with
0 while it runs. COMMAND `stop` ends it by SIGTERM. Needs Python 3.11 or newer, nothing else.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]
_LEFT_BEHIND = shutil.ignore_patterns(".*", "docs", "result-*", "result", "dist")
_EVERYWHERE = shutil.ignore_patterns("__pycache__")
_POLL_S = 0.5
_COPY_S = 5.0
_LOG = 400_000
_RUN = 'trap : TERM; cd "$1" && shift && { "$@"; echo $? >"$0.new"; mv "$0.new" "$0"; }'


def start(root: Path, command: list[str]) -> None:
    """Start `command`; refuses while an earlier one runs."""
    if running(root):
        raise SystemExit(f"run-detached: {root}: a command still runs; stop it first")
    tree, out = root / "tree", root / "out"
    for old in (root / "code", root / "run.log", root / "run.seen"):
        old.unlink(missing_ok=True)
    shutil.rmtree(tree, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)

    def skip(directory: str, names: list[str]) -> set[str]:
        top = set(_LEFT_BEHIND(directory, names)) if Path(directory) == _REPOSITORY else set()
        return top | set(_EVERYWHERE(directory, names))

    shutil.copytree(_REPOSITORY, tree, ignore=skip, symlinks=True)
    with (root / "run.log").open("wb") as log:
        process = subprocess.Popen(
            ["sh", "-c", _RUN, str(root / "code"), str(tree), *command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "OUT": str(out)},
        )  # fmt: skip
    (root / "run.pid").write_text(str(process.pid))


def running(root: Path) -> bool:
    """Whether a command was started and has not ended."""
    if (root / "code").is_file() or not (root / "run.pid").is_file():
        return False
    try:
        state = Path(f"/proc/{(root / 'run.pid').read_text()}/stat").read_text()
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def stop(root: Path, patience_s: float = 90) -> None:
    """SIGTERM to the command's session; SIGKILL after `patience_s` seconds."""
    pid = int((root / "run.pid").read_text())
    for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5)):
        deadline = time.monotonic() + wait_s
        if running(root):
            os.killpg(pid, number)
        while running(root) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def follow(root: Path, seconds: float) -> int:
    """Show the command's output; returns its exit code, 0 while it runs."""
    deadline, copied = time.monotonic() + seconds, 0.0
    with (root / "run.log").open(encoding="utf-8", errors="replace") as log:
        seen = root / "run.seen"
        log.seek(int(seen.read_text()) if seen.is_file() else 0)
        while True:
            ended = not running(root)
            sys.stdout.write(log.read())
            sys.stdout.flush()
            if time.monotonic() - copied > _COPY_S or ended:
                bring(root)
                copied = time.monotonic()
            if ended or time.monotonic() > deadline:
                seen.write_text(str(log.tell()))
                break
            time.sleep(_POLL_S)
    if not ended:
        print(f"run-detached: it still runs; scripts/run-detached {root} SECONDS follows it")
        return 0
    code = root / "code"
    print("run-detached: it has ended", flush=True)
    return int(code.read_text()) if code.is_file() else 1


def bring(root: Path) -> None:
    """Copy results and logs to $OUT."""
    if not (place := os.environ.get("OUT")):
        return
    for path in (root / "out").iterdir():
        shutil.copy(path, place)
    new = Path(place) / "logs.tgz"
    with tarfile.open(new, "w:gz") as archive:
        for path in [root / "run.log", *sorted((root / "logs").rglob("*.log"))]:
            if path.is_file():
                _add_end(archive, path, path.relative_to(root).as_posix())


def _add_end(archive: tarfile.TarFile, path: Path, name: str) -> None:
    item = tarfile.TarInfo(name)
    with path.open("rb") as file:
        whole = file.seek(0, 2)
        item.size = min(whole, _LOG)
        file.seek(whole - item.size)
        archive.addfile(item, file)


def main() -> int:
    """Start or stop, then follow."""
    if len(sys.argv) < 3 or not sys.argv[2].isdecimal():
        print(__doc__, file=sys.stderr)
        return 2
    root, seconds, command = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if command == ["stop"]:
        stop(root)
    elif command:
        start(root, command)
    if not (root / "run.log").is_file():
        print(f"run-detached: {root}: nothing was started there", file=sys.stderr)
        return 2
    return follow(root, seconds)


if __name__ == "__main__":
    sys.exit(main())
