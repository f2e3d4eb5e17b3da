"""Kubernetes of one node on this machine, of the user's binaries, in this process's namespaces.

The Makefile starts the tests in new mount, pid and network namespaces, so that a cluster ends whole
with them. Real: etcd, apiserver, controller manager, scheduler, kube-proxy, containerd, runc and
kubelet. There is no DNS, and every component is an administrator, by one token.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml
from kubectl import Kubectl
from stack import wait_until
from stand_in_image import PAUSE, mounts

BINARIES = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy"),
    *("kubelet", "kubectl", "containerd", "containerd-shim-runc-v2", "ctr", "runc", "iptables"),
)
_CNI = ("/opt/cni/bin", "/usr/lib/cni")
_NODE, _ADDRESS = "node-a", "10.10.0.1"
_SERVICES, _PODS = "10.96.0.0/16", "10.244.0.0/16"
_SYSCTL = Path("/proc/sys")
_SET_BY_KUBELETS = (
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
_WRITTEN = ("/run", "/var/log", "/var/lib/kubelet", "/var/lib/cni")
"""Where kubelet, containerd and the plugins write, whatever they are told."""


def lacking(directory: Path) -> list[str]:
    """Names of what a cluster needs and neither `directory` nor PATH has."""
    found = [name for name in BINARIES if not _find(directory, name)]
    if _plugins(directory) is None:
        found.append("the CNI plugins bridge, host-local and loopback")
    return found


def _find(directory: Path, name: str) -> str | None:
    """A binary in the user's directory, else in PATH."""
    return shutil.which(name, path=f"{directory}:{os.environ['PATH']}:/usr/sbin:/sbin")


def _plugins(directory: Path) -> str | None:
    return next((one for one in (str(directory), *_CNI) if Path(one, "bridge").exists()), None)


