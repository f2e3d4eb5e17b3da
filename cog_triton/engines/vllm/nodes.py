"""Nodes of one engine: what ``model.json`` and the launcher say of vLLM's multi-node mode.

vLLM's multiprocessing executor spreads the ranks of one engine over `nnodes` machines. The first
node, the leader, runs the engine; each other one runs nothing but its share of the workers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cog_triton.errors import InvalidArgument, InvalidPredictorConfig

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
