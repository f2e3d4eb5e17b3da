"""Variables that a chat template reads, such as `tools`, found without running it."""

from __future__ import annotations

from functools import lru_cache

from jinja2 import TemplateError, nodes

from cog_triton.text.template_child import environment


@lru_cache(maxsize=16)
def template_variables(source: str) -> frozenset[str]:
    """Names that the template reads, its own variables included; none if it is broken."""
    try:
        tree = environment().parse(source)
        return frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
    except (TemplateError, RecursionError):
        return frozenset()