class Cluster:
    """A running cluster, and kubectl for it."""

    def __init__(self, directory: Path, binaries: Path) -> None:
        self.directory, self._binaries = directory, binaries
        self.kubectl = Kubectl(directory / "kubeconfig", binaries)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._made: list[str] = []
        self._kernel = {name: (_SYSCTL / name).read_text() for name in _SET_BY_KUBELETS}

    @classmethod
    @contextmanager
    def running(cls, directory: Path, binaries: Path, archive: Path) -> Iterator[Cluster]:
        """A cluster whose node is ready and has the images of `archive`, for the block."""
        cluster = cls(directory, binaries)
        try:
            cluster._network()
            cluster._control_plane()
            cluster._node(archive)
            yield cluster
        finally:
            cluster._stop()

    def _network(self) -> None:
        subprocess.run(["mount", "--make-rshared", "/"], check=True)
        for place in _WRITTEN:
            if not Path(place).is_dir():
                Path(place).mkdir(parents=True)
                self._made.append(place)
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
        (_SYSCTL / "net/ipv4/ip_forward").write_text("1")
        for command in (
            "link set lo up",
            "link add node0 type bridge",
            f"addr add {_ADDRESS}/24 dev node0",
            "link set node0 up",
            "route add default dev node0",
        ):
            subprocess.run(["ip", *command.split()], check=True)

    def _control_plane(self) -> None:
        here, token = self.directory, secrets.token_hex(16)
        (here / "tokens.csv").write_text(f'{token},admin,1,"system:masters"\n')
        server = {"server": "https://127.0.0.1:6443", "insecure-skip-tls-verify": True}
        config = {
            **{"apiVersion": "v1", "kind": "Config", "current-context": "test"},
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        self.kubectl.config.write_text(yaml.safe_dump(config))
        key = here / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        self._run("etcd", f"--data-dir={here}/etcd", "--unsafe-no-fsync")
        self._run(
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            *("--secure-port=6443", "--bind-address=127.0.0.1", f"--advertise-address={_ADDRESS}"),
            *(f"--service-cluster-ip-range={_SERVICES}", "--authorization-mode=RBAC"),
            *(f"--token-auth-file={here}/tokens.csv", f"--cert-dir={here}/pki"),
            "--kubelet-preferred-address-types=InternalIP",
            *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
            "--service-account-issuer=https://127.0.0.1:6443",
        )
        wait_until(lambda: self.kubectl.succeeds("get", "--raw", "/readyz"), 180)
        with_key = (f"--kubeconfig={self.kubectl.config}", "--leader-elect=false")
        accounts = f"--service-account-private-key-file={key}"
        self._run("kube-controller-manager", *with_key, accounts, f"--cluster-cidr={_PODS}")
        self._run("kube-scheduler", *with_key)

    def _node(self, archive: Path) -> None:
        here = self.directory
        socket = here / "containerd.sock"
        places = {"home": here, "socket": socket, "pause": PAUSE, "cni": _plugins(self._binaries)}
        runc = _find(self._binaries, "runc")
        (here / "containerd.toml").write_text(_CONTAINERD.format(runc=runc, **places))
        ctr = [_find(self._binaries, "ctr") or "ctr", "-a", str(socket), "-n", "k8s.io"]
        base = json.loads(subprocess.check_output([*ctr, "oci", "spec"]))
        base["mounts"] += mounts()
        (here / "base.json").write_text(json.dumps(base))
        (here / "cni").mkdir()
        (here / "cni" / "10-bridge.conflist").write_text(json.dumps(_NETWORK))
        self._run("containerd", f"--config={here}/containerd.toml")
        wait_until(lambda: not subprocess.run([*ctr, "version"], capture_output=True).returncode)
        subprocess.run([*ctr, "images", "import", str(archive)], check=True, capture_output=True)
        for controller in _cgroups():
            controller.mkdir(parents=True, exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):  # of v1, where a new group has none
                if (controller.parent / name).exists():
                    (controller / name).write_text((controller.parent / name).read_text())
            if (shares := controller / "cpu.shares").exists():
                shares.write_text("3072")  # else all its pods get as much CPU as one process
        kubelet = {**_KUBELET, "cgroupRoot": _group(), "podLogsDir": f"{here}/logs"}
        kubelet |= {"containerRuntimeEndpoint": f"unix://{socket}"}
        kubelet |= {"volumePluginDir": f"{here}/plugins"}
        (here / "kubelet.yaml").write_text(yaml.safe_dump(kubelet))
        with_key, name = f"--kubeconfig={self.kubectl.config}", f"--hostname-override={_NODE}"
        self._run(
            "kubelet",
            *(f"--config={here}/kubelet.yaml", with_key, name, f"--node-ip={_ADDRESS}"),
            *(f"--root-dir={here}/kubelet", f"--cert-dir={here}/certificates"),
        )
        wait_until(self._is_ready, 300)
        self._run(
            "kube-proxy",
            *(with_key, name, "--proxy-mode=iptables", f"--cluster-cidr={_PODS}"),
            *("--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"),
            "--conntrack-tcp-timeout-close-wait=0",
        )

    def _is_ready(self) -> bool:
        nodes = self.kubectl.objects("nodes").values()
        conditions = [one for node in nodes for one in node["status"]["conditions"]]
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def _run(self, name: str, *arguments: str) -> None:
        binary = _find(self._binaries, name)
        assert binary is not None, name
        # containerd looks for its shim in PATH.
        environment = {**os.environ, "PATH": f"{self._binaries}:{os.environ['PATH']}"}
        with (self.directory / f"{name}.log").open("wb") as output:
            command = [binary, *arguments]
            started = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        self._processes.append(started)

    def _stop(self) -> None:
        """End the components, then what is in the node's cgroups; put back what kubelets set."""
        for process in reversed(self._processes):
            process.terminate()
        deadline = time.monotonic() + 20
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for group in _cgroups():
            below = [path.parent for path in group.rglob("cgroup.procs")]
            for path in below:
                for pid in (path / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            for path in sorted(below, reverse=True):
                wait_until(lambda path=path: not (path / "cgroup.procs").read_text(), 20)
                path.rmdir()
        for place in self._made:
            subprocess.run(["umount", "--lazy", place], check=True)
            Path(place).rmdir()
        for name, value in self._kernel.items():
            (_SYSCTL / name).write_text(value)


def _group() -> str:
    namespace = Path("/proc/self/ns/pid").stat().st_ino  # process numbers repeat in each
    return f"/cog-triton-{namespace}"


def _cgroups() -> list[Path]:
    """The cgroup of the node in each hierarchy."""
    top = Path("/sys/fs/cgroup")
    if Path(top, "memory").is_dir():  # v1
        return [
            one / _group()[1:] for one in top.iterdir() if one.is_dir() and not one.is_symlink()
        ]
    return [top / _group()[1:]]


_NETWORK = {
    **{"cniVersion": "1.0.0", "name": "pods"},
    "plugins": [
        {
            **{"type": "bridge", "bridge": "cni0", "isDefaultGateway": True, "hairpinMode": True},
            "ipam": {"type": "host-local", "ranges": [[{"subnet": _PODS}]], "dataDir": "/run/ipam"},
        }
    ],
}
_KUBELET = {
    **{"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"},
    "authentication": {"webhook": {"enabled": False}, "anonymous": {"enabled": True}},
    "authorization": {"mode": "AlwaysAllow"},
    **{"cgroupDriver": "cgroupfs", "enforceNodeAllocatable": []},
    "evictionHard": {
        **{"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"}
    },
    **{"failSwapOn": False, "failCgroupV1": False, "imageGCHighThresholdPercent": 100},
    **{"syncFrequency": "5s", "nodeStatusUpdateFrequency": "4s", "volumeStatsAggPeriod": "5s"},
    "resolvConf": "",
}
_CONTAINERD = """\
version = 2
root = "{home}/root"
state = "{home}/state"
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{home}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{home}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "{home}/base.json"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "{runc}"
"""
