"""Plain Kubernetes manifests, for clusters without Helm: writes deploy/*.yaml from the chart.

Needs scripts/setup-deploy.

    .venv/bin/python scripts/manifests.py
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from cog_triton.settings import Settings

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm"
SCHEMA = CHART / "values.schema.json"
NOT_OF_VALUES = frozenset(
    """COG_HOST COG_TRITON_API_KEY COG_TRITON_CONFIG COG_TRITON_DRAIN_FILE COG_TRITON_ENGINE
    COG_TRITON_KEYS COG_TRITON_KEY_AT_DOOR COG_TRITON_TENANTS_AT_DOOR COG_TRITON_WORK_DIR
    COG_WEIGHTS DRAIN_TIMEOUT ENGINE_DIR LWS_LEADER_ADDRESS LWS_WORKER_INDEX METRICS_PUBLIC
    MPIRUN_ARGS MPI_HOSTS OPENAI_API_KEY OPENAI_PORT PORT SERVED_MODEL_NAME TLS_CERT_FILE
    TLS_KEY_FILE TRITON_HTTP_PORT TRITON_METRICS_PORT TRITON_START_TIMEOUT""".split()  # noqa: SIM905
)
"""Variables that the value `settings` does not take: others decide on them, or the image does."""
_HELMS = re.compile(r"^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by):.*\n", re.MULTILINE)


class Manifest(NamedTuple):
    """A file of deploy/: the chart with an example's values, all kinds, one, or all but one."""

    example: str
    title: str
    only: str = ""
    but: str = ""

    def has(self, kind: str) -> bool:
        """Whether manifests of a kind are in the file."""
        return kind == self.only if self.only else kind != self.but


_SCALER = "ScaledObject"
MANIFESTS = {
    "kubernetes-single.yaml": Manifest("one-gpu-vllm", "One GPU, without Helm."),
    "leaderworkerset.yaml": Manifest("several-nodes", "One engine on two nodes, without Helm."),
    "leaderworkerset-vllm.yaml": Manifest(
        "several-nodes-vllm", "One model of vLLM on two nodes, without Helm."
    ),
    "inference-pool.yaml": Manifest(
        "inference-pool",
        "Servers behind a Gateway that routes by their metrics, without Helm.",
        but=_SCALER,
    ),
    "keda.yaml": Manifest("inference-pool", "Scales inference-pool.yaml.", only=_SCALER),
}


def values(example: str) -> dict[str, Any]:
    """The values of an example of the chart."""
    read: dict[str, Any] = yaml.safe_load((CHART / "examples" / f"{example}.yaml").read_text())
    return read


def render(given: Mapping[str, Any]) -> dict[str, str]:
    """Rendered templates of the release "cog-triton", by the names of their files."""
    sys.path.append(str(ROOT / ".work" / "deploy"))
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(dict(given), name="cog-triton", namespace="default")
    return {path.rpartition("/")[2]: text for path, text in files.items()}


def documents(files: Mapping[str, str]) -> Iterable[str]:
    """The YAML documents of rendered templates, those that others need first."""
    order = ("configmap", "deployment", "leaderworkerset", "service")
    first = [f"{name}.yaml" for name in order if f"{name}.yaml" in files]
    for name in [*first, *sorted(set(files) - {*first, "NOTES.txt"})]:
        for text in re.split(r"^---\n", files[name], flags=re.MULTILINE):
            if yaml.safe_load(text):
                yield text.strip() + "\n"


def schema() -> str:
    """The chart's schema with the settings of this version."""
    names = sorted({name.upper() for name in Settings.model_fields} - NOT_OF_VALUES)
    listed = textwrap.fill(", ".join(f'"{name}"' for name in names), 84)
    text = f'"propertyNames": {{"enum": [\n{textwrap.indent(listed, " " * 10)}\n      ]}}'
    return re.sub(r'"propertyNames": \{\s*"enum": \[[^]]*\]\s*\}', text, SCHEMA.read_text())


def manifest(name: str) -> str:
    """The text of deploy/`name`."""
    made_of = MANIFESTS[name]
    shown = [
        _HELMS.sub("", text)
        for text in documents(render(values(made_of.example)))
        if made_of.has(yaml.safe_load(text)["kind"])
    ]
    made = f"# {made_of.title} Made by scripts/manifests.py of\n"
    made += f"# deploy/helm/examples/{made_of.example}.yaml; docs/deploy.md tells how to use it.\n"
    return made + "---\n".join(shown)


if __name__ == "__main__":
    for name in MANIFESTS:
        (DEPLOY / name).write_text(manifest(name))
