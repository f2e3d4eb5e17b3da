"""Recorded options: those of our own scripts are what the scripts have, others are well-formed."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from cog_triton.builder.plan import OWN
from cog_triton.builder.script_options import Option, known_options, recorded

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.relative_to(OWN).as_posix() for path in OWN.glob("*/*.py") if path.name[0] != "_"
)


class Parsed(BaseException):
    """A script has come to its command line."""


def described(action: argparse.Action) -> Option:
    kind: Any = action.type
    plain = kind if kind is None else kind.__name__
    choices = None if action.choices is None else tuple(map(str, action.choices))
    return Option(
        tuple(name.removeprefix("--") for name in action.option_strings),
        action.nargs,
        plain if plain in (None, "str", "int", "float") else f"{plain}()",
        choices,
        action.required,
        None if action.default is None else str(action.default),
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_own_scripts_have_the_recorded_options(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Option] = []

    def parse(parser: argparse.ArgumentParser) -> None:
        actions = [a for a in parser._actions if not isinstance(a, argparse._HelpAction)]
        found.extend(map(described, actions))
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(Parsed):
        runpy.run_path(str(OWN / script), run_name="__main__")
    known = known_options(script)
    assert known is not None
    assert tuple(found) == known.options


def test_there_are_records_of_every_kind_of_script() -> None:
    families = {name.split("/")[2] for name in recorded() if name.startswith("models/core/")}
    assert {"llama", "qwen", "gpt", "gemma", "phi", "mllama"} <= families
    assert {"trtllm-build", "quantization/quantize.py", "gpt/build.py", *SCRIPTS} <= {*recorded()}
    assert known_options("no/such.py") is None


def test_options_are_well_formed() -> None:
    for known in recorded().values():
        assert len(known.names) == len(set(known.names)) >= 3
        for option in known.options:
            assert option.nargs in (None, 0, 2, "?", "+"), option
            if option.nargs == 0:
                assert (option.type, option.choices, option.required) == (None, None, False)


def test_records_are_in_the_wheel() -> None:
    included = {file.relative_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert "cog_triton/builder/options.json" in included
