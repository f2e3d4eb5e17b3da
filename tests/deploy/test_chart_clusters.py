"""What real clusters ask of the chart: rollouts that end, watched workers, parts that are off."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from typing import Any

import pytest
import yaml
from chart_rendering import CHART, EXAMPLES, Manifests, example, faults, render, rendered
from test_chart_shapes import container, pod, variables


def lines(values: dict[str, Any]) -> int:
    """Lines of what Helm renders."""
    files = render(values)
    del files["NOTES.txt"]
    return sum(len(text.strip().splitlines()) for text in files.values())


def spec_of(manifests: Manifests, kind: str) -> dict[str, Any]:
    """The spec of the only manifest of a kind."""
    (found,) = (item for (one, _), item in manifests.items() if one == kind)
    return found.get("spec", found)


def test_what_nobody_asked_for_is_off() -> None:
    image = {"repository": "registry.example.com/runner", "tag": "1"}
    least = {"image": image, "model": {"claim": "models"}}
    kinds = {kind for kind, _ in rendered(least)}
    assert kinds == {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    assert lines(least) < 200
    assert lines(example("one-gpu-vllm")) < 200
    server = pod(rendered(least))["spec"]
    assert [one["name"] for one in server["containers"]] == ["cog-triton"]
    assert not {"initContainers", "serviceAccountName", "schedulerName"} & server.keys()


@pytest.mark.parametrize("name", [n for n in EXAMPLES if not n.startswith("several")])
def test_a_rollout_may_take_what_a_start_may_take(name: str) -> None:
    """K1: 600 s, the default, marked a Deployment failed that was loading as designed."""
    manifests = rendered(example(name))
    startup = container(manifests)["startupProbe"]
    start = startup["periodSeconds"] * startup["failureThreshold"]
    grace = pod(manifests)["spec"]["terminationGracePeriodSeconds"]
    assert manifests["Deployment", "cog-triton"]["spec"]["progressDeadlineSeconds"] > start + grace


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_capability_is_added(name: str) -> None:
    """K2: an added one does nothing for a user that is not root."""
    assert "add:" not in "".join(render(example(name)).values())


def test_devices_of_dynamic_resource_allocation() -> None:
    """K3: the apiserver refuses a container's claim that is none of the pod's."""
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    given = example(
        "one-gpu-vllm", gpus=0, resourceClaims=claims, resources__claims=[{"name": "gpu"}]
    )
    manifests = rendered(given)
    assert faults(manifests["Deployment", "cog-triton"]) == []
    assert pod(manifests)["spec"]["resourceClaims"] == claims
    assert container(manifests)["resources"]["claims"] == [{"name": "gpu"}]


@pytest.mark.parametrize("name", ["cpu-demo", "mock"])
def test_what_needs_no_gpu_fits_a_small_node(name: str) -> None:
    """K4: 2 CPUs were pending on nodes of two cores."""
    assert container(rendered(example(name)))["resources"]["requests"]["cpu"] in ("300m", "500m")


def test_the_mock_engine_needs_no_model() -> None:
    """K5."""
    manifests = rendered(example("mock"))
    environment = variables(manifests)
    assert environment["COG_TRITON_ENGINE"] == "mock"
    assert "COG_WEIGHTS" not in environment
    assert "nvidia.com/gpu" not in json.dumps([*manifests.values()])


@pytest.mark.parametrize("name", ["several-nodes", "several-nodes-vllm"])
def test_workers_are_watched_and_outlive_the_leaders_drain(name: str) -> None:
    """K6."""
    manifests = rendered(example(name))
    group = spec_of(manifests, "LeaderWorkerSet")["leaderWorkerTemplate"]
    leader, worker = group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]
    (main,) = worker["containers"]
    if name == "several-nodes":  # vLLM's own command has no probe
        probe = main["livenessProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] <= 30
    stays = main["lifecycle"]["preStop"]["sleep"]["seconds"]
    hook = leader["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = int(variables(manifests)["DRAIN_TIMEOUT"] or 0)
    assert hook + drain <= stays < worker["terminationGracePeriodSeconds"]
    budget = spec_of(manifests, "PodDisruptionBudget")
    assert budget["maxUnavailable"] == 1
    (rule,) = budget["selector"]["matchExpressions"]
    for template in (group["leaderTemplate"], group["workerTemplate"]):
        labels = template["metadata"]["labels"]
        assert labels[rule["key"]] in rule["values"]
        assert budget["selector"]["matchLabels"].items() <= labels.items()


def test_what_leaderworkerset_offers() -> None:
    given = example(
        "several-nodes-vllm",
        leaderWorkerSet={
            "exclusiveTopology": "rack",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 1},
            },
        },
        podAnnotations={"k8s.v1.cni.cncf.io/networks": "rdma"},
        resources__limits={"rdma/hca": 8},
    )
    manifests = rendered(given)
    group = manifests["LeaderWorkerSet", "cog-triton"]
    assert faults(group) == []
    assert group["metadata"]["annotations"] == {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "rack"
    }
    assert group["spec"]["startupPolicy"] == "LeaderCreated"
    for template in ("leaderTemplate", "workerTemplate"):
        made = group["spec"]["leaderWorkerTemplate"][template]
        assert made["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdma"
        assert made["spec"]["containers"][0]["resources"]["limits"]["rdma/hca"] == 8


@pytest.mark.parametrize(("gpus", "size"), [(0, "1Gi"), (1, "4Gi"), (8, "32Gi")])
def test_shared_memory_is_by_gpus(gpus: int, size: str) -> None:
    """K7."""
    server = pod(rendered(example("one-gpu-vllm", gpus=gpus)))["spec"]
    (shm,) = (one["emptyDir"] for one in server["volumes"] if one["name"] == "shm")
    assert shm["sizeLimit"] == size


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
        annotations={"team": "a"},
        extraObjects=[
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": '{{ include "cog-triton.fullname" . }}-ca'},
            }
        ],
    )
    manifests = rendered(extra)
    assert {key: faults(item) for key, item in manifests.items() if faults(item)} == {}
    assert ("ConfigMap", "cog-triton-ca") in manifests
    account = manifests["ServiceAccount", "cog-triton"]
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn:x"}
    kind = "Deployment" if name.startswith("one") else "LeaderWorkerSet"
    assert manifests[kind, "cog-triton"]["metadata"]["annotations"]["team"] == "a"
    pods = [pod(manifests)["spec"]]
    if kind == "LeaderWorkerSet":
        group = manifests[kind, "cog-triton"]["spec"]["leaderWorkerTemplate"]
        pods.append(group["workerTemplate"]["spec"])
    for number, spec in enumerate(pods):
        assert spec["serviceAccountName"] == "cog-triton"
        assert (spec["schedulerName"], spec["hostNetwork"]) == ("volcano", True)
        assert [one["name"] for one in spec["initContainers"]] == ["first"]
        assert len(spec["containers"]) == 2 - number  # sidecars beside those that serve
        assert "/ca" in [one["mountPath"] for one in spec["containers"][0]["volumeMounts"]]


@pytest.mark.parametrize("url", ["s3://b/e.tar", "gs://b/e.tar", "az://c/e.tar", "oci://r/e:1"])
def test_a_model_by_its_address(url: str) -> None:
    assert variables(rendered(example("engine-url", model__url=url)))["COG_WEIGHTS"] == url


def test_a_model_in_a_claim_by_its_address() -> None:
    by_url = example("cpu-demo", model={"url": "pvc://models/engine.tar"})
    assert rendered(by_url) == rendered(example("cpu-demo"))
    whole = rendered(example("cpu-demo", model={"url": "pvc://models"}))
    assert variables(whole)["COG_WEIGHTS"] == "/models"


def test_a_model_in_an_image_volume() -> None:
    reference = f"registry.example.com/engines/qwen3:1@sha256:{'0' * 64}"
    manifests = rendered(example("cpu-demo", model={"image": reference}))
    assert faults(manifests["Deployment", "cog-triton"]) == []
    (model,) = (v for v in pod(manifests)["spec"]["volumes"] if v["name"] == "model")
    assert model["image"] == {"reference": reference, "pullPolicy": "IfNotPresent"}
    assert variables(manifests)["COG_WEIGHTS"] == "/models"


def test_one_download_serves_all_replicas() -> None:
    manifests = rendered(example("fleet"))
    ((_, name), job) = next(item for item in manifests.items() if item[0][0] == "Job")
    fetch = job["spec"]["template"]["spec"]
    (main,) = fetch["containers"]
    given = {item["name"]: item.get("value") for item in main["env"]}
    assert (given["SOURCE"], given["REVISION"]) == ("Qwen/Qwen3-8B", "main")
    served = json.loads(manifests["ConfigMap", "cog-triton"]["data"]["model.json"])["model"]
    assert served == f"{given['CACHED']}/model"
    writable = {one["name"]: not one.get("readOnly") for one in main["volumeMounts"]}
    assert writable["cache"]
    server = pod(manifests)["spec"]
    (waits,) = server["initContainers"]
    assert served in waits["args"][-1]
    for one in (waits, server["containers"][0]):
        (mount,) = (m for m in one["volumeMounts"] if m["name"] == "cache")
        assert mount["readOnly"] is True
    # A Job cannot be changed: what is in it is in its name. The cache is by what is fetched alone.
    other = rendered(example("fleet", image__tag="2"))
    assert ("Job", name) not in other
    assert rendered(example("fleet", model__name="x"))["Job", name] == job
    digest = hashlib.sha256(b"Qwen/Qwen3-8Bmain").hexdigest()[:16]
    assert given["CACHED"] == f"/cache/{digest}"


def test_keys_and_certificates_are_secrets_that_change_without_a_restart() -> None:
    manifests = rendered(example("fleet"))
    environment, server = variables(manifests), container(manifests)
    assert environment["COG_TRITON_KEYS"] == "/keys"
    assert (environment["TLS_CERT_FILE"], environment["TLS_KEY_FILE"]) == (
        "/tls/tls.crt",
        "/tls/tls.key",
    )
    mounts = {one["mountPath"]: one for one in server["volumeMounts"]}
    assert not any(
        "subPath" in mounts[path] for path in ("/keys", "/tls")
    )  # those stay as they were
    volumes = {one["name"]: one for one in pod(manifests)["spec"]["volumes"]}
    assert volumes[mounts["/keys"]["name"]]["secret"]["secretName"] == "cog-triton-keys"
    for name in ("startup", "readiness", "liveness"):
        assert server[f"{name}Probe"]["httpGet"]["scheme"] == "HTTPS"
    (endpoint,) = spec_of(manifests, "PodMonitor")["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert {port["appProtocol"] for port in spec_of(manifests, "Service")["ports"]} == {"https"}


def test_every_api_has_a_route() -> None:
    manifests = rendered(example("fleet"))
    ports = {port["name"]: port["port"] for port in spec_of(manifests, "Service")["ports"]}
    routes = {
        rule["matches"][0]["path"]["value"]: rule["backendRefs"][0]["port"]
        for rule in spec_of(manifests, "HTTPRoute")["rules"]
    }
    assert routes == {
        "/v1": ports["openai"],
        "/predictions": ports["cog"],
        "/v2": ports["triton"],
    }
    manifests = rendered(example("mock", service__ports={"openai": 80}))
    (rule,) = spec_of(manifests, "Ingress")["rules"]
    paths = {p["path"]: p["backend"]["service"]["port"]["number"] for p in rule["http"]["paths"]}
    assert paths == {"/v1": 80, "/predictions": 5000, "/": 80}
    assert (
        "host" not in spec_of(rendered(example("mock", ingress__hosts=[])), "Ingress")["rules"][0]
    )
    pool = rendered(example("inference-pool", gateway__apis=["openai", "predictions"]))
    first, second = spec_of(pool, "HTTPRoute")["rules"]
    assert first["backendRefs"][0]["kind"] == "InferencePool"
    assert second["backendRefs"][0] == {"name": "cog-triton", "port": 5000}


def test_the_services_type_and_ports() -> None:
    given = {
        "type": "NodePort",
        "nodePorts": {"openai": 30080},
        "spec": {"externalTrafficPolicy": "Local"},
    }
    manifests = rendered(example("one-gpu-vllm", service=given))
    service = manifests["Service", "cog-triton"]
    assert faults(service) == []
    assert (service["spec"]["type"], service["spec"]["externalTrafficPolicy"]) == (
        "NodePort",
        "Local",
    )
    assert [port.get("nodePort") for port in service["spec"]["ports"]] == [30080, None]


def test_rollouts_and_probes_of_ones_own() -> None:
    surge = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    given = example("one-gpu-vllm", strategy=surge, probes={"startup": {"periodSeconds": 4}})
    manifests = rendered(given)
    assert manifests["Deployment", "cog-triton"]["spec"]["strategy"] == surge
    startup = container(manifests)["startupProbe"]
    assert (startup["periodSeconds"], startup["failureThreshold"]) == (4, 225)


def test_ten_alerts() -> None:
    (group,) = spec_of(rendered(example("fleet")), "PrometheusRule")["groups"]
    assert len(group["rules"]) == len({rule["alert"] for rule in group["rules"]}) == 10
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].endswith(".")
        selectors = re.findall(r"cog_triton_\w+(\{[^}]*\})?", rule["expr"])
        assert all('namespace="default",pod=~"cog-triton-.+"' in one for one in selectors)
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_the_dashboard_is_a_config_map() -> None:
    made = rendered(example("fleet"))["ConfigMap", "cog-triton-dashboard"]
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
    held = json.loads(made["data"]["cog-triton.json"])
    assert held == json.loads((CHART / "dashboards" / "cog-triton.json").read_text())
    assert len(json.dumps(made)) < 1 << 20  # the most that Kubernetes takes


def test_helm_test_asks_the_service() -> None:
    manifests = rendered(example("fleet", networkPolicy={"from": [{"podSelector": {}}]}))
    test = manifests["Pod", "cog-triton-test"]
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (ask,) = test["spec"]["containers"]
    url = {item["name"]: item.get("value") for item in ask["env"]}["URL"]
    assert url == "https://cog-triton:8080/v1"
    compile(ask["args"][-1], "test", "exec")
    *_, admitted = spec_of(manifests, "NetworkPolicy")["ingress"][0]["from"]
    labels = test["metadata"]["labels"]
    assert admitted["podSelector"]["matchLabels"].items() <= labels.items()
    for kind in ("Service", "PodDisruptionBudget"):
        selector = spec_of(manifests, kind)["selector"]
        assert not selector.get("matchLabels", selector).items() <= labels.items()


@pytest.mark.parametrize("key", [None, "k1"])
def test_what_helm_test_asks_is_a_request_with_the_key_if_there_is_one(key: str | None) -> None:
    """Without one, "Bearer " would be a header that HTTP does not have."""
    asked: list[str | None] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.reply({"usage": {"completion_tokens": 1}})

        def reply(self, value: object) -> None:
            asked.append(self.headers["authorization"])
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    (ask,) = rendered(example("mock"))["Pod", "cog-triton-test"]["spec"]["containers"]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}/v1/"
        environment = {**os.environ, "URL": url, **({"KEY": key} if key else {})}
        command = [sys.executable, "-c", ask["args"][-1]]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert asked == [f"Bearer {key}" if key else None] * 2


def test_manifests_of_the_operator_are_read_as_yaml() -> None:
    """The dashboard's braces are JSON's, not a template's."""
    text = render(example("fleet"))["dashboard.yaml"]
    assert "{{" in yaml.safe_load(text)["data"]["cog-triton.json"]
