"""Detokenizer and stop matcher: what a token costs, and whether the text before it matters.

Tokens are fed one at a time; the last few before each length are timed, the fastest of some runs.
Beside them what they stand in for: decoding the whole anew, and searching all of the text.

    .venv/bin/python benchmarks/text_cost.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

from _report import Figure, Grid, Report, Target, main
from tokenizers import Tokenizer

from cog_triton.detokenize import Detokenizer
from cog_triton.engines.mock import passage, tokenizer
from cog_triton.stops import StopMatcher

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))
import small_tokenizers

LENGTHS = (128, 1024, 4096, 32768)
FLAT = Target(1.2)
WINDOW = 100
STOPS = ("</s>", "\n\nUser:", "Observation: ", "the fish do not know it yet, said nobody")
NEAR = "na" * 200 + "!"
Feed = Callable[[int], object]


def kinds() -> dict[str, tuple[Tokenizer, str]]:
    """The two kinds of tokenizer, each with a text."""
    fallback = "hello world Ä" * 8 + "日本"
    return {
        "byte-level": (tokenizer.make(), passage.PASSAGE),
        "byte-fallback": (small_tokenizers.byte_fallback(bos=False), fallback),
    }


def fed(make: Callable[[], Feed], lengths: Sequence[int], repeats: int) -> dict[int, float]:
    """Microseconds for each of the last `WINDOW` pieces before each length, at the fastest."""
    best: dict[int, float] = {}
    for _ in range(repeats):
        feed = make()
        position = 0
        for length in lengths:
            while position < length - WINDOW:
                feed(position)
                position += 1
            started = time.thread_time()
            while position < length:
                feed(position)
                position += 1
            spent = (time.thread_time() - started) / WINDOW * 1e6
            best[length] = min(best.get(length, spent), spent)
    return best


def anew(once: Callable[[int], object], lengths: Sequence[int], repeats: int) -> dict[int, float]:
    """Microseconds of doing the whole of each length once, at the fastest."""
    best: dict[int, float] = {}
    for _ in range(repeats):
        for length in lengths:
            started = time.thread_time()
            once(length)
            spent = (time.thread_time() - started) * 1e6
            best[length] = min(best.get(length, spent), spent)
    return best


def rows(
    name: str, ours: dict[int, float], whole: dict[int, float], grid: Grid, report: Report
) -> None:
    """A row for each length, and two figures."""
    for length, spent in ours.items():
        grid.add(name, length, spent, whole[length], f"{whole[length] / spent:.1f}")
    last = max(ours)
    base = 1024 if 1024 in ours else min(ours)
    flat = Figure(f"{name}: token {last} / token {base}", ours[last] / ours[base], "x", FLAT)
    saved = Figure(f"{name}: whole anew / ours, token {last}", whole[last] / ours[last])
    report.figures += [flat, saved]


def run(args: argparse.Namespace) -> Report:
    """Both parts, for every kind of tokenizer and of text."""
    lengths, repeats = (LENGTHS[:2], 2) if args.quick else (LENGTHS, args.repeats)
    report = Report("text_cost", "detokenizer and stop matcher")
    columns = ("", "tokens before", "us/token", "whole anew us/token", "ratio")
    texts, stops = Grid("detokenizer", columns), Grid("stop matcher", columns)
    for name, (made, text) in kinds().items():
        ids = list(islice(cycle(made.encode(text, add_special_tokens=False).ids), max(lengths)))
        single = [[token] for token in ids]

        def detokenizer(made: Tokenizer = made, single: list[list[int]] = single) -> Feed:
            stream = Detokenizer(made)
            return lambda place: stream.feed(single[place])

        whole = anew(lambda length, made=made, ids=ids: made.decode(ids[:length]), lengths, repeats)
        rows(f"detokenizer, {name}", fed(detokenizer, lengths, repeats), whole, texts, report)
    words = [word + " " for word in passage.PASSAGE.split(" ")]
    near = ["nana"]
    for name, pieces, of in (("words", words, STOPS), ("near misses", near, (NEAR,))):
        line = list(islice(cycle(pieces), max(lengths)))
        prefixes = {length: "".join(line[:length]) for length in lengths}

        def matcher(of: Sequence[str] = of, line: list[str] = line) -> Feed:
            found = StopMatcher(of)
            return lambda place: found.feed(line[place])

        whole = anew(
            lambda length, of=of, prefixes=prefixes: [stop in prefixes[length] for stop in of],
            lengths,
            repeats,
        )
        rows(f"stop matcher, {name}", fed(matcher, lengths, repeats), whole, stops, report)
    report.grids += [texts, stops]
    report.notes.append(
        f"{len(STOPS)} stop strings against words; one of {len(NEAR)} characters, nearly matched"
    )
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=15, help="runs, of which the fastest counts")


if __name__ == "__main__":
    main("text_cost", __doc__, run, arguments)
