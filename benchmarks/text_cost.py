"""CPU cost of a token in detokenizer and stop matcher, by the length of the text before it.

Tokens are fed one at a time; the last few before each length are timed, the fastest of some runs.
Beside them decoding the whole, and searching all text.

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

from cog_triton.engines.mock import word_tokenizer
from cog_triton.text.detokenize import Detokenizer, Vocabulary
from cog_triton.text.stop_strings import StopMatcher

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import small_tokenizers

LENGTHS = (128, 1024, 4096, 32768)
FLAT = Target(1.2)
WINDOW = 100
STOPS = ("</s>", "\n\nUser:", "Observation: ", "the fish do not know it yet, said nobody")
NEAR = "na" * 200 + "!"
Feed = Callable[[int], object]


def kinds() -> dict[str, tuple[Tokenizer, str]]:
    """Both kinds of tokenizer, each with a text."""
    fallback = "hello world Ä" * 8 + "日本"
    return {
        "byte-level": (word_tokenizer.make(), word_tokenizer.PASSAGE),
        "byte-fallback": (small_tokenizers.byte_fallback(bos=False), fallback),
    }


def fed(make: Callable[[], Feed], lengths: Sequence[int], repeats: int) -> dict[int, float]:
    """Fastest microseconds a piece over the last `WINDOW` pieces before each length."""
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
    """Fastest microseconds of processing each length from the start, as one piece."""
    best: dict[int, float] = {}
    for _ in range(repeats):
        for length in lengths:
            started = time.thread_time()
            once(length)
            spent = (time.thread_time() - started) * 1e6
            best[length] = min(best.get(length, spent), spent)
    return best


def rows(name: str, ours: dict[int, float], whole: dict[int, float], report: Report) -> Grid:
    """A row for each length; adds two figures."""
    grid = Grid(name, ("tokens before", "us/token", "whole anew us/token", "ratio"))
    for length, spent in ours.items():
        grid.add(length, spent, whole[length], f"{whole[length] / spent:.1f}")
    last = max(ours)
    base = 1024 if 1024 in ours else min(ours)
    report.figures += [
        Figure(f"{name}: token {last} / token {base}", ours[last] / ours[base], "x", FLAT),
        Figure(f"{name}: whole anew / ours, token {last}", whole[last] / ours[last]),
    ]
    return grid


def detokenizing(
    report: Report, name: str, made: Tokenizer, ids: list[int], lengths: Sequence[int], repeats: int
) -> Grid:
    """Measure detokenizing with one tokenizer."""
    single = [[token] for token in ids]

    def feed() -> Feed:
        stream = Detokenizer.by(Vocabulary(made))
        return lambda place: stream.feed(single[place])

    def decode(length: int) -> object:
        return made.decode(ids[:length])

    ours, whole = fed(feed, lengths, repeats), anew(decode, lengths, repeats)
    return rows(f"detokenizer, {name}", ours, whole, report)


def matching(
    report: Report,
    name: str,
    stops: Sequence[str],
    line: list[str],
    lengths: Sequence[int],
    repeats: int,
) -> Grid:
    """Measure stop matching on one text."""
    prefixes = {length: "".join(line[:length]) for length in lengths}

    def feed() -> Feed:
        matcher = StopMatcher(stops)
        return lambda place: matcher.feed(line[place])

    def search(length: int) -> object:
        return [stop in prefixes[length] for stop in stops]

    ours, whole = fed(feed, lengths, repeats), anew(search, lengths, repeats)
    return rows(f"stop matcher, {name}", ours, whole, report)


def run(args: argparse.Namespace) -> Report:
    """Measure both parts, for every kind of tokenizer and of text."""
    lengths, repeats = (LENGTHS[:2], 2) if args.quick else (LENGTHS, args.repeats)
    report = Report("text_cost", "detokenizer and stop matcher")
    for name, (made, text) in kinds().items():
        ids = made.encode(text, add_special_tokens=False).ids
        ids = list(islice(cycle(ids), max(lengths)))
        report.grids.append(detokenizing(report, name, made, ids, lengths, repeats))
    words = [f"{word} " for word in word_tokenizer.PASSAGE.split(" ")]
    for name, pieces, stops in (("words", words, STOPS), ("near misses", ["nana"], (NEAR,))):
        line = list(islice(cycle(pieces), max(lengths)))
        report.grids.append(matching(report, name, stops, line, lengths, repeats))
    report.notes.append(
        f"{len(STOPS)} stop strings against words; one of {len(NEAR)} characters, nearly matched"
    )
    return report


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=15, help="runs, of which the fastest counts")


if __name__ == "__main__":
    main("text_cost", __doc__, run, arguments)
