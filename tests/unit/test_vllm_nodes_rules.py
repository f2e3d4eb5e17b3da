"""Nodes of a vLLM engine: what model.json may say of them, and the links between them."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import vllm_engine

from cog_triton.engines.registry import open_engine
from cog_triton.engines.vllm import nodes
from cog_triton.engines.vllm.family import VLLMFamily
from cog_triton.engines.vllm.model_directory import read_model
from cog_triton.engines.vllm.nodes import (
    LEADER,
    STARTED,
    STOPPED,
    Hello,
    LeaderLinks,
    NodeLink,
    Nodes,
    join,
)
from cog_triton.errors import (
    CogTritonError,
    EngineIncompatible,
    InvalidArgument,
    InvalidPredictorConfig,
    TritonUnavailable,
)
from cog_triton.keeper.keeper_messages import SPARE_LOADS
from cog_triton.serving import engine_preparation
from cog_triton.serving.engine_node import ALIVE, serve_node
from cog_triton.settings import load_settings
from cog_triton.system.ports import free_ports
from cog_triton.triton.serve_config import ServeConfig

MINE = Hello(0, "0.33.0", "a model")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nnodes": 0}, "nnodes=0: must be at least 1"),
        ({"nnodes": 2}, "nnodes=2: the 1 ranks"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "nnodes=2: the 3 ranks"),
        ({"nnodes": 2, "node_rank": 1}, "node_rank=1: leave it out"),
        ({"node_rank": 0}, "node_rank=0: leave it out"),
        ({"nnodes": 2, "data_parallel_size": 2, "tensor_parallel_size": 2}, "data_parallel_size=2"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "enable_lora": True}, "enable_lora=True: not"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "master_port": 65535}, "master_port=65535: must"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
            "distributed_executor_backend='ray': must be",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidPredictorConfig) as caught:
        read_model(vllm_engine(tmp_path, **given))
    assert f"model.json: {said}" in caught.value.detail


def spread(directory: Path, **more: Any) -> Path:
    """A model for two nodes, each with half of its layers."""
    return vllm_engine(directory, nnodes=2, pipeline_parallel_size=2, **more)


def test_the_launcher_names_the_leader_before_model_json(tmp_path: Path) -> None:
    arguments = read_model(spread(tmp_path, master_addr="gpu-1", master_port=4000)).arguments
    assert nodes.nodes_of(arguments, "gpu-2") == Nodes(2, "gpu-2", 4000)
    assert nodes.nodes_of(arguments, "") == Nodes(2, "gpu-1", 4000)
    assert nodes.node_arguments(arguments, Nodes(2, "gpu-2", 4000), 1, "10.0.0.2") == {
        **arguments,
        "node_rank": 1,
        "master_addr": "10.0.0.2",
        "distributed_executor_backend": "mp",
    }
    with pytest.raises(InvalidArgument, match=r"--leader .LWS_LEADER_ADDRESS.: must be set"):
        nodes.nodes_of({"nnodes": 2}, None)


def test_an_engine_of_several_nodes_is_rendered_with_its_leader_and_cannot_be_parked(
    tmp_path: Path,
) -> None:
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    family = open_engine(spread(tmp_path))
    assert isinstance(family, VLLMFamily)
    config = text_format.Parse("", ModelConfig())
    family._check_version = lambda options: None  # type: ignore[method-assign]
    family.render(config, {LEADER: "gpu-1"})
    assert config.parameters[LEADER].string_value == "gpu-1"
    assert SPARE_LOADS not in config.parameters
    with pytest.raises(InvalidArgument, match="--leader"):
        family.render(config, {})


def test_a_second_engine_has_no_nodes(tmp_path: Path) -> None:
    weights = str(spread(tmp_path / "engine"))
    settings = load_settings(cog_triton_work_dir=tmp_path, spare_engine=True, cog_weights=weights)
    with pytest.raises(InvalidArgument, match="SPARE_ENGINE: not with an engine of 2 nodes"):
        asyncio.run(engine_preparation.prepare_engine(settings))


def test_the_settings_name_the_leader(tmp_path: Path) -> None:
    settings = load_settings(cog_triton_work_dir=tmp_path, lws_leader_address="gpu-1")
    for engine, expected in ((spread(tmp_path / "two"), "gpu-1"), (vllm_engine(tmp_path), None)):
        _, config = asyncio.run(engine_preparation.open_configured(settings, str(engine)))
        assert isinstance(config, ServeConfig)
        assert config.arguments_of("tensorrt_llm").get(LEADER) == expected


@pytest.mark.parametrize(
    ("rank", "more", "said"),
    [
        (1, None, "has no nnodes"),
        (2, {"master_addr": "gpu-1"}, "must be below nnodes=2"),
        (1, {}, "--leader"),
    ],
)
def test_a_node_that_cannot_be_is_refused(
    tmp_path: Path, rank: int, more: dict[str, Any] | None, said: str
) -> None:
    engine = vllm_engine(tmp_path) if more is None else spread(tmp_path, **more)
    settings = load_settings(
        cog_weights=str(engine), lws_worker_index=rank, cog_triton_work_dir=tmp_path / "work"
    )
    with pytest.raises(InvalidArgument, match=said):
        serve_node(settings, lambda line: None)


def test_nodes_agree_on_all_but_paths_and_secrets(tmp_path: Path) -> None:
    def of(name: str, **more: Any) -> str:
        return nodes.fingerprint(read_model(spread(tmp_path / name, **more)))

    same = of("a")
    assert of("b", hf_token="hf_secret", download_dir="/x", master_addr="gpu-1") == same
    assert of("c", seed=1) != same
    assert of("d", config={"hidden_size": 64}) != same


def test_the_network_is_that_of_the_address() -> None:
    assert nodes.network_variables("127.0.0.1") == {
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    assert nodes.network_variables("192.0.2.1") == {"VLLM_HOST_IP": "192.0.2.1"}


class Leader:
    """A leader that waits for three nodes; `lost` gets what it says of one that is gone."""

    def __init__(self) -> None:
        (port,) = free_ports(1)
        self.nodes = Nodes(3, "127.0.0.1", port - 1)
        self.links = LeaderLinks(self.nodes, MINE)
        self.lost: queue.Queue[str] = queue.Queue()
        self.waiting = threading.Thread(target=self.links.wait, args=(self.lost.put,), daemon=True)
        self.waiting.start()
        self._joined: list[NodeLink] = []

    def join(self, rank: int, **values: Any) -> NodeLink:
        link = join(self.nodes, Hello(rank, **{"vllm": "0.33.0", "model": "a model"} | values), 30,
                    lambda: False)  # fmt: skip
        assert link is not None
        self._joined.append(link)
        return link

    def close(self) -> None:
        for rank in {1, 2} - self.links._links.keys():  # those that a test left out
            self.join(rank)
        self.waiting.join(30)
        self.links.close()
        for joined in self._joined:
            joined.close()
        for thread in threading.enumerate():
            if thread.name == nodes.WATCH:  # it must not find its sockets closed
                thread.join(30)
        for link in self.links._links.values():
            link.close()


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.close()


def test_nodes_start_when_all_have_joined_and_hear_of_the_end(leader: Leader) -> None:
    assert leader.links.address == "127.0.0.1"
    early = leader.join(1)
    assert early.heard(0.3) is None
    early.close()  # and comes again
    first, second = leader.join(1), leader.join(2)
    assert (first.leader, first.address) == ("127.0.0.1", "127.0.0.1")
    assert first.heard(30) == second.heard(30) == STARTED
    leader.waiting.join(30)
    leader.links.close()
    assert first.heard(30) == second.heard(30) == STOPPED
    assert first.heard(30) == ""
    assert leader.lost.empty()


def test_the_leader_hears_why_a_node_is_gone(leader: Leader) -> None:
    first, second = leader.join(1), leader.join(2)
    assert first.heard(30) == second.heard(30) == STARTED
    second.close("E2200 VLLMUnknownError: node 2: no memory")
    assert (
        leader.lost.get(timeout=30) == "node 2 is gone: E2200 VLLMUnknownError: node 2: no memory"
    )


@pytest.mark.parametrize(
    ("rank", "values", "error", "said"),
    [
        (3, {}, InvalidArgument, "node 3 (127.0.0.1): --node-rank: must be 1 to 2 with nnodes=3"),
        (1, {"vllm": "0.26.0"}, EngineIncompatible, "has vllm 0.26.0, and the leader has 0.33.0"),
        (1, {"cog_triton": "0.0.1"}, EngineIncompatible, "has cog_triton 0.0.1, and the leader"),
        (2, {"model": "another"}, EngineIncompatible, "its model.json or model is not that of"),
    ],
)
def test_a_node_that_differs_is_refused(
    leader: Leader, rank: int, values: dict[str, Any], error: type[CogTritonError], said: str
) -> None:
    link = leader.join(rank, **values)
    with pytest.raises(error) as caught:
        link.heard(30)
    assert said in caught.value.detail


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b'{"rank": 1}\n',
        b"x" * 9999,
        b"[" * 4000 + b"\n",
        b"\xff\n",
    ],
)
def test_what_is_no_node_is_dropped(leader: Leader, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", leader.nodes.link_port)) as other:
        other.sendall(sent)
        other.settimeout(30)
        with suppress(ConnectionResetError):
            assert other.recv(1) == b""
    assert leader.join(1).heard(0.1) is None
    assert leader.waiting.is_alive()


def test_a_line_that_does_not_end_holds_nobody_up(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_LINE_S", 0.1)
    with socket.create_connection(("127.0.0.1", leader.nodes.link_port)) as other:
        other.settimeout(30)
        with suppress(OSError):
            for _ in range(1000):  # each byte is in time
                other.sendall(b"x")
                time.sleep(0.02)
            pytest.fail("it was listened to")


def test_a_rank_is_one_nodes(leader: Leader) -> None:
    first, again = leader.join(1), leader.join(1)
    with pytest.raises(InvalidArgument, match=r"node 1 .127.0.0.1.: --node-rank: another node of"):
        again.heard(30)
    assert first.heard(0.1) is None


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "Expecting value"),
        (b'{"jsonrpc": "2.0"}\n', "it says 'jsonrpc'"),
    ],
)
def test_what_is_no_leader_is_told_by_name(sent: bytes, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        link = join(Nodes(2, "127.0.0.1", port - 1), MINE, 30, lambda: False)
        assert link is not None
        taken, _ = server.accept()
        with taken:
            taken.sendall(sent)
            with pytest.raises(InvalidArgument, match=f"at 127.0.0.1, port {port}, is none: {why}"):
                link.heard(30)
        link.close()


@pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
def test_a_leader_that_hangs_up_at_once_is_as_good_as_none(tmp_path: Path, resets: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] - 1
        settings = load_settings(
            cog_weights=str(spread(tmp_path, master_addr="127.0.0.1", master_port=port)),
            lws_worker_index=1,
            cog_triton_work_dir=tmp_path / "work",
            triton_start_timeout=0.1,
        )

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    link, _ = server.accept()
                    with link:
                        linger = struct.pack("ii", resets, 0)
                        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

        threading.Thread(target=hang_up, daemon=True).start()
        told: list[str] = []
        reasons = "it hangs up at once|Connection reset by peer"  # the latter while connecting
        with pytest.raises(TritonUnavailable, match=rf"for 0\.1 s \(TRITON.*: ({reasons})"):
            serve_node(settings, told.append)
        assert told == ["Node 1 of 2, of the leader 127.0.0.1"]
        assert (tmp_path / "work" / ALIVE).is_file()  # what a pod's liveness probe looks at
        server.shutdown(socket.SHUT_RDWR)


def test_a_leader_elsewhere_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_RESOLVE_S", 0)
    for address, said in (("192.0.2.1", "cannot listen there"), ("no.such.invalid", "leader=")):
        with pytest.raises(InvalidArgument, match=said):
            LeaderLinks(Nodes(2, address, 29501), MINE)


def test_a_leader_that_never_comes_is_not_waited_for_for_ever() -> None:
    (port,) = free_ports(1)
    absent = Nodes(2, "127.0.0.1", port - 1)
    with pytest.raises(TritonUnavailable, match=f"127.0.0.1, port {port}. cannot be reached"):
        join(absent, MINE, 0, lambda: False)
    assert join(absent, MINE, 60, lambda: True) is None


def test_a_message_is_one_line_of_json(leader: Leader) -> None:
    leader.join(1)
    with socket.create_connection(("127.0.0.1", leader.nodes.link_port)) as other:
        other.settimeout(30)
        hello = {"rank": 9, "vllm": "0.33.0", "model": "a model", "cog_triton": MINE.cog_triton}
        other.sendall(json.dumps(hello).encode() + b"\n")
        with other.makefile("rb") as lines:
            assert list(json.loads(lines.readline())) == ["error"]
