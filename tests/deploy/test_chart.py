"""The Helm chart: each shape linted, valid, with five invariants; wrong values are refused."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_rendering import (
    CHART,
    EXAMPLES,
    ROOT,
    Manifests,
    all_faults,
    by_name,
    example,
    faults,
    rendered,
)

from cog_triton import __version__
from cog_triton.engines.tensorrt_llm import model_settings
from cog_triton.engines.vllm.model_directory import read_arguments
from cog_triton.settings import Settings
from cog_triton.triton.serve_config import load_serve_config

OWN_VARIABLES = {item["name"] for name in EXAMPLES for item in example(name).get("env", ())}
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def group_of(manifests: Manifests) -> dict[str, Any]:
    """Leader and workers of several nodes."""
    found: dict[str, Any] = manifests["LeaderWorkerSet", "cog-triton"]["spec"]
    return found["leaderWorkerTemplate"]


def pod(manifests: Manifests) -> dict[str, Any]:
    """The template of the pods that answer requests."""
    if ("LeaderWorkerSet", "cog-triton") in manifests:
        return group_of(manifests)["leaderTemplate"]
    return manifests["Deployment", "cog-triton"]["spec"]["template"]


def container(manifests: Manifests) -> dict[str, Any]:
    """The container of a Deployment's server, or of a leader."""
    return pod(manifests)["spec"]["containers"][0]


def variables(manifests: Manifests) -> dict[str, str | None]:
    """The environment; None is a Secret's."""
    return {item["name"]: item.get("value") for item in container(manifests)["env"]}


@pytest.fixture(params=EXAMPLES)
def shape(request: pytest.FixtureRequest) -> Manifests:
    return rendered(example(request.param))


@pytest.mark.parametrize("name", EXAMPLES)
def test_helm_lints_it_and_kubernetes_takes_every_manifest(name: str) -> None:
    import helm_python

    report = helm_python.lint(CHART, example(name), strict=True, kube_version="v1.37.0")
    said = [message for message in report["messages"] if message["severity"] > 1]
    assert (report["total_charts_linted"], report["errors"], said) == (1, [], [])
    manifests = rendered(example(name))
    assert all_faults(manifests) == {}
    for (kind, _), item in manifests.items():  # else the line above would be worthless
        wrong = copy.deepcopy(item)
        (wrong["metadata"] if "spec" not in wrong else wrong["spec"])["replicaz"] = 1
        assert any("replicaz" in fault for fault in faults(wrong)), kind


