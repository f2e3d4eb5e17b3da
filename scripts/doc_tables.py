#!/usr/bin/env python3
"""Write what is generated: tables of docs/, llms.txt, the settings of the Helm chart.

.venv/bin/python scripts/doc_tables.py
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from cog_triton.artifact.cuda_support import FLOORS
from cog_triton.builder import config as build_config
from cog_triton.engines.tensorrt_llm.runtime_settings import RuntimeSettings
from cog_triton.engines.vllm.argument_types import known_versions
from cog_triton.errors import all_errors
from cog_triton.settings import GROUPS, Settings
from cog_triton.text.sampling import SAMPLING, Library

sys.path.insert(0, str(Path(__file__).parent))
import llms_txt
import vllm_image_tables
import vulnerabilities

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT / "deploy" / "helm" / "values.schema.json"
NOT_OF_VALUES = frozenset(
    """COG_HOST COG_TRITON_API_KEY COG_TRITON_CONFIG COG_TRITON_ENGINE COG_TRITON_KEYS
    COG_TRITON_WORK_DIR
    COG_WEIGHTS DRAIN_TIMEOUT ENGINE_DIR LWS_LEADER_ADDRESS METRICS_PUBLIC
    MPIRUN_ARGS MPI_HOSTS OPENAI_API_KEY OPENAI_PORT PORT SERVED_MODEL_NAME TLS_CERT_FILE
    TLS_KEY_FILE TRITON_HTTP_PORT TRITON_METRICS_PORT TRITON_START_TIMEOUT""".split()  # noqa: SIM905
)
"""Variables that the value `settings` does not take: others, or the image, decide on them."""


def chart_schema() -> str:
    """The chart's schema with the settings of this version."""
    names = sorted({name.upper() for name in Settings.model_fields} - NOT_OF_VALUES)
    listed = textwrap.fill(", ".join(f'"{name}"' for name in names), 84)
    text = f'"propertyNames": {{"enum": [\n{textwrap.indent(listed, " " * 10)}\n      ]}}'
    return re.sub(r'"propertyNames": \{\s*"enum": \[[^]]*\]\s*\}', text, SCHEMA.read_text())


def settings_tables() -> str:
    """One table a section: each variable, its default and its meaning."""
    lines = []
    for group in GROUPS:
        lines += [f"## {group.title}", "", "| variable | default | meaning |", "|---|---|---|"]
        for name, field in group.model_fields.items():
            meaning = re.sub(r"([\w-]+\.md)([#\w-]*)", r"[\1](\1\2)", field.description or "")
            lines.append(f"| `{name.upper()}` | {_shown(field.default)} | {meaning} |")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _shown(default: object) -> str:
    if default is None or default == "":
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def vllm_versions() -> str:
    """Minor versions of vLLM that are served: what ran, and on what."""
    rows = [f"| {row['minor']} | {row['ran']} | {row['on']} |" for row in known_versions()]
    return "\n".join(["| vLLM | what ran | on |", "|---|---|---|", *rows]) + "\n"


def request_fields() -> str:
    """What each interface calls a sampling parameter, and the values that it takes."""
    titles = ("field", "any engine", "`/predictions`", "`/v1`", "`tensorrt_llm`", "vLLM")
    lines = [f"| {' | '.join((*titles, 'OpenVINO'))} |", "|---" * 7 + "|"]
    for row in SAMPLING:
        names = [row.libraries.get(library, row.name) for library in get_args(Library)]
        cells = [
            "; ".join(rule.text.removeprefix("must ").removeprefix("be ") for rule in row.rules),
            _bounds(row.inputs),
            _bounds(row.body),
            f"`{row.tensor}`" if row.tensor else "of our own API",
            *(f"`{name}`" if name else "" for name in names),
        ]
        lines.append(f"| `{row.name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _bounds(given: Mapping[str, float] | None) -> str:
    if given is None:
        return ""
    words = {"ge": "from {}", "gt": "above {}", "le": "to {}", "max_length": "{} at most"}
    return " ".join(words[name].format(value) for name, value in given.items()) or "any"


def build_keys() -> str:
    """docs/build.md's tables of keys."""
    return (
        "Of the config:\n\n"
        f"{_keys(build_config.BuildConfig)}\n"
        "Of each step (`convert`, `quantize`, `build`):\n\n"
        f"{_keys(build_config.StepConfig)}\n"
        "Of `runtime`, with the values that [the serve config](serve-config.md) has for them:\n\n"
        f"{_keys(RuntimeSettings)}\n"
        "Of each of `lora_adapters`:\n\n"
        f"{_keys(build_config.AdapterSource)}\n"
        "Of a config with `engine: vllm`:\n\n"
        f"{_keys(build_config.SealedConfig)}\n"
        "Of its `canary`:\n\n"
        f"{_keys(build_config.CanaryConfig)}"
    )


def _keys(model: type[BaseModel]) -> str:
    rows = ["| key | meaning |", "|---|---|"]
    for name, field in model.model_fields.items():
        required = " **Required.**" if field.is_required() else ""
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `{name}` | {meaning}{required} |")
    return "\n".join(rows) + "\n"


def error_codes() -> str:
    """What each code means."""
    rows = ["| code | name | meaning |", "|---|---|---|"]
    rows += [f"| {e.code} | {e.__name__} | {(e.__doc__ or '').strip()} |" for e in all_errors()]
    return "\n".join(rows) + "\n"


def oldest_drivers() -> str:
    """The oldest driver for each CUDA."""
    rows = (f"| {cuda}.x | {driver} |\n" for cuda, driver in sorted(FLOORS.items(), reverse=True))
    return "| CUDA in the image | oldest driver |\n|---|---|\n" + "".join(rows)


TABLES = {
    "request fields": ("openai.md", request_fields),
    "settings": ("settings.md", settings_tables),
    "drivers": ("images.md", oldest_drivers),
    "errors": ("errors.md", error_codes),
    "vllm": ("vllm.md", vllm_versions),
    "keys": ("build.md", build_keys),
    "vllm image left out": ("image-contents.md", vllm_image_tables.left_out),
    "not affected": ("supply-chain.md", vulnerabilities.table),
    "vllm image dropped": ("image-contents.md", vllm_image_tables.dropped),
}
"""By mark: the page, and what makes the text between ``<!-- mark -->`` and ``<!-- /mark -->``."""


def insert(document: str, mark: str) -> str:
    """`document` with the current table between ``<!-- mark -->`` and ``<!-- /mark -->``."""
    place = rf"(?<=^<!-- {mark} -->\n).*?(?=^<!-- /{mark} -->$)"
    text, found = re.subn(
        place, lambda _: f"\n{TABLES[mark][1]()}\n", document, flags=re.DOTALL | re.MULTILINE
    )
    if found != 1:
        raise ValueError(f"{found} places between <!-- {mark} --> and <!-- /{mark} -->: need one")
    return text


def main() -> None:
    """Write the pages."""
    for mark, (name, _) in TABLES.items():
        page = ROOT / "docs" / name
        page.write_text(insert(page.read_text("utf-8"), mark), "utf-8")
    SCHEMA.write_text(chart_schema(), "utf-8")
    llms_txt.LLMS.write_text(llms_txt.llms_txt(), "utf-8")


if __name__ == "__main__":
    main()
