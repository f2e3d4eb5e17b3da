"""Option probe: options of real scripts, read without doing their work."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from cog_triton.builder.options.script_options import (
    Option,
    Options,
    Unreadable,
    options_of,
    probing,
)
from cog_triton.builder.plan import OWN

LIMIT_S = 60.0


def read(script: Path, limit_s: float = LIMIT_S) -> Options | Unreadable:
    with probing(sys.executable, script, limit_s) as wait:
        return wait()


@pytest.fixture
def read_text(tmp_path: Path):
    def read_it(text: str, limit_s: float = LIMIT_S) -> Options | Unreadable:
        script = tmp_path / "script.py"
        script.write_text(text)
        return read(script, limit_s)

    return read_it


def by_name(found: Options | Unreadable) -> dict[str, Option]:
    assert isinstance(found, Options), found
    return {option.names[0]: option for option in found.options if option.names}


def reason(found: Options | Unreadable) -> str:
    assert isinstance(found, Unreadable), found
    return found.reason


ENUM = """
import argparse
from enum import Enum

class Kind(str, Enum):
    jax = "jax"
    hugging_face = "hf"

class Level(Enum):
    low = 1

parser = argparse.ArgumentParser()
parser.add_argument("--kind", type=Kind, choices=list(Kind), default=Kind.jax)
parser.add_argument("--any_kind", type=Kind)
parser.add_argument("--level", type=Level)
parser.add_argument("--variant", choices=[None, "gpt2"], default=None)
parser.parse_args()
"""


def test_choices_are_what_the_command_line_takes(read_text) -> None:
    """A member of an enumeration is given by its value, and a choice of None by no text."""
    options = by_name(read_text(ENUM))
    kind = options["kind"]
    assert (kind.type, kind.choices, kind.default) == ("str", ("jax", "hf"), "jax")
    assert options["any_kind"].choices == ("jax", "hf")
    assert (options["level"].type, options["level"].choices) == ("Level()", ("1",))
    assert options["variant"].choices == ("gpt2",)


def test_options_of_the_package_examples() -> None:
    build = by_name(read(OWN / "openvino" / "build.py"))
    assert list(build) == [
        "checkpoint_dir",
        "output_dir",
        "max_batch_size",
        "max_seq_len",
        "max_input_len",
    ]
    assert build["checkpoint_dir"].required
    assert build["checkpoint_dir"].type == "Path()"
    assert (build["max_batch_size"].type, build["max_batch_size"].default) == ("int", "16")
    assert not build["max_batch_size"].required
    quantize = by_name(read(OWN / "openvino" / "quantize.py"))
    assert quantize["qformat"].choices == ("q8_0", "q4_0", "f16")
    assert quantize["qformat"].type is None
    convert = by_name(read(OWN / "openvino" / "convert_checkpoint.py"))
    assert set(convert) == {"model_dir", "output_dir", "dtype"}


def test_options_of_every_argparse_action(read_text) -> None:
    found = read_text("""
import argparse, enum
class Level(enum.Enum):
    LOW = 1
def yes(text):
    return text == "yes"
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.register("type", "number", int)
parser.add_argument("-s", "--smoothquant", "-sq", "--smooth", type=float)
parser.add_argument("-x", action="store_true", required=True)
parser.add_argument("--flag", action="store_true")
parser.add_argument("--either", action=argparse.BooleanOptionalAction)
parser.add_argument("--pair", nargs=2, type="number", choices=range(3))
parser.add_argument("--vast", type=int, choices=range(5000))
parser.add_argument("--level", type=Level, choices=list(Level), default=Level.LOW)
parser.add_argument("--yes", type=yes)
parser.add_argument("--partial", type=__import__("functools").partial(int, base=2))
parser.add_argument("--version", action="version", version="1")
parser.add_argument("source")
parser.add_argument("rest", nargs="*", default=[])
parser.parse_args()
""")
    options = by_name(found)
    assert options["smoothquant"].names == ("smoothquant", "smooth")
    assert options["smoothquant"].type == "float"
    assert options["flag"].nargs == options["either"].nargs == 0
    assert options["either"].names == ("either", "no-either")
    assert (options["pair"].nargs, options["pair"].type) == (2, "int")
    assert options["pair"].choices == ("0", "1", "2")
    assert options["vast"].choices is None
    assert (options["level"].type, options["level"].default) == ("Level()", "1")
    assert (options["yes"].type, options["partial"].type) == ("yes()", "partial()")
    assert "version" not in options
    assert "help" not in options
    assert isinstance(found, Options)
    assert [o.label for o in found.options if not o.names] == ["x"]
    assert (found.positionals[0].label, found.positionals[0].required) == ("source", True)
    assert found.complete
    assert not found.abbreviations


def test_parse_known_args_is_marked_incomplete(read_text) -> None:
    found = read_text("""
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--known", type=int)
parser.parse_known_args()
""")
    assert list(by_name(found)) == ["known"]
    assert not found.complete
    assert found.abbreviations


def test_argument_lists_of_libraries_are_ignored(read_text) -> None:
    found = read_text("""
