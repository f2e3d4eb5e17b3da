"""Kubernetes of two nodes on this machine, of the user's binaries, in this process's namespaces.

The Makefile starts the tests in new mount, pid and network namespaces, so that a cluster ends whole
with them. Real: etcd, apiserver, controller manager, scheduler, kube-proxy, and for each node
containerd, runc and kubelet. Stand-ins: one network for both nodes, a bridge for their pods, a DNS
of ours, and every component is an administrator, by one certificate.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import certificates
import yaml
from kubectl import Kubectl
from name_server import NameServer
from stack import wait_until
from stand_in_image import PAUSE, mounts

NODES = ("node-a", "node-b")
BINARIES = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy"),
    *("kubelet", "kubectl", "containerd", "containerd-shim-runc-v2", "ctr", "runc", "iptables"),
)
_CNI = ("/opt/cni/bin", "/usr/lib/cni")
_SERVER = "https://127.0.0.1:6443"
_ADDRESS = "10.10.0.1"
"""Of both nodes."""
_SERVICES, _PODS = "10.96.0.0/16", "10.244.0.0/16"
_SYSCTL = Path("/proc/sys")
_SET_BY_KUBELETS = (
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
_WRITTEN = ("/run", "/var/log", "/var/lib/kubelet", "/var/lib/cni")
"""Where kubelet, containerd and the plugins write, whatever they are told."""
_CONTROLLERS_V1 = Path("/sys/fs/cgroup/memory")


def lacking(directory: Path) -> list[str]:
    """Names of what a cluster needs and neither `directory` nor PATH has."""
    found = [name for name in BINARIES if not find(directory, name)]
    if not any(Path(place, "bridge").exists() for place in (str(directory), *_CNI)):
        found.append("the CNI plugins bridge, host-local and loopback")
    return found


def find(directory: Path, name: str) -> str | None:
    """A binary in the user's directory, else in PATH."""
    return shutil.which(name, path=f"{directory}:{os.environ['PATH']}:/usr/sbin:/sbin")


