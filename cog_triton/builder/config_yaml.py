"""Strict YAML loader: refuses duplicate keys, which YAML libraries let pass."""

from __future__ import annotations

from typing import Any

import yaml

from cog_triton.errors import BuildConfigInvalid


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be one word", key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is there twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _described(error: yaml.YAMLError) -> str:
    """The error and its position, without the line itself, which may hold a token."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return str(error)
    parts = ((error.problem_mark, error.problem), (error.context_mark, error.context))
    return "; ".join(
        f"line {mark.line + 1}, column {mark.column + 1}: {text}"
        for mark, text in parts
        if mark is not None and text
    )


def load(text: str, origin: str) -> dict[Any, Any]:
    """Parse `text`, which must be a mapping; raises BuildConfigInvalid, which `origin` begins."""
    try:
        raw = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise BuildConfigInvalid(f"{origin}: not valid YAML: {_described(error)}") from None
    except (RecursionError, ValueError) as error:
        raise BuildConfigInvalid(f"{origin}: not usable YAML: {type(error).__name__}") from None
    if not isinstance(raw, dict):
        raise BuildConfigInvalid(f"{origin}: must be a mapping with model_id, example_name, build")
    return raw
