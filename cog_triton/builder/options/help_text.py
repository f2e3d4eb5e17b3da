"""Help text parser: options of scripts that do not use argparse, from their ``--help``.

Made for the layouts of click, typer and optparse. A text says less than a parser, so whatever it
leaves open is taken as allowed: an option with a value may have several.
"""

from __future__ import annotations

import re

from cog_triton.builder.options.option_types import Option

_BOX = re.compile(r"[│┃|]\s?\*?(.*?)[│┃|]?")
_NAME = r"-{1,2}[A-Za-z][\w-]*"
_VALUE = r"[= ](?:\[[^\]]*\]|\{[^}]*\}|<[^>]*>|[A-Z][A-Z0-9_:.]*(?:\.\.\.)?)"
_ENTRY = re.compile(
    rf"\s{{1,8}}({_NAME}(?:{_VALUE})?(?:(?:, ?| ?/ ?|\s+(?=-)){_NAME}(?:{_VALUE})?)*)(.*)"
)
_WIDE_VALUE = re.compile(
    r"\s+(INTEGER|FLOAT|TEXT|PATH|FILE|DIRECTORY|UUID|<[^>]+>|\[[^\]|]+\|[^\]]+\])"
)
_CHOICES = re.compile(r"\{([^}]+)\}|\[([^\]|]+\|[^\]]+)\]")
_TYPES = {"INTEGER": "int", "INT": "int", "<int>": "int", "FLOAT": "float", "<float>": "float"}


def options_of(text: str) -> list[Option]:
    """The options that a help `text` lists; none if it is no help."""
    if not re.search(r"usage\b", text, re.IGNORECASE):
        return []
    sections: list[tuple[str, str]] = []
    for line in text.splitlines():
        boxed = _BOX.fullmatch(line)
        entry = _ENTRY.fullmatch(" " + boxed[1] if boxed else line)
        if entry:
            sections.append((entry[1], entry[2]))
        elif sections:
            sections[-1] = (sections[-1][0], sections[-1][1] + " " + line.strip(" │┃|"))
    options = [_option(head, rest) for head, rest in sections]
    return [option for option in options if option.names and "help" not in option.names]


def _option(head: str, rest: str) -> Option:
    names = tuple(
        name[2:] for name in re.findall(_NAME, re.sub(_VALUE, "", head)) if name[1] == "-"
    )
    # Rich tables put the value in a column of its own.
    wide = _WIDE_VALUE.match(rest)
    values = [value[1:] for value in re.findall(_VALUE, head)] + ([wide[1]] if wide else [])
    value = values[-1] if values else None
    choices = _CHOICES.fullmatch(value) if value else None
    # Some write <bool> for a flag, others for a value.
    is_optional = value == "<bool>" or ((value or "")[:1] == "[" and not choices)
    return Option(
        names=names,
        label=head,
        nargs=0 if value is None else "*" if is_optional else "+",
        type=_TYPES.get(value or ""),
        choices=tuple(re.split("[,|]", choices[1] or choices[2])) if choices else None,
        required="[required]" in rest,
    )
