r"""Guides that the xgrammar inside OpenVINO GenAI compiles, and as it reads them right.

It prints each grammar and reads its own text again. It prints ``é`` as ``\xe9``, and reads all
hexadecimal digits after ``\x``: ``é1`` becomes U+0E91. So in what it gets, no such character is
before a hexadecimal digit in one literal or one class. 2026.4.1 was tried with every such pair.
"""

from __future__ import annotations

import json
import re
from typing import Any

from cog_triton.engines.openvino.guide_bounds import SchemaCost, check_regex, check_schema
from cog_triton.errors import InvalidArgument
from cog_triton.text.guide import Guide, escaped

_MAX_TAGS = 128
_MAX_MARK = 512

_PRINTED_AS_X = r"\x01-\x06\x0e-\x1a\x1c-\x1f\x7f-\xff"
_MISREAD = re.compile(rf"([{_PRINTED_AS_X}])(?=[0-9A-Fa-f])")
_ONE = r"(?:\\u....|\\.|[^\\])"
_MEMBER = re.compile(rf"{_ONE}(?:-{_ONE})?", re.DOTALL)
_HAS_X = re.compile(rf"[{_PRINTED_AS_X}]|\\u00(?:[01]|7f|[89a-f])", re.IGNORECASE)
_ESCAPE = re.compile(r"\\(?:x|.)", re.DOTALL)
_CLASS = re.compile(r"\\.|\[(\^?)((?:\\.|[^\\\]])*)\]", re.DOTALL)


def check(guide: Guide, where: str) -> None:
    """Raise E1005, after `where`, for a guide that may not compile, or take too long to."""
    guide.check(where)
    match guide.kind:
        case "json_schema":
            check_schema(guide.value(where), where)
        case "regex":
            check_regex(guide.text, where)
        case "structural_tag":
            _check_tags(guide.value(where), where)
        case _:
            raise InvalidArgument(
                f"{where}: this engine takes no grammars, nor tags of vLLM's parsers"
            )


def _check_tags(found: Any, where: str) -> None:
    try:
        form = found["format"]
        (trigger,), tags = form["triggers"], form["tags"]
        rest = [found.keys() ^ {"type", "format"}, form.keys() ^ {"type", "triggers", "tags"}]
        known = [found["type"], form["type"]] == ["structural_tag", "triggered_tags"]
        if not known or any(rest) or not trigger or not 0 < len(tags) <= _MAX_TAGS:
            raise InvalidArgument(f"{where}: must be a structural tag of one trigger")
        cost = SchemaCost()
        for place, tag in enumerate(tags):
            _check_tag(tag, trigger, f"{where}.format.tags[{place}]", cost)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        detail = f"{type(error).__name__}: {str(error)[:80]}"
        raise InvalidArgument(f"{where}: not a structural tag: {detail}") from None


def _check_tag(tag: Any, trigger: str, where: str, cost: SchemaCost) -> None:
    begin, end, content = tag["begin"], tag["end"], tag["content"]
    rest = [tag.keys() ^ {"type", "begin", "content", "end"}]
    rest.append(content.keys() ^ {"type", "json_schema"})
    if [tag["type"], content["type"]] != ["tag", "json_schema"] or any(rest):
        raise InvalidArgument(f"{where}: must be a tag whose content is a json_schema")
    marked = begin.startswith(trigger) and isinstance(end, str) and end
    if not marked or max(len(begin), len(end)) > _MAX_MARK:
        raise InvalidArgument(f"{where}: must begin with the trigger, and end with a text")
    check_schema(content["json_schema"], f"{where}.content.json_schema", cost)


def adapted(guide: Guide) -> str:
    """The text for OpenVINO of a checked guide; raises E1005 for one that it would misread."""
    if guide.kind == "regex":
        long = _ESCAPE.sub(lambda at: r"\u00" if at[0] == r"\x" else at[0], guide.text)
        return _CLASS.sub(_class, long)
    value = json.loads(guide.text)
    if guide.kind == "json_schema":
        return json.dumps(_schema(value))
    form = value["format"]
    for tag in form["tags"]:
        tag["content"]["json_schema"] = _schema(tag["content"]["json_schema"])
        for text in (tag["begin"], tag["end"], *form["triggers"]):
            if found := _MISREAD.search(text):
                raise InvalidArgument(
                    f"guided_decoding_guide: {text[:80]!r}: this engine cannot write {found[0]!r}"
                    " before a hexadecimal digit in the begin, end or trigger of a tag"
                )
    return json.dumps(value)


def _schema(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    misread = [value for value in values if _is_misread(value)]
    if misread and "$ref" not in schema:
        # Each character of a pattern is a literal of its own.
        texts = (escaped(json.dumps(text, ensure_ascii=False)[1:-1], "enum") for text in misread)
        rest = [value for value in values if not _is_misread(value)]
        pattern = {"type": "string", "pattern": f"({'|'.join(texts)})"}
        return {"anyOf": [*([{"enum": rest}] if rest else []), pattern]}
    return {key: _keyword(key, value) for key, value in schema.items()}


def _is_misread(value: Any) -> bool:
    return isinstance(value, str) and _MISREAD.search(value) is not None


def _keyword(key: str, value: Any) -> Any:
    match key:
        case "properties":
            return {_name(name): _schema(inner) for name, inner in value.items()}
        case "$defs":
            return {name: _schema(inner) for name, inner in value.items()}
        case "required":
            return [_name(name) for name in value]
        case "anyOf":
            return [_schema(inner) for inner in value]
        case "items" | "additionalProperties":
            return _schema(value)
    return value


def _name(name: str) -> str:
    """The name in two literals or more: xgrammar puts it into one of its grammar as it is."""
    return _MISREAD.sub(r'\1" "', name)


def _class(found: re.Match[str]) -> str:
    """A class of an expression with its characters that are printed as ``\\x`` at its end."""
    if found[2] is None:
        return found[0]
    # At another place `-` makes a range, and a first `^` excludes.
    members = [rf"\{one}" if one[0] in "-^" else one for one in _MEMBER.findall(found[2])]
    last = [one for one in members if _HAS_X.search(one)]
    last.sort(key=lambda one: _HAS_X.match(one) is not None)
    if len(last) > 1 and not _HAS_X.match(last[1]):
        raise InvalidArgument(
            f"guided_decoding_guide: {found[0][:80]!r}: this engine takes one range that begins"
            " below U+0080 and ends above it"
        )
    inner = "".join([*(one for one in members if one not in last), *last])
    return f"[{found[1]}{inner}]"
