"""Generator of the settings table in docs/serve-config.md.

``python -m cog_triton.engines.tensorrt_llm.settings_table docs/serve-config.md`` updates it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, get_args

from cog_triton.engines.tensorrt_llm.backend_settings import Parameters, choices_of, notation
from cog_triton.engines.tensorrt_llm.releases import OLDEST, format_release

_PLACE = re.compile(r"(?<=<!-- settings -->\n).*?(?=<!-- /settings -->)", re.DOTALL)
_KINDS = {
    "_flag": "true, false",
    "_whole": "whole number",
    "_number": "number",
    "_path": "path",
    "_text": "text",
    "_wholes": "whole numbers",
    "_groups": "groups of whole numbers",
    "_tree": "tree",
}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def markdown_table() -> str:
    """One row for each setting: name, allowed values, default, first release, meaning."""
    rows = ["| setting | value | default | since | meaning |", "|---|---|---|---|---|"]
    for name, field in Parameters.model_fields.items():
        extra: Any = field.json_schema_extra
        unset = field.default is None
        default = extra["unset"] if unset else f"`{notation(name, field.default)}`"
        since = Parameters.since(name)
        rows.append(
            f"| `{name}` | {_allowed(field)} | {default} |"
            f" {'' if since == OLDEST else format_release(since)} | {field.description} |"
        )
    return "\n".join(rows) + "\n"


def insert(document: str) -> str:
    """`document` with the table between its two marks."""
    table = markdown_table()
    return _PLACE.sub(lambda match: table, document)


def _allowed(field: Any) -> str:
    choices = choices_of(field.annotation)
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    parts, limits = list(field.metadata), []
    for part in (field.annotation, *get_args(field.annotation)):
        parts += getattr(part, "__metadata__", ())
    kind = ""
    for part in parts:
        kind = _KINDS.get(getattr(getattr(part, "func", None), "__name__", ""), kind)
        for key, sign in _SIGNS.items():
            limit = getattr(part, key, None)
            if limit is not None and limit != 2**31 - 1:
                limits.append(f"{sign} {limit}")
    return " ".join([kind, ", ".join(dict.fromkeys(limits))]).strip()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(insert(path.read_text("utf-8")), "utf-8")
