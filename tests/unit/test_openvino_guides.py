"""Guides for OpenVINO: no character that its xgrammar misreads is before a hexadecimal digit."""

import json
import re

import pytest

from cog_triton.engines.openvino.guides import adapted
from cog_triton.errors import InvalidArgument
from cog_triton.text.guide import Guide, GuideKind

TAG = """{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<"],
"tags": [{"type": "tag", "begin": "<a>", "end": "%s",
          "content": {"type": "json_schema", "json_schema": %s}}]}}"""


@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        ('{"const": "café", "items": true}', '{"const": "café", "items": true}'),
        (
            '{"properties": {"é1": {"$ref": "#/$defs/é"}}, "required": ["é1"], "$defs": {"é": {}}}',
            r'{"properties": {"é\" \"1": {"$ref": "#/$defs/é"}}, "required": ["é\" \"1"],'
            ' "$defs": {"é": {}}}',
        ),
        (
            r'{"items": {"const": "é1|\""}}',
            r'{"items": {"anyOf": [{"type": "string", "pattern": "(é1\\|\\\\\\\")"}]}}',
        ),
        (
            r'{"anyOf": [{"enum": [1, "a", "é1", "é\n1", "éa"]}]}',
            r'{"anyOf": [{"anyOf": [{"enum": [1, "a", "é\n1"]},'
            ' {"type": "string", "pattern": "(é1|éa)"}]}]}',
        ),
        (
            TAG % (r"\nb", '{"const": "é1"}'),
            TAG % (r"\nb", '{"anyOf": [{"type": "string", "pattern": "(é1)"}]}'),
        ),
    ],
)
def test_schemas_are_rewritten(guide: str, expected: str) -> None:
    kind: GuideKind = "structural_tag" if "format" in guide else "json_schema"
    assert json.loads(adapted(Guide(kind, guide))) == json.loads(expected)


CLASSES = {
    r"\xe9d[\xe90]": r"\u00e9d[0\u00e9]",
    r"[^é\d-]": r"[^\d\-é]",
    r"\\x[\\xé0]\[é0]": r"\\x[\\x0é]\[é0]",
    "[à-ÿa-é0-9]": "[0-9a-éà-ÿ]",
    "[é^0]": r"[\^0é]",
}


@pytest.mark.parametrize("regex", CLASSES)
def test_classes_match_the_same_in_another_order(regex: str) -> None:
    assert adapted(Guide("regex", regex)) == CLASSES[regex]
    for text in (*map(chr, range(256)), "éd0", "édé", r"\xé[é0]", r"\x0[é0]"):
        assert bool(re.fullmatch(regex, text)) == bool(re.fullmatch(CLASSES[regex], text))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "[a-éb-è]", "one range"),
        ("structural_tag", TAG % ("é1", "{}"), "'é1': .* write 'é'"),
    ],
)
def test_what_it_would_misread_is_refused(kind: GuideKind, text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"E1005.*{words}"):
        adapted(Guide(kind, text))
