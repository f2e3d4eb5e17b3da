"""Slurm cluster of two nodes on this machine: real daemons in a directory of their own.

A node is a slurmd with a /tmp of its own, for PMIx keeps files there, and a GPU that is one by name
only. Everything listens on free ports, and ends with the cluster.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stack import wait_until

from cog_triton.system.ports import free_ports

NODES = ("node-a", "node-b")
_CONFIG = """\
ClusterName=two
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is requeued waits until its credential is void.
AuthInfo=socket={directory}/munge.sock,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
TmpFS={directory}/tmp
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ReturnToService=2
GresTypes=gpu
NodeName=node-a NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=2 Gres=gpu:1
NodeName=node-b NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=2 Gres=gpu:1
PartitionName=all Nodes=node-a,node-b Default=YES State=UP
"""


class Cluster:
    """Two nodes and their controller, running."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {**os.environ, "SLURM_CONF": f"{directory}/slurm.conf"}
        self._processes: list[subprocess.Popen[bytes]] = []

    @classmethod
    @contextmanager
    def running(cls, directory: Path) -> Iterator[Cluster]:
        """A cluster that takes jobs, until the block ends."""
        cluster = cls(directory)
        try:
            cluster._start()
            yield cluster
        finally:
            cluster._stop()

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            command, env=self.environment, cwd=self.directory, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """State of a job, such as RUNNING; blank once the controller has forgotten it."""
        done = self.ask("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
        return done.strip()

    def _start(self) -> None:
        self.directory.chmod(0o755)  # munge wants no place that others can write to
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for name in ("state", "tmp", *(f"spool-{node}" for node in NODES)):
            (self.directory / name).mkdir()
        controller, first, second = free_ports(3)
        values = {"controller": controller, "first": first, "second": second}
        config = _CONFIG.format(directory=self.directory, **values)
        (self.directory / "slurm.conf").write_text(config)
        (self.directory / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        files = ("key-file=munge.key", "socket=munge.sock", "pid-file=munge.pid")
        files = (*files, "log-file=munge.log", "seed-file=munge.seed")
        options = [f"--{file.replace('=', f'={self.directory}/')}" for file in files]
        self._run("munged", "--foreground", "--force", *options)
        wait_until((self.directory / "munge.sock").exists, 30)
        self._run("slurmctld", "-D")
        for node in NODES:
            own = self.directory / f"tmp-{node}"
            own.mkdir()
            mount = f"mount --bind {own} {self.directory}/tmp && exec slurmd -D -N {node}"
            self._run("unshare", "--mount", "sh", "-c", mount)
        wait_until(lambda: self._nodes() == {"idle"}, 60)

    def _nodes(self) -> set[str]:
        command = ["sinfo", "--noheader", "--format=%t"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return set(done.stdout.split())

    def _run(self, *command: str) -> None:
        with (self.directory / "daemons.log").open("ab") as log:
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        self._processes.append(process)

    def _stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