import argparse
other = argparse.ArgumentParser()
other.add_argument("--other", default="kept")
assert other.parse_args([]).other == "kept"
assert other.parse_known_args(["--other", "3", "more"])[1] == ["more"]
parser = argparse.ArgumentParser()
parser.add_argument("--mine")
parser.parse_args()
""")
    assert list(by_name(found)) == ["mine"]


def test_sub_commands_are_positional(read_text) -> None:
    found = read_text("""
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--top")
commands = parser.add_subparsers(dest="command", required=True)
commands.add_parser("convert").add_argument("--deep")
parser.parse_args()
""")
    assert list(by_name(found)) == ["top"]
    assert [(o.label, o.required, o.choices) for o in found.positionals] == [
        ("command", True, ("convert",))
    ]


def test_script_imports_modules_beside_it(tmp_path: Path, read_text) -> None:
    (tmp_path / "_neighbour.py").write_text(
        "import argparse\nPARSER = argparse.ArgumentParser()\nPARSER.add_argument('--near')"
    )
    found = read_text("import _neighbour, cog_triton\n_neighbour.PARSER.parse_args()")
    assert list(by_name(found)) == ["near"]


def test_probe_does_none_of_the_work(tmp_path: Path, read_text) -> None:
    def traces() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    (tmp_path / "kept").write_text("kept")
    work = f"""
import argparse, atexit, os, pathlib, shutil, socket, subprocess, sys, tempfile
here = pathlib.Path({str(tmp_path)!r})
atexit.register(lambda: (here / "late").write_text(""))
with tempfile.NamedTemporaryFile() as allowed:
    allowed.write(b"caches are written at import")
open(os.devnull, "w").close()
deeds = (
    lambda: (here / "made").write_text(""),
    lambda: (here / "kept").open("r+"),
    lambda: pathlib.Path("here").write_text(""),
    lambda: (here / "dir").mkdir(),
    lambda: os.rename(here / "kept", here / "gone"),
    lambda: os.rename(here / "kept", tempfile.gettempdir() + "/gone"),
    lambda: os.symlink("x", here / "link"),
    lambda: (here / "kept").unlink(),
    lambda: subprocess.run(["true"]),
    lambda: os.system("true"),
    lambda: os.fork() or os._exit(0),
    lambda: socket.create_connection(("127.0.0.1", 9)),
)
for index, deed in enumerate(deeds):
    try:
        deed()
    except PermissionError:
        continue
    atexit._clear()
    sys.exit(f"deed {{index}} was done")
"""
    parse = "argparse.ArgumentParser().parse_args()\n(here / 'after').write_text('')"
    assert by_name(read_text(work + parse)) == {}
    assert traces() == {"kept", "script.py"}
    assert (tmp_path / "kept").read_text() == "kept"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import no_such_module", "exit code 1 .*No module named 'no_such_module'$"),
        ("import sys; sys.exit('needs a GPU')", "exit code 1 before .*: needs a GPU$"),
        ("raise SystemExit(3)", "exit code 3 before it read them: it says nothing$"),
        ("print('--not an --option')", "neither reads its command line with argparse nor"),
        ("this is no Python", "SyntaxError"),
        ("import ctypes; ctypes.CDLL(None).abort()", "exit code 134"),
    ],
)
def test_unreadable_scripts_give_the_reason(text: str, why: str, read_text) -> None:
    assert re.search(why, reason(read_text(text)))


def test_probe_stops_at_the_time_limit(read_text) -> None:
    found = read_text("import time; time.sleep(600)", limit_s=0.5)
    assert reason(found) == "it did not read its command line within 0.5 s"


def test_options_from_a_help_text(read_text) -> None:
    options = by_name(
        read_text("""
import click
@click.command()
@click.option("-c", "--count", type=int, required=True, help="How often it is done.")
@click.option("--kind", type=click.Choice(["a", "b"]))
@click.option("--loud/--quiet", help="An option of two names, with a help text so long that it"
    " goes on in another line.")
@click.option("--name")
def main(**_):
    raise SystemExit("worked")
main()
""")
    )
    assert (options["count"].type, options["count"].required) == ("int", True)
    assert options["kind"].choices == ("a", "b")
    assert (options["loud"].names, options["loud"].nargs) == (("loud", "quiet"), 0)
    assert (options["name"].nargs, options["name"].required) == ("+", False)
    assert len(options) == 4


def test_options_from_help_of_optparse_and_typer(read_text) -> None:
    old = by_name(
        read_text("""
from optparse import OptionParser
parser = OptionParser()
parser.add_option("-f", "--file", metavar="FILE", help="see --other")
parser.add_option("--fast", action="store_true")
parser.parse_args()
raise SystemExit("worked")
""")
    )
    assert {name: option.nargs for name, option in old.items()} == {"file": "+", "fast": 0}
    new = by_name(
        read_text("""
import typer
def main(size: int = typer.Option(...), fast: bool = False, name: str = "x"):
    raise SystemExit("worked")
typer.run(main)
""")
    )
    assert (new["size"].type, new["size"].required) == ("int", True)
    assert new["fast"].names == ("fast", "no-fast")
    assert new["fast"].nargs in (0, "*")  # as typer's version writes it
    assert new["name"].nargs == "+"


def test_text_without_usage_is_not_help() -> None:
    assert options_of("  --option VALUE  of something else\n") == []
    text = "usage: x\n  --many A [A ...]  several\n  --some [N]\n  --of {a,b}  of these\n"
    assert [(o.names, o.nargs, o.choices) for o in options_of(text)] == [
        (("many",), "+", None),
        (("some",), "*", None),
        (("of",), "+", ("a", "b")),
    ]