class Cluster:
    """A running cluster, and kubectl for it."""

    def __init__(self, directory: Path, binaries: Path) -> None:
        self.directory, self._binaries = directory, binaries
        self.kubectl = Kubectl(directory / "kubeconfig", binaries)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._names: NameServer | None = None
        self._made: list[str] = []
        self._kernel = {name: (_SYSCTL / name).read_text() for name in _SET_BY_KUBELETS}

    @classmethod
    @contextmanager
    def running(cls, directory: Path, binaries: Path, archive: Path) -> Iterator[Cluster]:
        """A cluster whose nodes are ready and have the images of `archive`, for the block."""
        cluster = cls(directory, binaries)
        try:
            cluster._start(archive)
            yield cluster
        finally:
            cluster._stop()

    def _start(self, archive: Path) -> None:
        certificates.write(self.directory / "pki")
        self._write_kubeconfig()
        self._network()
        self._control_plane()
        for number, node in enumerate(NODES):
            self._node(number, node, archive)
        wait_until(lambda: self._ready_nodes() == len(NODES), 300)
        self._services()

    def _ready_nodes(self) -> int:
        nodes = self.kubectl.objects("nodes").values()
        conditions = [one for node in nodes for one in node["status"]["conditions"]]
        return sum(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

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
        pki = self.directory / "pki"
        client = "http://127.0.0.1:2379"
        data = self.directory / "etcd"
        self._run(
            "etcd",
            f"--data-dir={data}",
            f"--listen-client-urls={client}",
            "--unsafe-no-fsync",
            f"--advertise-client-urls={client}",
            "--listen-peer-urls=http://127.0.0.1:2380",
        )
        self._run(
            "kube-apiserver",
            f"--etcd-servers={client}",
            *("--secure-port=6443", "--bind-address=127.0.0.1", f"--advertise-address={_ADDRESS}"),
            f"--service-cluster-ip-range={_SERVICES}",
            "--authorization-mode=Node,RBAC",
            f"--client-ca-file={pki}/ca.crt",
            *(f"--tls-cert-file={pki}/server.crt", f"--tls-private-key-file={pki}/server.key"),
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={pki}/admin.crt",
            f"--kubelet-client-key={pki}/admin.key",
            f"--service-account-key-file={pki}/admin.key",
            f"--service-account-signing-key-file={pki}/admin.key",
            f"--service-account-issuer={_SERVER}",
        )
        wait_until(lambda: self.kubectl.succeeds("get", "--raw", "/readyz"), 180)
        with_key = (f"--kubeconfig={self.kubectl.config}", "--leader-elect=false")
        self._run(
            "kube-controller-manager",
            *with_key,
            f"--root-ca-file={pki}/ca.crt",
            f"--service-account-private-key-file={pki}/admin.key",
            f"--cluster-cidr={_PODS}",
        )
        self._run("kube-scheduler", *with_key)

    def _services(self) -> None:
        """Names and addresses of Services, and policies: needs the nodes."""
        with_key = f"--kubeconfig={self.kubectl.config}"
        self._names = NameServer(_ADDRESS, self.kubectl)
        self._run(
            "kube-proxy",
            with_key,
            f"--hostname-override={NODES[0]}",  # whose address and network both have
            *("--proxy-mode=iptables", f"--cluster-cidr={_PODS}", "--conntrack-max-per-core=0"),
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        )
        if find(self._binaries, "kube-router"):  # enforces NetworkPolicy, and does no more
            self._run(
                "kube-router",
                with_key,
                f"--hostname-override={NODES[0]}",
                *("--run-firewall=true", "--run-router=false", "--run-service-proxy=false"),
                *("--health-port=0", "--metrics-port=0"),
            )

    def _node(self, number: int, node: str, archive: Path) -> None:
        home = self.directory / node
        home.mkdir()
        socket = home / "containerd.sock"
        (home / "containerd.toml").write_text(
            _CONTAINERD.format(
                home=home,
                socket=socket,
                pause=PAUSE,
                runc=find(self._binaries, "runc"),
                cni=next(
                    place
                    for place in (str(self._binaries), *_CNI)
                    if Path(place, "bridge").exists()
                ),
            )
        )
        ctr = [find(self._binaries, "ctr") or "ctr", "-a", str(socket), "-n", "k8s.io"]
        base = json.loads(
            subprocess.run([*ctr, "oci", "spec"], capture_output=True, check=True).stdout
        )
        base["mounts"] += mounts()
        (home / "base.json").write_text(json.dumps(base))
        (home / "cni").mkdir()
        (home / "cni" / "10-bridge.conflist").write_text(json.dumps(_cni(number, home)))
        self._run("containerd", f"--config={home}/containerd.toml", log=f"{node}-containerd")
        wait_until(
            lambda: (
                not subprocess.run([*ctr, "version"], capture_output=True, check=False).returncode
            )
        )
        subprocess.run([*ctr, "images", "import", str(archive)], check=True, capture_output=True)
        group = _group(node)
        for controller in _cgroups(group):
            controller.mkdir(parents=True, exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):  # of v1, where a new group has none
                if (controller.parent / name).exists():
                    (controller / name).write_text((controller.parent / name).read_text())
            if (shares := controller / "cpu.shares").exists():
                shares.write_text("3072")  # else all its pods get as much CPU as one process
        config = {
            **_KUBELET,
            "authentication": {
                "x509": {"clientCAFile": f"{self.directory}/pki/ca.crt"},
                "webhook": {"enabled": False},
                "anonymous": {"enabled": False},
            },
            "cgroupRoot": group,
            "port": 10250 + number * 100,
            "healthzPort": 10248 + number * 100,
            "containerRuntimeEndpoint": f"unix://{socket}",
            "podLogsDir": f"{home}/logs",
            "volumePluginDir": f"{home}/plugins",
        }
        (home / "kubelet.yaml").write_text(yaml.safe_dump(config))
        self._run(
            "kubelet",
            f"--config={home}/kubelet.yaml",
            f"--kubeconfig={self.kubectl.config}",
            *(f"--hostname-override={node}", f"--node-ip={_ADDRESS}"),
            *(f"--root-dir={home}/kubelet", f"--cert-dir={home}/certificates"),
            log=f"{node}-kubelet",
        )

    def _run(self, name: str, *arguments: str, log: str | None = None) -> None:
        binary = find(self._binaries, name)
        assert binary is not None, name
        path = {
            "PATH": f"{self._binaries}:{os.environ['PATH']}"
        }  # containerd looks for its shim there
        with (self.directory / f"{log or name}.log").open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    [binary, *arguments], stdout=output, stderr=output, env={**os.environ, **path}
                )
            )

    def _write_kubeconfig(self) -> None:
        pki = self.directory / "pki"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": _SERVER, "certificate-authority": f"{pki}/ca.crt"},
                }
            ],
            "users": [
                {
                    "name": "test",
                    "user": {
                        "client-certificate": f"{pki}/admin.crt",
                        "client-key": f"{pki}/admin.key",
                    },
                }
            ],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        self.kubectl.config.write_text(yaml.safe_dump(config))

    def _stop(self) -> None:
        """End the components, then what is in the nodes' cgroups; put back what kubelets set."""
        if self._names is not None:
            self._names.close()
        for process in reversed(self._processes):
            process.terminate()
        deadline = time.monotonic() + 20
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for group in (one for name in NODES for one in _cgroups(_group(name))):
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


def _group(node: str) -> str:
    namespace = Path("/proc/self/ns/pid").stat().st_ino  # process numbers repeat in each
    return f"/cog-triton-{namespace}-{node}"


def _cgroups(group: str) -> list[Path]:
    """The cgroup of a node in each hierarchy."""
    top = Path("/sys/fs/cgroup")
    if _CONTROLLERS_V1.is_dir():
        return [one / group[1:] for one in top.iterdir() if one.is_dir() and not one.is_symlink()]
    return [top / group[1:]]


def _cni(number: int, home: Path) -> Mapping[str, Any]:
    """Pods of both nodes on one bridge, each node with addresses of its own."""
    network = f"10.244.{number + 1}"
    addresses = {
        "subnet": _PODS,
        "rangeStart": f"{network}.10",
        "rangeEnd": f"{network}.250",
        "gateway": "10.244.0.1",
    }
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isDefaultGateway": True,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[addresses]], "dataDir": f"{home}/ipam"},
    }
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}


_KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "enforceNodeAllocatable": [],
    "evictionHard": {
        "memory.available": "50Mi",
        "nodefs.available": "1%",
        "imagefs.available": "1%",
    },
    "failSwapOn": False,
    "failCgroupV1": False,
    "imageGCHighThresholdPercent": 100,
    "syncFrequency": "5s",
    "nodeStatusUpdateFrequency": "4s",
    "volumeStatsAggPeriod": "5s",
    "clusterDNS": [_ADDRESS],
    "clusterDomain": "cluster.local",
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