def test_labels_and_ports_meet(shape: Manifests) -> None:
    labels = pod(shape)["metadata"]["labels"].items()
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
    assert server["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert template["securityContext"]["runAsUser"] == 1000
    assert template["automountServiceAccountToken"] is template["enableServiceLinks"] is False
    volumes = {volume["name"]: volume for volume in template["volumes"]}
    assert {mount["name"] for mount in server["volumeMounts"]} == volumes.keys()
    writable = {one["mountPath"] for one in server["volumeMounts"] if not one.get("readOnly")}
    assert writable == {"/tmp", "/dev/shm", "/opt/cog-triton/work"}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


def test_times_follow_from_one_another(shape: Manifests) -> None:
    server, environment, spec = container(shape), variables(shape), pod(shape)["spec"]
    startup, live = server["startupProbe"], server["livenessProbe"]
    start = startup["periodSeconds"] * startup["failureThreshold"]
    assert start >= int(environment["TRITON_START_TIMEOUT"] or 0)
    sleeps = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = sleeps + int(environment["DRAIN_TIMEOUT"] or 0)
    grace = spec["terminationGracePeriodSeconds"]
    assert grace > drain
    # A server that hangs is soon replaced, but not before its parent has: docs/supervision.md.
    assert 8 < live["periodSeconds"] * live["failureThreshold"] <= 30
    assert sleeps < live["terminationGracePeriodSeconds"] <= 15
    if ("Deployment", "cog-triton") in shape:
        deadline = shape["Deployment", "cog-triton"]["spec"]["progressDeadlineSeconds"]
        assert deadline > start + grace
    else:  # workers outlive the leader's drain
        worker = group_of(shape)["workerTemplate"]["spec"]
        stays = worker["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert drain <= stays < worker["terminationGracePeriodSeconds"]


def test_the_server_reads_what_the_chart_writes(shape: Manifests, tmp_path: Path) -> None:
    known = {name.upper() for name in Settings.model_fields}
    own = {"COG_WEIGHTS", "HF_TOKEN", *OWN_VARIABLES}
    assert {*variables(shape)} - known - own == set()
    written = shape.get(("ConfigMap", "cog-triton"), {"data": {}})["data"]
    for name, text in written.items():
        (tmp_path / name).write_text(text.replace("/models/", f"{tmp_path}/models/"))
    if "model.json" in written:
        directory = tmp_path / "models" / "qwen3-8b"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text('{"max_position_embeddings": 40960}')
        (directory / "model.safetensors").touch()
        several = "tensor_parallel_size" in written["model.json"]
        assert read_arguments(tmp_path, "0.33").get("tensor_parallel_size", 0) == 8 * several
    if "serve.yaml" in written:
        arguments = load_serve_config(tmp_path / "serve.yaml").arguments_of("tensorrt_llm")
        assert arguments
        model_settings.given(arguments)


def test_what_nobody_asked_for_is_off() -> None:
    image = {"repository": "registry.example.com/runner", "tag": "1"}
    manifests = rendered({"image": image, "model": {"claim": "models"}})
    wanted = {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    assert {kind for kind, _ in manifests} == wanted
    assert (
        not {"initContainers", "serviceAccountName", "schedulerName"}
        & pod(manifests)["spec"].keys()
    )


@pytest.mark.parametrize("name", ["one-gpu-vllm", "several-nodes", "several-nodes-vllm"])
def test_parts_of_ones_own(name: str) -> None:
    extra = example(
        name,
        extraVolumes=[{"name": "ca", "configMap": {"name": "ca"}}],
        extraVolumeMounts=[{"name": "ca", "mountPath": "/ca", "readOnly": True}],
        initContainers=[{"name": "first", "image": "busybox:1"}],
        sidecars=[{"name": "log", "image": "busybox:1"}],
        serviceAccount={"create": True, "annotations": {"eks.amazonaws.com/role-arn": "arn:x"}},
        schedulerName="volcano",
        podSpec={"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"},
    )
    manifests = rendered(extra)
    assert all_faults(manifests) == {}
    pods = [pod(manifests)["spec"]]
    if name.startswith("several"):
        pods.append(group_of(manifests)["workerTemplate"]["spec"])
    for number, spec in enumerate(pods):
        assert (spec["schedulerName"], spec["hostNetwork"]) == ("volcano", True)
        assert spec["serviceAccountName"] == "cog-triton"
        assert [one["name"] for one in spec["initContainers"]] == ["first"]
        assert len(spec["containers"]) == 2 - number  # sidecars beside those that serve
        assert "/ca" in [one["mountPath"] for one in spec["containers"][0]["volumeMounts"]]


def test_keys_certificates_and_one_download_of_a_fleet() -> None:
    manifests = rendered(example("fleet", networkPolicy={"from": [{"podSelector": {}}]}))
    environment, server = variables(manifests), container(manifests)
    assert environment["COG_TRITON_KEYS"] == "/keys"
    assert environment["TLS_CERT_FILE"] == "/tls/tls.crt"
    mounts = {one["mountPath"]: one for one in server["volumeMounts"]}
    assert not any("subPath" in mounts[path] for path in ("/keys", "/tls"))  # those stay as is
    for name in ("startup", "readiness", "liveness"):
        assert server[f"{name}Probe"]["httpGet"]["scheme"] == "HTTPS"
    ((_, name),) = (key for key in manifests if key[0] == "Job")
    (fetch,) = manifests["Job", name]["spec"]["template"]["spec"]["containers"]
    cached = {item["name"]: item.get("value") for item in fetch["env"]}["CACHED"]
    model = json.loads(manifests["ConfigMap", "cog-triton"]["data"]["model.json"])["model"]
    assert model == f"{cached}/model"
    assert mounts["/cache"]["readOnly"] is True
    # A Job cannot be changed: what is in it is in its name.
    assert ("Job", name) not in rendered(example("fleet", image__tag="2"))
    test = manifests["Pod", "cog-triton-test"]
    *_, admitted = manifests["NetworkPolicy", "cog-triton"]["spec"]["ingress"][0]["from"]
    assert admitted["podSelector"]["matchLabels"].items() <= test["metadata"]["labels"].items()
    compile(test["spec"]["containers"][0]["args"][-1], "test", "exec")


def test_the_leader_names_all_hosts_and_waits_for_them(tmp_path: Path) -> None:
    leader = container(rendered(example("several-nodes")))
    said = "$MPI_HOSTS|$MPIRUN_ARGS|$COG_TRITON_WORK_DIR|$*"
    for name, text in (("ssh", 'echo "$@" >> asked'), ("cog-triton", f'echo "{said}"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {item["name"]: item["value"] for item in leader["env"]}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LWS_GROUP_SIZE": "3"}
    environment["LWS_LEADER_ADDRESS"] = "cog-triton-0.cog-triton.default"
    done = subprocess.run(
        leader["args"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    hosts, mpirun_args, work, arguments = done.stdout.strip().split("|")
    assert hosts.split(",") == [f"cog-triton-0{n}.cog-triton.default" for n in ("", "-1", "-2")]
    assert mpirun_args.startswith("--mca plm_rsh_args '-p 2222 -i /ssh/id ")
    assert work == "/opt/cog-triton/work/cog-triton-0"
    assert arguments == "serve /models/engine --host 0.0.0.0"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[-2:] for line in asked] == [[h, "true"] for h in hosts.split(",")[1:]]


@pytest.mark.parametrize("name", ["several-nodes", "several-nodes-vllm"])
def test_scripts_of_several_nodes_are_shell(name: str) -> None:
    group = group_of(rendered(example(name)))
    worker = group["workerTemplate"]["spec"]["containers"][0]
    assert subprocess.run(["bash", "-n"], input=worker["args"][-1], text=True).returncode == 0
    assert worker["resources"] == group["leaderTemplate"]["spec"]["containers"][0]["resources"]
    if name.endswith("vllm"):
        for word in ("serve --headless", '"$LWS_WORKER_INDEX"', '"$LWS_LEADER_ADDRESS"'):
            assert word in worker["args"][-1]
        # On CUDA, vLLM's sampler imports FlashInfer by default, and the image has none.
        assert "export VLLM_USE_FLASHINFER_SAMPLER=" in worker["args"][-1]


def test_the_endpoint_picker_and_keda_find_our_pods() -> None:
    manifests = rendered(example("inference-pool"))
    assert "replicas" not in manifests["Deployment", "cog-triton"]["spec"]  # KEDA's alone
    assert variables(manifests)["METRICS_PUBLIC"] == "1"  # the picker sends no key
    reference = manifests["InferencePool", "cog-triton"]["spec"]["endpointPickerRef"]
    picker = manifests["Deployment", "cog-triton-epp"]["spec"]["template"]["metadata"]["labels"]
    service = manifests["Service", reference["name"]]["spec"]
    assert service["selector"].items() <= picker.items()
    assert reference["port"]["number"] == service["ports"][0]["port"]
    (rule,) = manifests["HTTPRoute", "cog-triton"]["spec"]["rules"]
    assert ("InferencePool", rule["backendRefs"][0]["name"]) in manifests
    scaled = manifests["ScaledObject", "cog-triton"]["spec"]["scaleTargetRef"]["name"]
    assert ("Deployment", scaled) in manifests


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("one-gpu-vllm", {"gpu": 2}, "'gpu'"),
        ("one-gpu-vllm", {"gpus": "2"}, "/gpus"),
        ("one-gpu-vllm", {"image__digest": "1234"}, "/image/digest"),
        ("one-gpu-vllm", {"model__url": "https://me:secret@example.com/engine.tar"}, "/model/url"),
        ("one-gpu-vllm", {"model__url": "pvc:///engine.tar"}, "/model/url"),
        ("one-gpu-vllm", {"settings": {"MAX_QEUE": 1}}, "'MAX_QEUE'"),
        ("one-gpu-vllm", {"settings": {"COG_TRITON_KEYS": "/keys"}}, "'COG_TRITON_KEYS'"),
        ("one-gpu-vllm", {"podSpec": {"containers": []}}, "'containers'"),
        ("one-gpu-vllm", {"timeouts__drain": "45s"}, "/timeouts/drain"),
        ("one-gpu-vllm", {"resources__limits": {"memory": "lots"}}, "/resources/limits/memory"),
        ("one-gpu-vllm", {"networkPolicy__from": {}}, "/networkPolicy/from"),
        ("one-gpu-vllm", {"image__repository": ""}, "image.repository: set it"),
        ("one-gpu-vllm", {"model": {}}, "set one of model.claim, model.hub, model.url"),
        ("one-gpu-vllm", {"model__hub": "a/b"}, "model.claim, model.hub: set one of them alone"),
        ("engine-url", {"model__path": "x"}, "model.path: is in model.claim"),
        ("one-gpu-vllm", {"image__tag": ""}, "image.tag: set it"),
        ("mock", {"gpus": 1}, "model.mock: computes nothing"),
        ("mock", {"ingress__apis": ["triton"]}, "ingress.apis: triton needs service.triton"),
        ("one-gpu-vllm", {"model__cache": {"claim": "c"}}, "model.cache.claim: for model.hub"),
        ("one-gpu-vllm", {"resources__claims": [{"name": "gpu"}]}, "gpu is none of resourceClaims"),
        ("fleet", {"auth": {"keysSecret": "keys"}}, "podMonitor.enabled: with auth.keysSecret"),
        ("inference-pool", {"tls__existingSecret": "tls"}, "it reads /metrics by HTTP"),
        ("engine-url", {"model__vllm": {"seed": 1}}, "model.vllm: not with model.mock or"),
        ("eight-gpus", {"model__vllm": {"model": "a/b"}}, "model.vllm.model: set model.hub"),
        ("eight-gpus", {"replicas": 2}, "work.claim: for one replica"),
        ("eight-gpus", {"work__storageClass": "fast"}, "work.storageClass: set one of them"),
        ("engine-url", {"work__size": ""}, "work.size: needed with work.storageClass"),
        ("several-nodes", {"ssh": {}}, "ssh.existingSecret: needed"),
        ("several-nodes", {"work": {}}, "model.claim, work.claim: needed for several nodes"),
        ("several-nodes", {"model__vllm": {"seed": 1}}, "ssh.existingSecret: for several nodes of"),
        ("several-nodes-vllm", {"work": {"claim": "work"}}, "work.claim: for one replica of one"),
        ("several-nodes", {"gpus": 0}, "gpus: needed for several nodes"),
        ("inference-pool", {"keda__prometheus": ""}, "keda.prometheus: needed"),
        ("inference-pool", {"gateway__enabled": False}, "needs gateway.enabled"),
        ("inference-pool", {"gateway__endpointPicker": {"enabled": True}}, "image: needed with"),
    ],
)
def test_wrong_values_and_contradictions_are_refused_by_name(
    name: str, changed: dict[str, Any], said: str
) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError) as refused:
        rendered(example(name, **changed))
    assert said in str(refused.value)


def test_every_value_has_a_default_and_every_default_a_schema() -> None:
    def paths(values: dict[str, Any], schema: dict[str, Any], at: str) -> None:
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
        ours = set(schema.get("properties", values)) - {"global", "claims"}
        assert set(values) - {"claims"} == ours, at
        for name in ours & schema.get("properties", {}).keys():
            if isinstance(values[name], dict):
                paths(values[name], schema["properties"][name], f"{at}.{name}")

    paths(yaml.safe_load((CHART / "values.yaml").read_text()), SCHEMA, "")


def test_the_chart_is_of_this_version_and_the_pages_manifests_are_valid() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__
    page = (ROOT / "docs" / "deploy.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert all_faults(by_name(block)) == {}


def test_compose_takes_the_file() -> None:
    from compose_spec import PyCompose

    def read(text: str) -> Any:  # its own reader of YAML knows no merge keys
        return PyCompose.from_json(json.dumps(yaml.safe_load(text))).to_dict()["services"]

    text = re.sub(r"\$\{(\w+):\?[^}]*\}", "given", (ROOT / "deploy" / "compose.yaml").read_text())
    services = read(text)
    assert services.keys() == {"gpu", "cpu"}
    assert "deploy" not in services["cpu"]
    for name, service in services.items():
        assert service["profiles"] == [name]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["read_only"] is True
    with pytest.raises(ValueError):
        read(text.replace("shm_size: 16gb", "shm_sise: 16gb"))
