"""Reaper: a process around a command, all of whose descendants end with the reaper's parent."""

import argparse
import ctypes
import os
import re
import shutil
import signal
import sys
import time
from _thread import start_new_thread
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any


def _each(file: str) -> Iterator[tuple[int, bytes]]:
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or is another user's
            yield int(path.name), (path / file).read_bytes()


def descendants(root: int) -> set[int]:
    """Pids of every process with a running thread that `root` started, directly or not."""
    stats = {pid: text.rpartition(b")")[2].split() for pid, text in _each("stat")}
    found, new = set[int](), {root}  # a stat without the name: state, parent, ...
    while new := {pid for pid in stats if int(stats[pid][1]) in new} - found:
        found |= new
    # A process whose first thread has ended looks like a zombie; others may run on.
    return {pid for pid in found if stats[pid][0] not in (b"Z", b"X") or int(stats[pid][17]) > 1}


def marked(mark: str) -> set[int]:
    """Pids of every process that was executed with the variable `mark` in its environment."""
    return {pid for pid, text in _each("environ") if f"\0{mark}=".encode() in b"\0" + text}


def unlink_shm(prefix: str) -> None:
    """Remove the files and directories of /dev/shm whose names start with `prefix`; "": none."""
    for path in Path("/dev/shm").glob(f"{prefix}*") if prefix else ():
        with suppress(IsADirectoryError, FileNotFoundError):
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)


def _send(number: int, pids: set[int]) -> None:
    for pid in sorted(pids):  # a parent first, which would start its children again
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def command(argv: Sequence[str], *, pass_fds: Sequence[int] = (), **options: object) -> list[str]:
    """Command line that runs `argv` under a reaper; `options`: parent_fd, grace, unlink_shm."""
    given = [*options.items(), *(("pass_fd", number) for number in pass_fds)]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given if value is not None]
    return [sys.executable, "-S", "-I", str(Path(__file__).resolve()), *words, "--", *argv]


class Reaped:
    """A command under a reaper, in a session of its own; `popen` are options of Popen."""

    def __init__(
        self, argv: Sequence[str], *, grace: float = 5, unlink_shm: str | None = None, **popen: Any
    ) -> None:
        fds, (theirs, ours) = popen.pop("pass_fds", ()), os.pipe()
        words = command(argv, parent_fd=theirs, grace=grace, unlink_shm=unlink_shm, pass_fds=fds)
        self._mark, self._shm = f"COG_TRITON_REAPED_{os.urandom(8).hex()}", unlink_shm or ""
        environment = {**(popen.get("env") or os.environ), self._mark: "1"}
        popen = {"stdin": DEVNULL, **popen, "env": environment}
        with os.fdopen(theirs), os.fdopen(ours, "wb"):
            self.process = Popen(words, pass_fds=(theirs, *fds), start_new_session=True, **popen)
            self._pipe = os.fdopen(os.dup(ours), "wb", buffering=0)
        os.register_at_fork(after_in_child=self._pipe.close)  # and so it outlives this object
        self.terminate, self.signal = self.process.terminate, self.process.send_signal

    def poll(self) -> int | None:
        """Exit code (128 + n for signal n) once the command and all it started have ended."""
        return None if self.process.poll() is None else self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """As `poll`, but waits; raises subprocess.TimeoutExpired after `timeout` seconds."""
        code, deadline = self.process.wait(timeout), time.monotonic() + 10.0  # < 0: it was killed
        while code < 0 and time.monotonic() < deadline and (left := marked(self._mark)):
            _send(signal.SIGKILL, left)
        unlink_shm(self._shm if code < 0 else "")
        self._pipe.close()
        return code if code >= 0 else 128 - code

    def kill(self, timeout: float = 10.0) -> None:
        """Kill the command and all it started, also if the reaper is stopped or was killed."""
        poll, pid, deadline = self.process.poll, self.process.pid, time.monotonic() + timeout
        # Some may lack the mark. A reaper that has been waited for may share its pid with another.
        while poll() is None and time.monotonic() < deadline and (left := descendants(pid)):
            _send(signal.SIGKILL, left)
        self.process.kill()
        self.wait(timeout)


spawn = Reaped

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent-fd", type=int, metavar="N", help="stop when its writer is gone")
    parser.add_argument("--pass-fd", type=int, metavar="N", action="append", default=[])
    parser.add_argument("--grace", type=float, metavar="S", default=5.0)
    parser.add_argument("--unlink-shm", metavar="PREFIX", default="")
    parser.add_argument("command", nargs="+")
    args, own, prctl = parser.parse_args(), os.getpid(), ctypes.CDLL(None).prctl
    piped = args.parent_fd is None or Path(f"/dev/fd/{args.parent_fd}").is_fifo()
    if not (re.fullmatch("|[A-Za-z0-9_.-]{6,}", args.unlink_shm) and args.grace >= 0 and piped):
        parser.error("N is a pipe, S is at least 0, PREFIX is 6 or more of A-Z a-z 0-9 _ . -")
    stopping, deadline, sent = {signal.SIGTERM, signal.SIGINT}, float("inf"), set[int]()
    watch = stopping | {signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGIO}

    def before_exec() -> None:
        prctl(1, ctypes.c_ulong(signal.SIGKILL))  # PR_SET_PDEATHSIG
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.getppid() == own or os._exit(1)  # the reaper died before prctl

    prctl(36, ctypes.c_ulong(1))  # PR_SET_CHILD_SUBREAPER
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, watch)
    try:
        child = Popen(args.command, pass_fds=args.pass_fd, preexec_fn=before_exec)
    except OSError as error:
        os.write(2, f"reaper: {args.command[0]}: {error.strerror}\n".encode())
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
    list(map(os.close, args.pass_fd))
    if args.parent_fd is not None:  # reads 0 bytes when its writer is gone
        start_new_thread(lambda: os.kill(own, signal.SIGIO + len(os.read(args.parent_fd, 1))), ())
    with suppress(ChildProcessError):  # so no descendant is left
        while True:
            info = signal.sigtimedwait(watch, min(max(deadline - time.monotonic(), 0.05), 1e6))
            number, due, now = info.si_signo if info else 0, 0, time.monotonic()
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child.pid:
                    child.returncode, due = os.waitstatus_to_exitcode(ended[1]), signal.SIGTERM
                    deadline = min(deadline, now + min(args.grace, 8.0))
            if (sent and number in stopping) or now >= deadline:
                deadline, due = 0.0, signal.SIGKILL  # repeated: a process may fork meanwhile
            if number == signal.SIGIO:
                number, deadline = signal.SIGTERM, min(deadline, now + args.grace)
            if info and child.returncode is None and number not in {signal.SIGCHLD, *sent}:
                _send(number, {child.pid} if info.si_code != 0x80 else set())  # 0x80: Ctrl-C
                sent |= {number} & stopping
            if due:
                _send(due, {-1} if own == 1 else descendants(own))
    unlink_shm(args.unlink_shm)
    sys.exit(child.returncode if child.returncode >= 0 else 128 - child.returncode)
