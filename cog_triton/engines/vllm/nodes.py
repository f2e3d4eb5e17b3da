"""Nodes of one engine: what ``model.json`` and the launcher say of vLLM's multi-node mode.

vLLM's multiprocessing executor spreads the ranks of one engine over `nnodes` machines. The first
node, the leader, runs the engine; each other one runs nothing but its share of the workers.

vLLM itself does not tell its nodes of each other: those that are left wait in a collective, the
leader up to five minutes, the others for ever. So each node has a TCP connection to the leader,
whose end is the other's death. A message is a line of JSON.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cog_triton
from cog_triton.errors import (
    CogTritonError,
    EngineIncompatible,
    InvalidArgument,
    InvalidPredictorConfig,
    TritonUnavailable,
    from_text,
)
from cog_triton.ipc.streams import receive_line, send_line

if TYPE_CHECKING:
    from cog_triton.engines.vllm.model_directory import VLLMModel

LEADER = "leader"
"""Parameter of the engine: the leader's address."""
# vllm/config/parallel.py; the port after it is that of our own links.
_MASTER_PORT = 29501
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
# Paths and secrets, which may differ from node to node, and where the leader is.
_OF_A_NODE = frozenset(("model", "tokenizer", "download_dir", "hf_token", "master_addr"))
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of an engine: how many there are, the leader's address, and the port of its ranks."""

    count: int
    address: str
    port: int

    @property
    def link_port(self) -> int:
        """Port on which the leader takes the links of the others."""
        return self.port + 1


def node_count(arguments: Mapping[str, Any]) -> int:
    """Number of nodes that the engine arguments want; 1 without `nnodes`."""
    count = arguments.get("nnodes")
    return 1 if count is None else count


def check_nodes(where: Path, arguments: Mapping[str, Any]) -> None:
    """Raise E1202 for what cannot be spread over the nodes that `arguments` want."""

    def refuse(name: str, rule: str) -> None:
        raise InvalidPredictorConfig(f"{where}: {name}={arguments.get(name)!r}: {rule}")

    count = node_count(arguments)
    if arguments.get("node_rank") is not None:
        refuse("node_rank", "leave it out: `cog-triton serve --node-rank` says which node this is")
    if count < 1:
        refuse("nnodes", "must be at least 1")
    if count == 1:
        return
    ranks = math.prod(arguments.get(name) or 1 for name in _PARALLEL)
    if ranks % count:
        refuse("nnodes", f"the {ranks} ranks ({' x '.join(_PARALLEL)}) must divide by it")
    if (arguments.get("data_parallel_size") or 1) > 1:
        refuse("data_parallel_size", "not with nnodes: start a server for each engine")
    if arguments.get("distributed_executor_backend") not in (None, "mp"):
        refuse("distributed_executor_backend", 'must be "mp" with nnodes')
    if arguments.get("enable_lora"):
        refuse("enable_lora", "not with nnodes: adapters are on the leader's disk alone")
    if not 0 < (arguments.get("master_port") or _MASTER_PORT) < 65535:
        refuse("master_port", "must be 1 to 65534, since nodes are linked on the port after it")


def nodes_of(arguments: Mapping[str, Any], leader: str | None) -> Nodes:
    """The nodes, with `leader` before the `master_addr` of `arguments`; raises E1005 for none."""
    address = leader or arguments.get("master_addr")
    if not address:
        raise InvalidArgument(
            f"--leader (LWS_LEADER_ADDRESS): must be set, as model.json has nnodes ="
            f" {node_count(arguments)}: the address of node 0, as all nodes reach it"
        )
    return Nodes(node_count(arguments), address, arguments.get("master_port") or _MASTER_PORT)


def node_arguments(
    arguments: Mapping[str, Any], nodes: Nodes, rank: int, address: str
) -> dict[str, Any]:
    """Engine arguments of node `rank`; `address` is the leader's as a number."""
    return {
        **arguments,
        "nnodes": nodes.count,
        "node_rank": rank,
        "master_addr": address,
        "master_port": nodes.port,
        "distributed_executor_backend": "mp",
    }


def network_variables(address: str) -> dict[str, str]:
    """What makes vLLM, Gloo and NCCL use this node's `address`, the one that reaches the leader."""
    found = {"VLLM_HOST_IP": address}
    if name := _interface(address):
        found |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return found


