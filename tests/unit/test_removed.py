"""Names of 0.4.0 that this release lacks: each is refused by what to use instead."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cog_triton.cli.app import app
from cog_triton.errors import InvalidArgument
from cog_triton.removed import REMOVED, check_keys
from cog_triton.settings import load_settings

CHECKOUT = Path(__file__).parents[2]
COMMANDS = [name for name in REMOVED if name.startswith("cog-triton ")]
VARIABLES = [name for name in REMOVED if name.isupper()]


def names(file: str) -> set[str]:
    """Settings, commands, options and keys of a stored surface, as the table spells them."""
    found = set()
    for line in (CHECKOUT / "tests" / file).read_text("utf-8").splitlines():
        kind, _, name = line.partition(" ")
        if kind == "option" and " --" not in name:
            continue  # a short form goes with its long one
        if kind in ("setting", "command", "option", "key"):
            found.add(name)
    return found


def test_each_name_of_0_4_0_that_is_not_here_is_in_the_table() -> None:
    gone = names("surface-0.4.0.txt") - names("surface.txt")
    commands = {f"{name} " for name in gone if name in COMMANDS}
    options_of_commands = {name for name in gone if any(name.startswith(each) for each in commands)}
    assert gone - REMOVED.keys() - options_of_commands == set()
    assert REMOVED.keys() & names("surface.txt") == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_removed_command_or_option_is_refused(name: str) -> None:
    arguments = name.split()[1:]
    if "--" in name:
        arguments = [arguments[0], "a", f"{arguments[1]}=1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert said == f"error: E1005 InvalidArgument: {name} was removed: {REMOVED[name]}"


@pytest.mark.parametrize("name", VARIABLES)
def test_a_removed_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(InvalidArgument) as refused:
        load_settings()
    assert str(refused.value).endswith(f"{name}='x' was removed: {REMOVED[name]}")
    monkeypatch.setenv(name, "False")
    load_settings()


def test_an_option_after_two_dashes_is_an_argument() -> None:
    said = CliRunner().invoke(app, ["inspect", "--", "--park"]).output
    assert "was removed" not in said


def test_a_removed_key_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="PARK_ENGINE was removed: "):
        check_keys(["max_tokens", "PARK_ENGINE"])
