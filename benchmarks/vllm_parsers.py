#!/usr/bin/env python3
"""Parsers of vLLM through the child process beside the same parsers within vLLM's serving layer.

Each answer in each format goes both ways, in chunks of 1 to k tokens: here through our detokenizer,
the child and the parser of `/v1`; there through vLLM's detokenizer, `ChatStreamProcessor` and
message assembly. Tokenizers are made of a format's marks and all bytes.

.venv/bin/python benchmarks/vllm_parsers.py --vllm-python PYTHON --results FILE --write
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _parser_formats import FORMATS, RESPONSE_TEMPLATE, TOOLS, Format
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cog_triton.errors import CogTritonError
from cog_triton.serving.openai.parsers.answer_parser import AnswerParser
from cog_triton.serving.openai.parsers.borrowed import BorrowedParsers, BorrowedStream
from cog_triton.serving.openai.parsers.call_parser import join
from cog_triton.system import isolated_python
from cog_triton.text.stop_strings import TextStream
from cog_triton.text.tokenizer import EngineTokenizer

ROOT = Path(__file__).resolve().parents[1]
SIZES = (0, 1, 2, 3, 5, 1000)
END = "<|the end|>"
PROMPT = "<|im_start|>assistant\n"
_PATIENCE_S = 60.0
_SECTION = re.compile(r"^## Parsers of vLLM\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_HEAD = """\
## Parsers of vLLM

<!-- written by `benchmarks/vllm_parsers.py` -->