def fingerprint(model: VLLMModel) -> str:
    """SHA-256 of what all nodes must agree on: the engine arguments, and the model's shape."""
    arguments = {k: v for k, v in model.arguments.items() if k not in _OF_A_NODE}
    shape = [model.max_model_len, model.architectures, model.hidden_size, model.layers]
    return hashlib.sha256(json.dumps([arguments, shape], sort_keys=True).encode()).hexdigest()


def _interface(address: str) -> str | None:
    """Name of the interface whose first address of IPv4 it is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


_log = logging.getLogger(__name__)
_LINE = 4096
_LINE_S, _POLL_S, _TELL_S, _RESOLVE_S = 5.0, 0.2, 15.0, 60.0
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
STARTED, STOPPED, ERROR = "started", "stopped", "error"
HANGS_UP = "it hangs up at once"
WATCH = "node-links"
"""Name of the thread that notices the end of a node."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A node's first message: its rank, and what all nodes must have the same of."""

    rank: int
    vllm: str | None
    model: str
    cog_triton: str = cog_triton.__version__


class LeaderLinks:
    """The leader's links; from the first one lost on, the engine is beyond use."""

    def __init__(self, nodes: Nodes, mine: Hello) -> None:
        """Listen on the leader's address; raises E1005 where this machine does not have it."""
        self._nodes, self._mine = nodes, mine
        self._links: dict[int, socket.socket] = {}
        self._closing = False
        self._listener = _listen(nodes)
        self.address: str = self._listener.getsockname()[0]
        """The leader's address as a number."""
        if ip_address(self.address).is_loopback:
            _log.warning(
                "--leader=%r is %s here: only nodes on this machine can reach it",
                nodes.address, self.address,
            )  # fmt: skip

    def wait(self, on_lost: Callable[[str], None]) -> None:
        """Wait until every node has joined, and tell them all to start.

        From then on a thread calls `on_lost` with the reason when one of them is gone.
        """
        others, told = set(range(1, self._nodes.count)), 0.0
        with self._listener:
            while missing := others - self._links.keys():
                if time.monotonic() - told > _TELL_S:
                    told = time.monotonic()
                    _log.info(
                        "waiting on port %d for nodes %s of %d", self._nodes.link_port,
                        ", ".join(map(str, sorted(missing))), self._nodes.count,
                    )  # fmt: skip
                self._take_one()
        for link in self._links.values():
            with suppress(OSError):  # it has just left, which is noticed below
                send_line(link, {STARTED: True})
        _log.info("all %d nodes have joined", self._nodes.count)
        thread = threading.Thread(target=self._watch, args=(on_lost,), name=WATCH, daemon=True)
        thread.start()

    def close(self) -> None:
        """Tell the nodes that the engine ends as intended."""
        self._closing = True
        for link in self._links.values():
            with suppress(OSError):
                send_line(link, {STOPPED: True})
                link.shutdown(socket.SHUT_WR)

    def _take_one(self) -> None:
        """Take a node, or drop one that has left meanwhile."""
        ready, _, _ = select.select([self._listener, *self._links.values()], [], [], _POLL_S)
        for rank, link in list(self._links.items()):
            if link in ready:
                _log.info("node %d has left before the start: %s", rank, _last_word(link))
                self._links.pop(rank).close()
        if self._listener not in ready:
            return
        link, (host, *_) = self._listener.accept()
        try:
            _keep_alive(link)
            hello = Hello(**_receive(link))
            if error := self._refusal(hello, host):
                _log.warning("%s", error)
                send_line(link, {ERROR: str(error)})
                link.close()
                return
        except (OSError, EOFError, ValueError, TypeError) as error:
            _log.warning("%s connected, and is no node: %s", host, error)
            link.close()
            return
        self._links[hello.rank] = link
        _log.info("node %d (%s) has joined", hello.rank, host)

    def _refusal(self, hello: Hello, host: str) -> CogTritonError | None:
        at, mine = f"node {hello.rank} ({host})", self._mine
        if hello.rank not in range(1, self._nodes.count):
            most = self._nodes.count - 1
            return InvalidArgument(f"{at}: --node-rank: must be 1 to {most} with nnodes={most + 1}")
        if hello.rank in self._links:
            return InvalidArgument(f"{at}: --node-rank: another node of this rank has joined")
        for name in ("cog_triton", "vllm"):
            if (its := getattr(hello, name)) != (ours := getattr(mine, name)):
                return EngineIncompatible(f"{at}: has {name} {its}, and the leader has {ours}")
        if hello.model != mine.model:
            return EngineIncompatible(f"{at}: its model.json or model is not that of the leader")
        return None

    def _watch(self, on_lost: Callable[[str], None]) -> None:
        ready, _, _ = select.select(list(self._links.values()), [], [])
        for rank, link in self._links.items():
            if link in ready and not self._closing:
                on_lost(f"node {rank} is gone: {_last_word(link)}")
                return


