"""Rendered manifests of the chart, and what Kubernetes and its extensions say of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = "1.37"
"""Version whose schemas manifests are held to."""
ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
Manifests = dict[tuple[str, str], dict[str, Any]]
"""Manifests by kind and name."""
_CRDS = json.loads((Path(__file__).parent / "crds.json").read_text())


def example(name: str, **changed: Any) -> dict[str, Any]:
    """An example's values; `changed` are values by their path, with __ between its parts."""
    values: dict[str, Any] = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    for path, value in changed.items():
        *parents, last = path.split("__")
        inner = values
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return values


def rendered(values: Mapping[str, Any]) -> Manifests:
    """What Helm makes of the chart with `values`, as the release "cog-triton"."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(dict(values), name="cog-triton", namespace="default")
    return by_name("\n---\n".join(text for path, text in files.items() if "NOTES" not in path))


def by_name(text: str) -> Manifests:
    """Manifests of a text."""
    found = [item for item in yaml.safe_load_all(text) if item]
    return {(item["kind"], item["metadata"]["name"]): item for item in found}


def all_faults(manifests: Manifests) -> dict[tuple[str, str], list[str]]:
    """Faults of the manifests that have some."""
    return {key: found for key, item in manifests.items() if (found := faults(item))}


def faults(manifest: Mapping[str, Any]) -> list[str]:
    """What is wrong with a manifest, each with where: unknown fields, types, what is missing."""
    import jsonschema
    import kubernetes_validate as kubernetes

    kind = f"{manifest['apiVersion']} {manifest['kind']}"
    if kind in _CRDS:
        errors = jsonschema.Draft202012Validator(_CRDS[kind]).iter_errors(manifest["spec"])
        found = [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in errors]
        return found + [fault for part in _parts(manifest) for fault in faults(part)]
    try:
        kubernetes.validate(manifest, KUBERNETES, strict=True)
    except kubernetes.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def _parts(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Kubernetes' own objects inside a custom one."""
    spec = manifest["spec"]
    if manifest["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        pods = (group["leaderTemplate"], group["workerTemplate"])
        return [{"apiVersion": "v1", "kind": "Pod", **pod} for pod in pods]
    if manifest["kind"] == "ScaledObject":
        scaler = {
            "scaleTargetRef": {"kind": "Deployment", **spec["scaleTargetRef"]},
            "maxReplicas": spec["maxReplicaCount"],
            "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        }
        kind = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler"}
        return [{**kind, "metadata": {"name": manifest["metadata"]["name"]}, "spec": scaler}]
    return []
