"""Reaper: a subprocess supervisor; a command and all its descendants end with their parent.

    python -S -I reaper.py [--parent-fd N] [--pass-fd N]... [--grace S] [--unlink-shm PREFIX]
        -- command...

`spawn` starts a command under it; an image runs it as PID 1. It uses the standard library
alone. The reaper adopts orphans (PR_SET_CHILD_SUBREAPER), so no descendant
escapes it by daemonizing, and holds the read end of a pipe whose write end only its parent has:
when the parent dies, even by SIGKILL, the pipe closes. It sleeps in poll(2) until a signal
(signalfd) or that pipe wakes it. Kernel interfaces: prctl(2), signalfd(2), proc(5).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import math
import os
import re
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SI_KERNEL = 0x80
_SIGINFO = struct.Struct("=Iii116x")  # signal, errno, code of struct signalfd_siginfo

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STOPPING = (signal.SIGTERM, signal.SIGINT)
_DESCENDANTS_GRACE_S = 8.0
_RESCAN_S = 0.05
_PROGRAM = Path(__file__).name
_SHM_PREFIX = re.compile(r"[A-Za-z0-9_.-]{6,}")


def _check(command: Sequence[str], grace: float, unlink_shm: str | None) -> None:
    if not command:
        raise ValueError("no command given")
    if not 0 <= grace <= 86400:
        raise ValueError(f"grace {grace}: need a number of seconds from 0 to 86400")
    # A short prefix would match files of other programs.
    if unlink_shm is not None and not _SHM_PREFIX.fullmatch(unlink_shm):
        raise ValueError(f"shm prefix {unlink_shm!r}: need 6 or more of A-Z a-z 0-9 _ . -")


def descendants(root: int) -> set[int]:
    """Pids of every process with a running thread that `root` started, directly or not."""
    children: dict[int, list[int]] = {}
    running = set()
    for entry in _processes():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # "pid (name) state ppid ...": the name may hold spaces and parentheses.
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            pid = int(entry.name)
            children.setdefault(int(fields[1]), []).append(pid)
            # A process whose first thread has ended looks like a zombie; others may run on.
            if fields[0] not in (b"Z", b"X") or int(fields[17]) > 1:
                running.add(pid)
    found: set[int] = set()
    pending = [root]
    while pending:
        new = [pid for pid in children.get(pending.pop(), []) if pid not in found]
        found.update(new)
        pending.extend(new)
    return found & running


def _marked(mark: str) -> set[int]:
    """Pids of every process that was executed with the variable `mark` in its environment."""
    wanted = b"\0" + mark.encode() + b"="
    found = set()
    for entry in _processes():
        # What another user runs is unreadable, and is not ours.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if wanted in b"\0" + (entry / "environ").read_bytes():
                found.add(int(entry.name))
    return found


def _processes() -> list[Path]:
    return [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        _warn_other_user(pid)


@functools.cache
def _warn_other_user(pid: int) -> None:
    os.write(2, f"reaper: may not stop process {pid}: it runs as another user\n".encode())


def unlink_shm(prefix: str | None) -> None:
    """Remove the files and directories of /dev/shm whose names start with `prefix`, if any."""
    for path in Path("/dev/shm").iterdir() if prefix else ():
        if not path.name.startswith(str(prefix)):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _libc(call: str, *arguments: object) -> int:
    result: int = _LIBC[call](*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
    return result


def _prctl(option: int, value: int) -> None:
    _libc("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


def _signalfd(signals: Sequence[int]) -> int:
    """A descriptor that delivers `signals`, which must be blocked."""
    sigset = sum(1 << (number - 1) for number in signals).to_bytes(128, sys.byteorder)
    return _libc("signalfd", -1, sigset, os.O_CLOEXEC)


def _shm_prefixes(pids: Iterable[int]) -> set[str]:
    """Shared-memory prefixes of reapers among `pids`, to be removed by whoever kills these."""
    found = set()
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        own = words[: words.index("--")] if "--" in words else []
        if any(Path(word).name == _PROGRAM for word in own):
            found |= {word.partition("=")[2] for word in own if word.startswith("--unlink-shm=")}
    return {prefix for prefix in found if _SHM_PREFIX.fullmatch(prefix)}


class _Reaper:
    """The reaper process: starts `command`, forwards signals, reaps and stops all descendants."""

    def __init__(self, command: list[str], parent_fd: int | None, grace: float) -> None:
        self._grace = grace
        self._forwarded: set[int] = set()
        self._stop_requests = 0
        self._status: int | None = None
        self._deadline = math.inf
        self._shm_left: set[str] = set()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        watched = (*_FORWARDED, signal.SIGCHLD)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, watched)
        self._signals = _signalfd(watched)
        self._parent_fd = parent_fd
        self._poller = select.poll()
        self._poller.register(self._signals, select.POLLIN)
        if parent_fd is not None:
            os.set_inheritable(parent_fd, False)
            self._poller.register(parent_fd, select.POLLIN)
        self._child = self._start(command)

    def run(self) -> int:
        """Wait until the command and all its descendants have ended; returns the exit code."""
        while self._reap():
            if time.monotonic() >= self._deadline:
                self._signal_all(signal.SIGKILL)
            for fd, _ in self._poller.poll(self._timeout_ms()):
                if fd == self._signals:
                    self._on_signals()
                else:
                    self._on_parent_pipe()
        for prefix in self._shm_left:
            unlink_shm(prefix)
        assert self._status is not None  # the command is a child, and no child is left
        code = os.waitstatus_to_exitcode(self._status)
        return code if code >= 0 else 128 - code

    def _start(self, command: list[str]) -> int:
        reaper = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        # This process has one thread and lives as long as it has work, so here the
        # "parent" that PR_SET_PDEATHSIG speaks of, a thread, is the reaper itself.
        try:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != reaper:
                os._exit(1)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"reaper: {command[0]}: {error.strerror}\n".encode())
            if isinstance(error, FileNotFoundError):
                os._exit(127)
        finally:
            os._exit(126)

    def _reap(self) -> bool:
        """Reap every dead child; False when no child is left, and so no descendant."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._child:
                self._status = status
                self._signal_all(signal.SIGTERM)
                self._kill_after(min(self._grace, _DESCENDANTS_GRACE_S))

    def _timeout_ms(self) -> int | None:
        if self._deadline == math.inf:
            return None
        # Past the deadline, look again: a process may fork between the walk and its death.
        left = self._deadline - time.monotonic()
        return math.ceil(1000 * (left if left > 0 else _RESCAN_S))

    def _on_signals(self) -> None:
        for number, _, code in _SIGINFO.iter_unpack(os.read(self._signals, 16 * _SIGINFO.size)):
            if number == signal.SIGCHLD:
                continue
            if number in _STOPPING:
                self._stop_requests += 1
                if self._stop_requests > 1:
                    self._kill_after(0)
            # A terminal's Ctrl-C has already gone to the command: it is in our group.
            if code != _SI_KERNEL:
                self._forward(number)

    def _on_parent_pipe(self) -> None:
        assert self._parent_fd is not None
        if os.read(self._parent_fd, 4096) == b"":
            self._poller.unregister(self._parent_fd)
            self._forward(signal.SIGTERM)
            self._kill_after(self._grace)

    def _forward(self, number: int) -> None:
        # Many servers take a second SIGTERM for "now", which is the reaper's to decide.
        repeated = number in _STOPPING and number in self._forwarded
        self._forwarded.add(number)
        if self._status is None and not repeated:  # once it is reaped, its pid is anyone's
            _send(self._child, number)

    def _kill_after(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _signal_all(self, number: int) -> None:
        if os.getpid() == 1:
            _send(-1, number)  # the whole PID namespace but us; needs no /proc
            return
        pids = descendants(os.getpid())
        if number == signal.SIGKILL:
            self._shm_left |= _shm_prefixes(pids)
        for pid in sorted(pids):
            _send(pid, number)


class Reaped:
    """Handle of a command under a reaper, by `spawn`; dropping it does not stop the command."""

    _running: set[Reaped] = set()

    def __init__(
        self, process: subprocess.Popen[bytes], parent_pipe: IO[bytes], mark: str, shm: str | None
    ) -> None:
        self.process = process
        """The reaper. Its exit code is the command's, or 128 + n if signal n ended that."""
        self._parent_pipe = parent_pipe
        self._mark = mark
        self._shm = shm
        self._finish_lock = threading.Lock()
        self._running.add(self)

    def poll(self) -> int | None:
        """Exit code once the command and all it started have ended, else None."""
        code = self.process.poll()
        return None if code is None else self._finish(code)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the command and all it started have ended; returns the exit code.

        Raises subprocess.TimeoutExpired if they have not after `timeout` seconds.
        """
        return self._finish(self.process.wait(timeout))

    def terminate(self) -> None:
        """Ask the command to stop (SIGTERM); asking twice kills it and all it started."""
        self.process.terminate()

    def signal(self, number: int) -> None:
        """Send the command SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2."""
        if number not in _FORWARDED:
            raise ValueError(f"signal {number}: a reaper does not pass it on")
        self.process.send_signal(number)

    def kill(self, timeout: float = 10.0) -> None:
        """Kill the command and all it started; returns when they have ended.

        Works whether the reaper runs, is stopped, was killed, or has ended. Raises a
        TimeoutError if a process survives SIGKILL for `timeout` seconds.
        """
        # The reaper goes last: until then no orphan can be adopted by anyone else.
        self._kill_descendants(timeout)
        self.process.kill()
        self._finish(self.process.wait(timeout))

    def _finish(self, code: int) -> int:
        with self._finish_lock:
            if self in self._running:
                if code < 0:  # only a killed reaper ends by a signal: clean up in its place
                    self._kill_descendants(timeout=10.0)
                    unlink_shm(self._shm)
                self._parent_pipe.close()
                self._running.discard(self)
        return code if code >= 0 else 128 - code

    def _kill_descendants(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        prefixes: set[str] = set()
        while pids := self._descendants():
            prefixes |= _shm_prefixes(pids)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {sorted(pids)} survive SIGKILL for {timeout:g} s")
            for pid in sorted(pids):  # a parent first, which would start its children again
                _send(pid, signal.SIGKILL)
            time.sleep(0.005)
        for prefix in prefixes:
            unlink_shm(prefix)

    def _descendants(self) -> set[int]:
        pids = _marked(self._mark)
        if self.process.poll() is None:  # until it is waited for, the pid is the reaper's
            pids |= descendants(self.process.pid)
        return pids - {self.process.pid}


def _close_parent_pipes() -> None:
    for reaped in Reaped._running:
        reaped._parent_pipe.close()


os.register_at_fork(after_in_child=_close_parent_pipes)


def spawn(
    command: Sequence[str],
    *,
    grace: float = 5.0,
    unlink_shm: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
) -> Reaped:
    """Start `command` under a reaper, so that it and its descendants cannot outlive this process.

    It gets its own session and an empty stdin. When this process ends, even by SIGKILL, it
    gets SIGTERM and `grace` seconds later everything left gets SIGKILL; then the /dev/shm
    files whose names start with `unlink_shm`, which must be unique to it, are removed.
    Any thread may call this and then end. A command that cannot be started exits with 127
    or 126 and a line on `stderr`. The command alone inherits `pass_fds`, not its reaper.

    Only this process may hold the pipe's write end. It is close-on-exec, and `os.fork` and
    multiprocessing's children drop it; a child forked by C code which never execs keeps
    it, and then that child must end too before the command is stopped.

    Raises:
        ValueError: empty `command`, bad `grace`, or an unsafe `unlink_shm`.
    """
    _check(command, grace, unlink_shm)
    options = [f"--grace={grace}"]
    if unlink_shm is not None:
        options.append(f"--unlink-shm={unlink_shm}")
    # One variable of its own for every spawn: nested ones do not hide each other.
    mark = f"COG_TRITON_REAPED_{os.urandom(8).hex()}"
    read_end, write_end = os.pipe()
    options += [f"--parent-fd={read_end}", *(f"--pass-fd={number}" for number in pass_fds)]
    parent_pipe = os.fdopen(write_end, "wb", buffering=0)
    try:
        process = subprocess.Popen(
            [sys.executable, "-S", "-I", str(Path(__file__).resolve()), *options, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env={**(os.environ if env is None else env), mark: "1"},
            pass_fds=(read_end, *pass_fds),
            start_new_session=True,
        )
    except BaseException:
        parent_pipe.close()
        raise
    finally:
        os.close(read_end)
    return Reaped(process, parent_pipe, mark, unlink_shm)


def main(argv: list[str]) -> int:
    """Run as a program: the command's exit code, or 2 if the options are wrong."""
    parser = argparse.ArgumentParser(usage="%(prog)s [options] -- command...", allow_abbrev=False)
    add = parser.add_argument
    add("--parent-fd", type=int, metavar="N", help="stop when this pipe's writer is gone")
    add("--pass-fd", type=int, metavar="N", action="append", default=[], help="for the command")
    add("--grace", type=float, metavar="S", default=5.0, help="from SIGTERM to SIGKILL; 5")
    add("--unlink-shm", metavar="PREFIX", help="of /dev/shm files to remove at the end")
    end = argv.index("--") if "--" in argv else len(argv)
    options, command = parser.parse_args(argv[:end]), argv[end + 1 :]
    try:
        _check(command, options.grace, options.unlink_shm)
        if options.parent_fd is not None and not stat.S_ISFIFO(os.fstat(options.parent_fd).st_mode):
            raise ValueError(f"parent fd {options.parent_fd} is not a pipe")
        if os.getpid() != 1 and Path("/proc/self").readlink().name != str(os.getpid()):
            raise ValueError("/proc is another PID namespace's: descendants cannot be found")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    found = _Reaper(command, options.parent_fd, options.grace)
    for number in options.pass_fd:
        os.close(number)
    code = found.run()
    unlink_shm(options.unlink_shm)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