`TOOL_CALL_PARSER=vllm:NAME` ([openai.md](openai.md#parsers-of-vllm)) is compared with the same
parser in the serving layer of vLLM 0.33, on a CPU: text, reasoning, one call and several, cut
answers, in each format's documented syntax, streamed in chunks of 1, 2, 3, 5 and all tokens, and
without a stream.

<!-- parsers -->

"""
_END = "\n<!-- /parsers -->\n"


def tokenizer_of(form: Format, directory: Path) -> EngineTokenizer:
    """A byte-level tokenizer with the format's marks; written as the hub has one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    marks = [
        AddedToken(mark, special=mark.startswith("<|") or mark.endswith("|>"), normalized=False)
        for mark in form.marks()
    ]
    made.add_special_tokens([mark for mark in marks if mark.special])
    made.add_tokens([mark for mark in marks if not mark.special])
    made.save(str(directory / "tokenizer.json"))
    config = {
        "eos_token": END,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "response_template": RESPONSE_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return EngineTokenizer(made, eos_token=END)


class Ours:
    """Answers parsed as `/v1` does."""

    def __init__(self, parsers: BorrowedParsers, tokenizer: EngineTokenizer) -> None:
        self._parsers, self._tokenizer = parsers, tokenizer
        self._spec = {"tools": TOOLS, "tool_choice": "auto"}
        visible = parsers.plan(self._spec).visible
        self._visible = tokenizer.special_tokens if visible else ()

    def stream(self, prompt: Sequence[int], ids: Sequence[int], size: int) -> dict[str, Any]:
        """What is told of an answer whose tokens come in chunks; of size 0, without a stream."""
        stream = BorrowedStream(self._parsers, self._spec)
        parser, news = AnswerParser(stream), threading.Semaphore(0)
        stream.begin(prompt, news.release)
        text = TextStream(self._tokenizer, (), visible=self._visible)
        end = len(ids) + 1  # of the token that ends it, which engines cut off
        for start in range(0, end, size or end):
            chunk, last = ids[start : start + (size or end)], start + (size or end) >= end
            piece = text.feed(chunk) + (text.finish() if last else "")
            if size:
                stream.send(piece, chunk, finished=last)
            else:
                stream.send_whole(piece, chunk)
        while stream.waits:
            if not news.acquire(timeout=_PATIENCE_S):
                raise TimeoutError
        try:
            answer = join(parser.finish())
        except CogTritonError as error:
            return {"error": error.detail.partition("fails: ")[2] or error.detail}
        finally:
            stream.close()
        return {
            "content": answer.content,
            "reasoning": answer.reasoning,
            "calls": [[call.name, call.arguments] for call in answer.calls],
            "end": parser.finish_reason("stop"),
        }


class Reference:
    """The process of `_parser_reference.py`."""

    def __init__(self, python: Path) -> None:
        self.python, self._links = python, TemporaryDirectory()
        environment = {
            **isolated_python.environment(Path(self._links.name)),
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CONFIGURE_LOGGING": "0",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("_parser_reference.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            cwd="/",
        )

    def answers(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """What vLLM makes of a job's answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._links.cleanup()


@dataclass
class Verdict:
    """`equal`, `differs`, or why there is nothing to compare; what differs, and calls read."""

    verdict: str
    differences: list[str] = field(default_factory=list)
    calls: int = 0


def compare(reference: Reference, name: str, form: Format) -> Verdict:
    """Compare what comes of a format's answers both ways."""
    if form.not_compared:
        return Verdict(form.not_compared)
    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        tokenizer = tokenizer_of(form, directory)
        answers = {case: tokenizer.encode(text) for case, text in form.answers().items()}
        job = {
            "tokenizer": scratch,
            "tool": name,
            "reasoning": form.reasoning,
            "tools": TOOLS,
            "prompts": {
                case: tokenizer.encode(PROMPT + ("" if "reasoning" in case else form.prompted))
                for case in answers
            },
            "eos": tokenizer.token_id(END),
            "answers": answers,
            "sizes": SIZES,
        }
        expected = reference.answers(job)
        if "error" in expected:
            return Verdict(expected["error"])
        try:
            names = (name, form.reasoning)
            parsers = BorrowedParsers(reference.python, directory / "links", directory, names)
        except CogTritonError as error:
            return Verdict(error.detail)
        try:
            return _compared(Ours(parsers, tokenizer), job, expected)
        finally:
            parsers.close()


def _compared(ours: Ours, job: Mapping[str, Any], expected: Mapping[str, Any]) -> Verdict:
    found = Verdict("equal")
    for case, ids in job["answers"].items():
        for size in SIZES:
            made = ours.stream(job["prompts"][case], ids, size)
            theirs = expected[case][str(size)]
            found.calls += len(made.get("calls", ()))
            if made != theirs:
                found.verdict = "differs"
                found.differences.append(f"{case}, {size} a chunk: {made} instead of {theirs}")
    return found


def table(found: Mapping[str, Verdict]) -> Iterator[str]:
    """Lines of the table of docs/clients.md."""
    equal = [name for name, each in found.items() if each.verdict == "equal"]
    yield f"{len(equal)} of {len(found)} are equal: {', '.join(f'`{name}`' for name in equal)}.\n"
    yield "\n| parser | why it is not |\n|---|---|\n"
    for name, each in found.items():
        if each.verdict != "equal":
            text = f"{each.verdict} {''.join(each.differences[:1])[:200]}".strip()
            yield f"| `{name}` | {text.replace('|', '&#124;').replace('<', '&lt;')} |\n"


def main() -> int:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--only", default="", help="names, separated by commas; '' for all")
    parser.add_argument("--results", type=Path, help="JSON, to which this run's are added")
    parser.add_argument("--write", action="store_true", help="write the table of docs/clients.md")
    options = parser.parse_args()
    found: dict[str, Verdict] = {}
    if options.results and options.results.exists():
        known = json.loads(options.results.read_text("utf-8"))
        found = {name: Verdict(**values) for name, values in known.items()}
    if options.vllm_python:
        reference = Reference(options.vllm_python.absolute())
        for name in options.only.split(",") if options.only else FORMATS:
            each = found[name] = compare(reference, name, FORMATS[name])
            sys.stdout.write(f"{name} {each.verdict} ({each.calls} calls)\n")
            sys.stdout.write("".join(f"    {line}\n" for line in each.differences[:2]))
            sys.stdout.flush()
            if options.results:
                values = {name: asdict(each) for name, each in sorted(found.items())}
                options.results.write_text(json.dumps(values, indent=1), "utf-8")
        reference.close()
    lines = "".join(table(dict(sorted(found.items()))))
    sys.stdout.write(lines)
    if options.write:
        page = ROOT / "docs" / "clients.md"
        rest = _SECTION.sub("", page.read_text("utf-8")).rstrip("\n")
        page.write_text(f"{rest}\n\n{_HEAD}{lines}{_END}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