class NodeLink:
    """A node's link to the leader, from `join` on."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._peer = link.getpeername()[:2]
        self.leader: str = self._peer[0]
        """The leader's address, and this node's own, as numbers."""
        self.address: str = link.getsockname()[0]

    def heard(self, seconds: float) -> str | None:
        """What came within `seconds`: `STARTED`, `STOPPED`, "" for the leader's death, or None.

        Raises the coded error with which the leader refuses this node, and E1005 where it is none.
        """
        if not select.select([self._link], [], [], seconds)[0]:
            return None
        try:
            message = _receive(self._link)
        except (OSError, EOFError):
            return ""
        except ValueError as error:
            raise self._no_leader(error) from error
        if ERROR in message:
            text = str(message[ERROR])
            raise from_text(text) or EngineIncompatible(text)
        word = next(iter(message), None)
        if word not in (STARTED, STOPPED):
            raise self._no_leader(f"it says {word!r}")
        return str(word)

    def _no_leader(self, why: object) -> InvalidArgument:
        address, port = self._peer
        return InvalidArgument(f"--leader: what answers at {address}, port {port}, is none: {why}")

    def close(self, error: str = "") -> None:
        """Hang up, with the reason where this node cannot go on."""
        with self._link, suppress(OSError):
            if error:
                send_line(self._link, {ERROR: error[: _LINE // 2]})


def join(
    nodes: Nodes, hello: Hello, patience_s: float, stopped: Callable[[], bool]
) -> NodeLink | None:
    """Connect to the leader; None once `stopped`. Raises E2105 after `patience_s` seconds."""
    deadline, reason = time.monotonic() + patience_s, ""
    while not stopped():
        try:
            return _connect(nodes, hello)
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise unreachable(nodes, patience_s, reason)
        time.sleep(_POLL_S)
    return None


def unreachable(nodes: Nodes, patience_s: float, reason: str = HANGS_UP) -> TritonUnavailable:
    """The error of a leader that could not be joined for `patience_s` seconds."""
    return TritonUnavailable(
        f"the leader ({nodes.address}, port {nodes.link_port}) cannot be reached for"
        f" {patience_s:g} s (TRITON_START_TIMEOUT): {reason}"
    )


def _connect(nodes: Nodes, hello: Hello) -> NodeLink:
    link = socket.create_connection((nodes.address, nodes.link_port), timeout=_LINE_S)
    try:
        _keep_alive(link)
        send_line(link, asdict(hello))
        return NodeLink(link)
    except OSError as error:
        link.close()
        raise ConnectionError(HANGS_UP) from error


def _listen(nodes: Nodes) -> socket.socket:
    deadline = time.monotonic() + _RESOLVE_S
    while True:
        try:
            family, *_, address = socket.getaddrinfo(
                nodes.address, nodes.link_port, type=socket.SOCK_STREAM
            )[0]
            return socket.create_server(address[:2], family=family)
        except socket.gaierror as error:  # a pod's name takes a while to be known
            if time.monotonic() > deadline:
                raise InvalidArgument(f"--leader={nodes.address!r}: {error.strerror}") from error
            time.sleep(_POLL_S)
        except OSError as error:
            raise InvalidArgument(
                f"--leader={nodes.address!r}: node 0 cannot listen there, on port"
                f" {nodes.link_port}: {error.strerror}"
            ) from error


def _keep_alive(link: socket.socket) -> None:
    """Have a machine that is gone without a word noticed within 20 s."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _receive(link: socket.socket) -> dict[str, Any]:
    """The next line; whoever does not end it in time is taken for gone."""
    try:
        message = json.loads(receive_line(link, _LINE, _LINE_S))
    except RecursionError as error:
        raise ValueError("its message is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("its message is no object")
    return message


def _last_word(link: socket.socket) -> str:
    try:
        return str(_receive(link).get(ERROR, "it broke the link"))
    except (OSError, EOFError, ValueError) as error:
        return str(error) or type(error).__name__
