"""Wrong values of the Helm chart are refused by name, before anything reaches a cluster."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from chart_rendering import CHART, EXAMPLES, example, rendered

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def refusal(values: dict[str, Any]) -> str:
    """What Helm says of values that it refuses."""
    import helm_python

    with pytest.raises(helm_python.HelmError) as refused:
        rendered(values)
    return str(refused.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gpu": 2}, "'gpu'"),
        ({"gpus": "2"}, "/gpus"),
        ({"gpus": -1}, "/gpus"),
        ({"replicas": 1.5}, "/replicas"),
        ({"image__tags": "1"}, "'tags'"),
        ({"image__pullPolicy": "Sometimes"}, "/image/pullPolicy"),
        ({"image__digest": "1234"}, "/image/digest"),
        ({"model__clam": "models"}, "'clam'"),
        ({"model__url": "ftp://example.com/engine.tar"}, "/model/url"),
        ({"model__url": "https://me:secret@example.com/engine.tar"}, "/model/url"),
        ({"model__hub": "Qwen3-8B"}, "/model/hub"),
        ({"model__path": "/models/x"}, "/model/path"),
        ({"settings": {"MAX_QEUE": 1}}, "'MAX_QEUE'"),
        ({"settings": {"DRAIN_TIMEOUT": 1}}, "'DRAIN_TIMEOUT'"),
        ({"settings": {"COG_TRITON_KEYS": "/keys"}}, "'COG_TRITON_KEYS'"),
        ({"model__url": "pvc:///engine.tar"}, "/model/url"),
        ({"leaderWorkerSet__startupPolicy": "LeaderReady"}, "/leaderWorkerSet/startupPolicy"),
        ({"podSpec": {"containers": []}}, "'containers'"),
        ({"probes__startup": {"failureThreshold": 1, "periodSeconds": 1}}, "/probes/startup"),
        ({"service__spec": {"ports": []}}, "/service/spec"),
        ({"gateway__apis": ["v1"]}, "/gateway/apis"),
        ({"sidecars": [{"image": "x"}]}, "/sidecars"),
        ({"settings": {"MAX_QUEUE": [1]}}, "/settings/MAX_QUEUE"),
        ({"timeouts__drain": "45s"}, "/timeouts/drain"),
        ({"shm__size": "16 GB"}, "/shm/size"),
        ({"resources__limits": {"memory": "lots"}}, "/resources/limits/memory"),
        ({"service__type": "Public"}, "/service/type"),
        ({"podDisruptionBudget__maxUnavailable": "half"}, "/podDisruptionBudget/maxUnavailable"),
        ({"keda__kvCache": 80}, "/keda/kvCache"),
        ({"keda__minReplicas": 0}, "/keda/minReplicas"),
        ({"networkPolicy__from": {}}, "/networkPolicy/from"),
    ],
)
def test_a_wrong_value_is_refused_by_name(changed: dict[str, Any], said: str) -> None:
    assert said in refusal(example("one-gpu-vllm", **changed))


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("one-gpu-vllm", {"image__repository": ""}, "image.repository: set it"),
        ("one-gpu-vllm", {"model": {}}, "set one of model.claim, model.hub, model.url"),
        ("one-gpu-vllm", {"model__hub": "a/b"}, "model.claim, model.hub: set one of them alone"),
        ("engine-url", {"model__path": "x"}, "model.path: is in model.claim"),
        ("one-gpu-vllm", {"image__tag": ""}, "image.tag: set it"),
        ("mock", {"model__hub": "a/b"}, "model.hub, model.mock: set one of them alone"),
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
        ("several-nodes-vllm", {"gpus": 0}, "gpus: needed for several nodes"),
        ("several-nodes", {"gpus": 0}, "gpus: needed for several nodes"),
        ("inference-pool", {"keda__prometheus": ""}, "keda.prometheus: needed"),
        ("inference-pool", {"gateway__enabled": False}, "needs gateway.enabled"),
        ("inference-pool", {"gateway__endpointPicker": {"enabled": True}}, "image: needed with"),
    ],
)
def test_values_that_contradict_are_refused(name: str, changed: dict[str, Any], said: str) -> None:
    assert said in refusal(example(name, **changed))


def test_the_schema_is_of_the_draft_that_helm_3_reads() -> None:
    import jsonschema

    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft7Validator(SCHEMA)
    for name in EXAMPLES:
        assert not list(validator.iter_errors(example(name)))
    assert list(validator.iter_errors({"settings": {"MAX_QEUE": 1}}))


def test_every_value_has_a_default_and_every_default_a_schema() -> None:
    def paths(values: dict[str, Any], schema: dict[str, Any], at: str) -> None:
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
        if "properties" not in schema:
            return
        ours = set(schema["properties"]) - {"global", "claims"}
        assert set(values) - {"claims"} == ours, at
        for name in ours:
            if isinstance(values[name], dict):
                paths(values[name], schema["properties"][name], f"{at}.{name}")

    paths(yaml.safe_load((CHART / "values.yaml").read_text()), SCHEMA, "")


def test_every_value_is_explained() -> None:
    """Top-level ones, by a comment of their own or of their group."""
    text = (CHART / "values.yaml").read_text()
    for block in re.split(r"\n\n", text):
        assert "#" in block or re.match(r"(nameOverride|podLabels)", block), block


def test_optional_parts_can_be_left_out() -> None:
    off = {"enabled": False}
    manifests = rendered(example("one-gpu-vllm", podDisruptionBudget=off, networkPolicy=off))
    assert {kind for kind, _ in manifests} == {"ConfigMap", "Deployment", "Service"}
