"""Scripts of the chart's leader and workers are shell, and the endpoint picker finds our pods."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_rendering import example, rendered


def program(directory: Path, name: str, text: str) -> None:
    path = directory / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def group() -> dict[str, Any]:
    """The leader and its workers."""
    manifest = rendered(example("several-nodes"))["LeaderWorkerSet", "cog-triton"]
    found: dict[str, Any] = manifest["spec"]["leaderWorkerTemplate"]
    return found


@pytest.mark.parametrize("role", ["leader", "worker"])
def test_the_scripts_of_the_manifest_are_shell(group: dict[str, Any], role: str) -> None:
    *_, script = group[f"{role}Template"]["spec"]["containers"][0]["args"]
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_leader_names_all_hosts_and_waits_for_them(
    group: dict[str, Any], tmp_path: Path
) -> None:
    container = group["leaderTemplate"]["spec"]["containers"][0]
    program(tmp_path, "ssh", '#!/bin/sh\necho "$@" >> ssh-arguments\n')
    said = "$MPI_HOSTS|$MPIRUN_ARGS|$COG_TRITON_WORK_DIR|$*"
    program(tmp_path, "cog-triton", f'#!/bin/sh\necho "{said}"\n')
    done = subprocess.run(
        container["args"],
        cwd=tmp_path,
        env={
            **{item["name"]: item["value"] for item in container["env"]},
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "LWS_LEADER_ADDRESS": "cog-triton-0.cog-triton.default",
            "LWS_GROUP_SIZE": "3",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    hosts, mpirun_args, work, arguments = done.stdout.strip().split("|")
    assert hosts.split(",") == [f"cog-triton-0{n}.cog-triton.default" for n in ("", "-1", "-2")]
    assert mpirun_args.startswith("--mca plm_rsh_args '-p 2222 -i /ssh/id ")
    assert work == "/opt/cog-triton/work/cog-triton-0"
    assert arguments == "serve /models/engine --host 0.0.0.0"
    asked = (tmp_path / "ssh-arguments").read_text().splitlines()
    assert [line.split()[-2:] for line in asked] == [[h, "true"] for h in hosts.split(",")[1:]]


def test_a_worker_of_vllm_ends_with_the_leaders_engine(tmp_path: Path) -> None:
    program(tmp_path, "python3", '#!/bin/sh\necho "$@" >arguments\nexec sleep 600\n')
    (tmp_path / "model.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as leader:
        port = {"master_port": leader.getsockname()[1]}
        manifest = rendered(example("several-nodes-vllm", model__vllm=port))
        spec = manifest["LeaderWorkerSet", "cog-triton"]["spec"]["leaderWorkerTemplate"]
        *bash, script = spec["workerTemplate"]["spec"]["containers"][0]["args"]
        with subprocess.Popen(
            [*bash, script.replace("/opt/cog-triton/work", str(tmp_path))],
            cwd=tmp_path,
            env={
                "COG_WEIGHTS": str(tmp_path),
                "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
                "LWS_LEADER_ADDRESS": "127.0.0.1",
                "LWS_WORKER_INDEX": "1",
            },
            start_new_session=True,
        ) as worker:
            try:
                leader.settimeout(60)
                engine, _ = leader.accept()
                assert worker.poll() is None
                engine.close()
                assert worker.wait(60) == 0
            finally:
                os.killpg(worker.pid, signal.SIGKILL)
    arguments = (tmp_path / "arguments").read_text()
    assert "serve --headless" in arguments
    assert arguments.endswith("--node-rank 1 --master-addr 127.0.0.1\n")


def test_the_endpoint_picker_reads_our_metrics() -> None:
    documents = rendered(example("inference-pool"))
    pod = documents["Deployment", "cog-triton"]["spec"]["template"]
    (server,) = pod["spec"]["containers"]
    pool = documents["InferencePool", "cog-triton"]["spec"]
    variables = {item["name"]: item.get("value") for item in server["env"]}
    assert variables["METRICS_PUBLIC"] == "1"  # it sends no key
    picker = documents["Deployment", "cog-triton-epp"]["spec"]["template"]
    service = documents["Service", pool["endpointPickerRef"]["name"]]["spec"]
    assert service["selector"].items() <= picker["metadata"]["labels"].items()
    assert pool["endpointPickerRef"]["port"]["number"] == service["ports"][0]["port"]
    config = yaml.safe_load(documents["ConfigMap", "cog-triton-epp"]["data"]["epp.yaml"])
    assert pod["metadata"]["labels"]["llm-d.ai/engine-type"] == "vllm"
    plugins = {plugin["type"] for plugin in config["plugins"]}
    for profile in config["schedulingProfiles"]:
        assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= plugins
    scaled = documents["ScaledObject", "cog-triton"]["spec"]["scaleTargetRef"]["name"]
    assert ("Deployment", scaled) in documents
