"""One engine on two nodes: the second runs vLLM's executor, which here is the double's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_stack import TOKENS, VLLMStack, completion, prompt_of

from cog_triton.system.ports import free_ports

pytestmark = [pytest.mark.integration, pytest.mark.full]
NODE = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
arguments = {**json.loads(sys.argv[1]), "node_rank": 1, "distributed_executor_backend": "mp"}
config = AsyncEngineArgs(**arguments).create_engine_config(headless=True)
MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)
"""
"""As ``vllm serve --headless`` does."""


@pytest.mark.parametrize("named", ["model.json", "LWS_LEADER_ADDRESS"])
def test_a_leader_serves_once_the_other_node_runs(tmp_path: Path, named: str) -> None:
    address = "127.0.0.1"
    given = {"LWS_LEADER_ADDRESS": address} if named != "model.json" else {}
    leader = VLLMStack(tmp_path, loras=False, SERVED_MODEL_NAME="any", **given)
    model = tmp_path / "engine" / "model.json"
    (port,) = free_ports(1)
    parallel = {"tensor_parallel_size": 2, "nnodes": 2, "master_port": port}
    own = {} if given else {"master_addr": address}
    arguments = json.loads(model.read_text()) | parallel
    model.write_text(json.dumps(arguments | own))
    whole = {**arguments, "master_addr": address, "model": str(tmp_path / "weights")}
    command = [sys.executable, "-c", NODE, json.dumps(whole)]
    with subprocess.Popen(command, env=leader.environment) as node:
        try:
            with leader.served():
                assert "".join(completion(leader, 1)) == (prompt_of(1) * TOKENS)[:TOKENS]
        finally:
            node.kill()
