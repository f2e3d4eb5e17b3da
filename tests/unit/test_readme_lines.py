"""Command lines of TensorRT-LLM's READMEs, 0.9 to 0.14: accepted, or refused with a reason."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from cog_triton.builder.breaches import Facts
from cog_triton.builder.checks import breaches_of, check_arguments
from cog_triton.builder.config import BuildConfig
from cog_triton.builder.plan import Families
from cog_triton.builder.upgrade import planned
from cog_triton.builder.workspace import Workspace
from cog_triton.errors import UnknownExample, UserError

TABLE = Path(__file__).parent / "golden" / "readme_lines.tsv"


@dataclass(frozen=True)
class Line:
    """One line, `places` being (version, line) of the file `readme`; `reads` is a line's number."""

    number: str
    verdict: str
    family: str
    script: str
    reads: str
    places: tuple[tuple[str, str], ...]
    arguments: str
    readme: str

    def step(self) -> tuple[str, dict[str, Any]]:
        """The step of a config that runs the line: its key and itself."""
        words = [word.partition("=") for word in self.arguments.split(" ") if word]
        args = {name: _value(text) if equals else None for name, equals, text in words}
        runs = "executable" if self.script.startswith("trtllm-") else "script"
        name = "quantize" if self.script == "quantize.py" else "convert"
        if runs == "executable" or self.script == "build.py":
            name = "build"
        return name, {runs: self.script, "output_dir": f"out-{self.number}", "args": args}


def _value(text: str) -> Any:
    values = [yaml.safe_load(one) for one in text.split("|")]
    return values if len(values) > 1 else values[0]


@functools.cache
def lines() -> dict[str, Line]:
    found, readme = {}, ""
    for text in TABLE.read_text("utf-8").splitlines():
        if text.startswith("@"):
            readme = text[1:]
        elif not text.startswith("#"):
            number, verdict, family, script, reads, places, arguments = text.split("\t")
            pairs = tuple((v, n) for v, _, n in (place.partition(":") for place in places.split()))
            found[number] = Line(number, verdict, family, script, reads, pairs, arguments, readme)
    return found


def config_of(line: Line) -> BuildConfig:
    """The config that runs the line, after those whose output it reads."""
    steps: dict[str, Any] = {
        "build": {"executable": "trtllm-build", "output_dir": "engine", "args": {}}
    }
    read: Line | None = line
    while read is not None:
        name, step = read.step()
        steps[name] = step
        read = lines().get(read.reads)
    return BuildConfig.model_validate(
        {"model_id": "org/model", "example_name": line.family, **steps}
    )


def _family(line: Line) -> str:
    return PurePosixPath(Families().find(line.family)).name


def refusal(line: Line, workspace: Workspace, sms: tuple[int, ...]) -> str:
    """What the check says of the line; ok if it is accepted."""
    try:
        config = config_of(line)
        plan = planned(config, workspace.of(config.fingerprint), lambda _: None)
        check_arguments(plan.steps, lambda _: None, against_installed=False)
    except UserError as error:
        return str(error)
    broken = breaches_of(Facts(plan.config, _family(line), sms=sms))
    return "; ".join(rule.line(one) for rule, one in broken) or "ok"


def test_every_line_gets_its_verdict(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    wrong = {
        line.number: (line.verdict, said)
        for line in lines().values()
        for said in [refusal(line, workspace, (90,))]
        if not (said == "ok" if line.verdict == "ok" else _says(said, line.verdict))
    }
    assert wrong == {}


def _says(refusal: str, verdict: str) -> bool:
    code, _, word = verdict.partition(" ")
    return refusal.startswith(code) and word in refusal


def test_no_rule_refuses_a_line_of_its_own_version() -> None:
    def wrong() -> Iterator[tuple[str, str, str]]:
        for line in lines().values():
            if "manual_plugin" in line.verdict:
                continue
            config, family = config_of(line), _family(line)
            for version, _ in line.places:
                major, _, minor = version.partition(".")
                facts = Facts(config, family, (int(major), int(minor)), (90,))
                for rule, broken in breaches_of(facts):
                    if rule.error_type is not UnknownExample:
                        yield line.number, version, rule.line(broken)

    assert list(wrong()) == []


def test_table_has_every_version_and_refuses_few() -> None:
    places = [(version, line) for line in lines().values() for version, _ in line.places]
    assert Counter(version for version, _ in places) == {
        "0.9": 345,
        "0.10": 431,
        "0.11": 502,
        "0.12": 518,
        "0.13": 527,
        "0.14": 542,
    }
    refused = Counter(line.verdict for _, line in places if line.verdict != "ok")
    assert {verdict for verdict in refused if verdict.startswith("E1301")} == {
        "E1301 encoder-decoder",
        "E1301 generates text",
        "E1301 manual_plugin",
    }
    # A typing error of theirs, and options that nothing today stands for.
    assert {verdict for verdict in refused if verdict.startswith("E1303")} == {
        "E1303 tp_szie",
        "E1303 auto_parallel",
        "E1303 context_fmha_fp32_acc",
        "E1303 model_dir",
    }
