"""The Helm chart, rendered by Helm in all its shapes, and held to the schemas of Kubernetes."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_rendering import CHART, EXAMPLES, Manifests, example, faults, render, rendered

from cog_triton import __version__
from cog_triton.engines.tensorrt_llm import model_settings
from cog_triton.engines.vllm.model_directory import read_arguments, read_model
from cog_triton.settings import Settings
from cog_triton.triton.serve_config import load_serve_config

_CHART_VARIABLES = {"COG_WEIGHTS", "HF_TOKEN"}


def container(manifests: Manifests) -> dict[str, Any]:
    """The container of a Deployment's server, or of a leader."""
    return pod(manifests)["spec"]["containers"][0]


def pod(manifests: Manifests) -> dict[str, Any]:
    """The template of the pods that answer requests."""
    for (kind, _), item in manifests.items():
        if kind == "LeaderWorkerSet":
            return item["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    return manifests["Deployment", "cog-triton"]["spec"]["template"]


def variables(manifests: Manifests) -> dict[str, str | None]:
    """The environment; None is a Secret's."""
    return {item["name"]: item.get("value") for item in container(manifests)["env"]}


@pytest.fixture(params=EXAMPLES)
def shape(request: pytest.FixtureRequest) -> Manifests:
    return rendered(example(request.param))


@pytest.mark.parametrize("name", EXAMPLES)
def test_helm_lints_it(name: str) -> None:
    import helm_python

    report = helm_python.lint(CHART, example(name), strict=True, kube_version="v1.37.0")
    said = [message for message in report["messages"] if message["severity"] > 1]
    assert (report["total_charts_linted"], report["errors"], said) == (1, [], [])


def test_kubernetes_takes_every_manifest(shape: Manifests) -> None:
    assert {name: faults(item) for name, item in shape.items() if faults(item)} == {}


def test_a_wrong_field_does_not_pass() -> None:
    """What would make the test above worthless: each kind's schema sees a misspelt field."""
    for name in EXAMPLES:
        for (kind, _), item in rendered(example(name)).items():
            wrong = copy.deepcopy(item)
            part = wrong["metadata"] if "spec" not in wrong else wrong["spec"]
            part["replicaz"] = 1
            assert any("replicaz" in fault for fault in faults(wrong)), kind
    (group,) = (
        item
        for (kind, _), item in rendered(example("several-nodes")).items()
        if kind == "LeaderWorkerSet"
    )
    for template in ("leaderTemplate", "workerTemplate"):
        wrong = copy.deepcopy(group)
        inner = wrong["spec"]["leaderWorkerTemplate"][template]["spec"]["containers"][0]
        inner["readinesProbe"] = inner.pop("readinessProbe")
        assert "readinesProbe" in str(faults(wrong)), template


def test_labels_and_ports_meet(shape: Manifests) -> None:
    template = pod(shape)
    labels = template["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in container(shape)["ports"]}
    met = 0
    for (kind, name), item in shape.items():
        if name.endswith("-epp"):
            continue
        spec = item.get("spec", {})
        if kind == "Service":
            assert spec["selector"].items() <= labels
            assert {port["targetPort"] for port in spec["ports"]} <= {*ports}
        elif kind in ("PodDisruptionBudget", "PodMonitor", "Deployment", "InferencePool"):
            assert spec["selector"]["matchLabels"].items() <= labels
        elif kind == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"].items() <= labels
            assert {port["port"] for port in spec["ingress"][0]["ports"]} <= {*ports}
        else:
            continue
        met += 1
        for target in spec.get("targetPorts", ()):
            assert target["number"] in ports.values()
        for endpoint in spec.get("podMetricsEndpoints", ()):
            assert ports[endpoint["port"]] == int(variables(shape)["OPENAI_PORT"] or 0)
    assert met >= 3
    probes = [container(shape)[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness")]
    assert {(probe["path"], ports[probe["port"]]) for probe in probes} == {("/health", 8080)}
    live = container(shape)["livenessProbe"]["httpGet"]
    assert (live["path"], ports[live["port"]]) == ("/health-check", 5000)


def test_what_is_mounted_is_a_volume_and_only_the_work_is_writable(shape: Manifests) -> None:
    template, server = pod(shape)["spec"], container(shape)
    assert server["securityContext"]["readOnlyRootFilesystem"] is True
    assert server["securityContext"]["allowPrivilegeEscalation"] is False
    assert server["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert template["securityContext"]["runAsUser"] == 1000
    assert template["automountServiceAccountToken"] is template["enableServiceLinks"] is False
    mounts = server["volumeMounts"]
    volumes = {volume["name"]: volume for volume in template["volumes"]}
    assert {mount["name"] for mount in mounts} == volumes.keys()
    writable = {mount["mountPath"] for mount in mounts if not mount.get("readOnly")}
    assert writable == {"/tmp", "/dev/shm", "/opt/cog-triton/work"}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


def test_times_follow_from_one_another(shape: Manifests) -> None:
    server, environment = container(shape), variables(shape)
    startup = server["startupProbe"]
    start = int(environment["TRITON_START_TIMEOUT"] or 0)
    assert startup["periodSeconds"] * startup["failureThreshold"] >= start
    sleeps = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = sleeps + int(environment["DRAIN_TIMEOUT"] or 0)
    assert pod(shape)["spec"]["terminationGracePeriodSeconds"] > drain


def test_a_server_that_hangs_is_soon_replaced(shape: Manifests) -> None:
    """But not before its parent has: docs/supervision.md."""
    probe, hook = container(shape)["livenessProbe"], container(shape)["lifecycle"]["preStop"]
    noticed = probe["periodSeconds"] * probe["failureThreshold"]
    assert 8 < noticed <= 30
    assert hook["sleep"]["seconds"] < probe["terminationGracePeriodSeconds"] <= 15


@pytest.mark.parametrize("name", EXAMPLES)
def test_variables_are_settings(name: str) -> None:
    known = {name.upper() for name in Settings.model_fields}
    given = {item["name"] for item in example(name).get("env", ())}
    assert set(variables(rendered(example(name)))) <= known | _CHART_VARIABLES | given


def test_one_gpu_and_a_model_in_a_volume() -> None:
    manifests = rendered(example("one-gpu-vllm"))
    server = container(manifests)
    assert server["resources"]["limits"] == {"memory": "48Gi", "nvidia.com/gpu": 1}
    assert variables(manifests)["COG_WEIGHTS"] == "/model"
    assert variables(manifests)["COG_TRITON_API_KEY"] is None
    model = json.loads(manifests["ConfigMap", "cog-triton"]["data"]["model.json"])
    assert model == {"model": "/models/qwen3-8b", "max_model_len": 8192}
    (claim,) = (v for v in pod(manifests)["spec"]["volumes"] if "persistentVolumeClaim" in v)
    assert claim["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    strategy = manifests["Deployment", "cog-triton"]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_an_engine_by_its_address() -> None:
    manifests = rendered(example("engine-url"))
    weights = "https://models.example.com/llama-3.1-8b-instruct-fp8-sm90/engine.tar"
    assert variables(manifests)["COG_WEIGHTS"] == weights
    config = yaml.safe_load(manifests["ConfigMap", "cog-triton"]["data"]["serve.yaml"])
    assert config["tensorrt_llm"]["args"] == {"kv_cache_free_gpu_mem_fraction": 0.9}
    (work,) = (v for v in pod(manifests)["spec"]["volumes"] if v["name"] == "work")
    claim = work["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["resources"]["requests"]["storage"] == "40Gi"
    assert container(manifests)["startupProbe"]["failureThreshold"] == 120


def test_eight_gpus_of_one_node() -> None:
    manifests = rendered(example("eight-gpus"))
    assert container(manifests)["resources"]["limits"]["nvidia.com/gpu"] == 8
    model = json.loads(manifests["ConfigMap", "cog-triton"]["data"]["model.json"])
    assert model["model"] == "meta-llama/Llama-3.1-70B-Instruct"
    assert model["tensor_parallel_size"] == 8
    assert variables(manifests)["HF_TOKEN"] is None
    assert manifests["Deployment", "cog-triton"]["spec"]["strategy"] == {"type": "Recreate"}
    (endpoint,) = manifests["PodMonitor", "cog-triton"]["spec"]["podMetricsEndpoints"]
    credentials = endpoint["authorization"]["credentials"]
    assert credentials == {"name": "cog-triton", "key": "api-key"}
    own = example("eight-gpus", model__vllm={"tensor_parallel_size": 4, "data_parallel_size": 2})
    model = json.loads(rendered(own)["ConfigMap", "cog-triton"]["data"]["model.json"])
    assert model["tensor_parallel_size"] == 4


def test_several_nodes() -> None:
    manifests = rendered(example("several-nodes"))
    spec = manifests["LeaderWorkerSet", "cog-triton"]["spec"]["leaderWorkerTemplate"]
    assert spec["size"] == 2
    worker = spec["workerTemplate"]["spec"]["containers"][0]
    assert worker["resources"] == container(manifests)["resources"]
    assert worker["volumeMounts"] == container(manifests)["volumeMounts"]
    config = yaml.safe_load(manifests["ConfigMap", "cog-triton"]["data"]["serve.yaml"])
    assert config == {"tensorrt_llm": {"args": {"num_nodes": 2}}}
    ingress = manifests["NetworkPolicy", "cog-triton"]["spec"]["ingress"]
    assert "ports" not in ingress[1]  # mpirun and NCCL choose theirs
    # LeaderWorkerSet makes a headless Service of the set's own name.
    assert ("Service", "cog-triton") not in manifests


def test_several_nodes_of_vllm(tmp_path: Path) -> None:
    manifests = rendered(example("several-nodes-vllm"))
    spec = manifests["LeaderWorkerSet", "cog-triton"]["spec"]["leaderWorkerTemplate"]
    assert (spec["size"], spec["restartPolicy"]) == (2, "None")
    leader, worker = container(manifests), spec["workerTemplate"]["spec"]["containers"][0]
    assert leader["args"] == ["cog-triton", "serve", "--host", "0.0.0.0"]
    *_, script = worker["args"]
    for word in ("serve --headless", '"$LWS_WORKER_INDEX"', '"$LWS_LEADER_ADDRESS"'):
        assert word in script
    # On CUDA, vLLM's sampler imports FlashInfer by default, and the image has none.
    assert "export VLLM_USE_FLASHINFER_SAMPLER=" in script
    assert worker["resources"] == leader["resources"]
    assert worker["volumeMounts"] == leader["volumeMounts"]
    assert "ports" not in worker
    of_the_leader = {"OPENAI_PORT", "DRAIN_TIMEOUT"}
    names = {item["name"] for item in worker["env"]}
    assert names == variables(manifests).keys() - of_the_leader >= {"COG_WEIGHTS", "HF_TOKEN"}
    text = manifests["ConfigMap", "cog-triton"]["data"]["model.json"]
    parallel = {"nnodes": 2, "tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    assert json.loads(text).items() >= parallel.items()
    (tmp_path / "model.json").write_text(text)
    read_arguments(tmp_path)
    own = example("several-nodes-vllm", model__vllm={"tensor_parallel_size": 16})
    model = json.loads(rendered(own)["ConfigMap", "cog-triton"]["data"]["model.json"])
    assert model["tensor_parallel_size"] == 16
    assert "pipeline_parallel_size" not in model


def test_the_cpu_demo_asks_for_no_gpu() -> None:
    manifests = rendered(example("cpu-demo"))
    assert container(manifests)["resources"]["limits"] == {"memory": "4Gi"}
    assert "tolerations" not in pod(manifests)["spec"]
    spot = {"key": "spot", "operator": "Exists"}
    tolerated = rendered(example("cpu-demo", tolerations=[spot]))
    assert pod(tolerated)["spec"]["tolerations"] == [spot]
    tolerated = rendered(example("one-gpu-vllm", tolerations=[spot]))
    assert [one["key"] for one in pod(tolerated)["spec"]["tolerations"]] == [
        "nvidia.com/gpu",
        "spot",
    ]
    assert variables(manifests)["COG_WEIGHTS"] == "/models/engine.tar"
    assert ("ConfigMap", "cog-triton") not in manifests


def test_servers_of_a_pool_are_scaled_by_their_queue() -> None:
    manifests = rendered(example("inference-pool"))
    assert "replicas" not in manifests["Deployment", "cog-triton"]["spec"]  # KEDA's alone
    requests, cache = manifests["ScaledObject", "cog-triton"]["spec"]["triggers"]
    assert requests["metadata"]["threshold"] == "48"
    assert cache["metadata"]["threshold"] == "0.8"
    (rule,) = manifests["HTTPRoute", "cog-triton"]["spec"]["rules"]
    assert rule["backendRefs"][0]["kind"] == "InferencePool"
    assert ("InferencePool", rule["backendRefs"][0]["name"]) in manifests
    plain = example("inference-pool", gateway={"enabled": True}, keda={"enabled": False})
    manifests = rendered(plain)
    (rule,) = manifests["HTTPRoute", "cog-triton"]["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "cog-triton", "port": 8080}]
    assert manifests["Deployment", "cog-triton"]["spec"]["replicas"] == 2
    assert not [kind for kind, _ in manifests if kind in ("InferencePool", "ScaledObject")]


def test_an_image_is_named_by_its_digest_or_its_tag() -> None:
    repository = "registry.example.com/cog-triton-runner-cpu"
    digest = f"sha256:{'0' * 64}"
    for given, wanted in (
        ({"image__tag": "v1"}, f"{repository}:v1"),
        ({"image__tag": 20261122}, f"{repository}:20261122"),
        ({"image__digest": digest}, f"{repository}@{digest}"),
    ):
        assert container(rendered(example("cpu-demo", **given)))["image"] == wanted


def test_the_network_policy_admits_whom_it_names_and_the_endpoint_picker() -> None:
    gateway = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}
    dns = {"ports": [{"port": 53, "protocol": "UDP"}]}
    given = example("inference-pool", networkPolicy={"from": [gateway], "egress": [dns]})
    manifests = rendered(given)
    policy = manifests["NetworkPolicy", "cog-triton"]
    assert faults(policy) == []
    first, picker = policy["spec"]["ingress"][0]["from"]
    assert first == gateway
    labels = manifests["Deployment", "cog-triton-epp"]["spec"]["template"]["metadata"]["labels"]
    assert picker["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["egress"] == [dns]
    assert (
        "from"
        not in rendered(example("cpu-demo"))["NetworkPolicy", "cog-triton"]["spec"]["ingress"][0]
    )


def test_settings_are_written_as_they_were_given() -> None:
    given = {"MAX_LORA_BYTES": 4294967296, "LOG_REQUESTS": False, "TRITON_TIMEOUT": 0.5}
    environment = variables(rendered(example("cpu-demo", settings=given)))
    assert environment["MAX_LORA_BYTES"] == "4294967296"
    assert (environment["LOG_REQUESTS"], environment["TRITON_TIMEOUT"]) == ("false", "0.5")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_notes_say_how_to_ask(name: str) -> None:
    values = example(name)
    notes = render(values)["NOTES.txt"]
    services = [n for kind, n in rendered(values) if kind == "Service" and "epp" not in n]
    assert f"port-forward svc/{services[0]} 8080:8080" in notes
    (body,) = re.findall(r"-d '(.*)'", notes)
    assert json.loads(body)["model"] == values["model"].get("name", "MODEL")
    assert ("Authorization: Bearer $key" in notes) is ("auth" in values)
    scheme = "https" if "tls" in values else "http"
    assert f"Or open {scheme}://localhost:8080/ " in notes
    assert f"curl{' -k' * ('tls' in values)} -sN {scheme}://localhost:8080/v1/chat" in notes
    values["settings"] = {"OPENAI_PAGE": False}
    assert "Or open" not in render(values)["NOTES.txt"]


def test_the_server_reads_what_the_chart_writes(shape: Manifests, tmp_path: Path) -> None:
    written = shape.get(("ConfigMap", "cog-triton"), {"data": {}})["data"]
    for name, text in written.items():
        (tmp_path / name).write_text(text.replace("/models/", f"{tmp_path}/models/"))
    if "model.json" in written and "/models/" in written["model.json"]:
        directory = tmp_path / "models" / "qwen3-8b"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text('{"max_position_embeddings": 40960}')
        (directory / "model.safetensors").touch()
        assert read_model(tmp_path, "0.33").max_model_len == 8192
    elif "model.json" in written:
        several = "tensor_parallel_size" in written["model.json"]
        assert read_arguments(tmp_path, "0.33").get("tensor_parallel_size", 0) == 8 * several
    if "serve.yaml" in written:
        arguments = load_serve_config(tmp_path / "serve.yaml").arguments_of("tensorrt_llm")
        assert arguments
        model_settings.given(arguments)


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
