"""Streams of eight classes over a server whose EngineCore is killed: how they go on, and where not.

Each stream is compared with the same one undisturbed. Two runs may part where the two likeliest
tokens are nearly as likely, since a prompt's sums are others than those of steps. That this, and
nothing that was forgotten, is why, is told by the log probabilities at the first difference: those
of the two runs must be the same but for rounding, and with greedy decoding the two likeliest, less
their penalties, no further apart.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prompts
import vision_model
from adapters import NAMES, with_adapters
from arguments import REPOSITORY
from endpoints import Endpoint, events
from killed_worker import victim
from load import Reads, read
from prompts import Prompt
from results import Phase
from servers import Ours, running

from cog_triton.bench.http_client import TransportError

if TYPE_CHECKING:
    from verify import Driver

PHASES = ("resume", "resume-adapters", "resume-images")
BUDGETS, LEAST = dict.fromkeys(PHASES, 560), dict.fromkeys(PHASES, 120)
STREAMS, TOKENS = 64, 256
REFUSED = "refused"
NEAR = 0.1
"""In nats: the most that rounding may move a log probability, or a near tie be apart."""
_KILLED_AT = (0.1, 0.35, 0.6, 0.85)
"""Parts of an undisturbed run."""
_LENGTHS = (1, 33, 100, 256)
_TOP = 20
_PATIENCE_S = 150.0
_LONG_S = 3600.0

_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("name", "place", "note")},
    "required": ["name", "place", "note"],
    "additionalProperties": False,
}
_JSON = {"type": "json_schema", "json_schema": {"name": "tale", "schema": _SCHEMA}}
_REGEX = {"regex": r"[a-z]{9}( [a-h]{5}){12}, ([a-z]+ )*\."}
_GREEDY = {"temperature": 0, "ignore_eos": True}
_DRAWN = {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True}
_COUNTED = {"frequency_penalty": 0.7, "presence_penalty": 0.4}
CLASSES: Mapping[str, Mapping[str, Any]] = {
    "greedy": _GREEDY,
    "seed": {**_DRAWN, "seed": 4242},
    "seed, top_k": {"temperature": 1, "top_k": 50, "seed": 77, "ignore_eos": True},
    "penalties": {**_GREEDY, **_COUNTED},
    "penalties, seed": {**_DRAWN, **_COUNTED, "repetition_penalty": 1.1, "seed": 5},
    "min_tokens": {"temperature": 0, "min_tokens": TOKENS - 20},
    "JSON schema": {"temperature": 0.8, "seed": 9, "response_format": _JSON},
    "regex": {"temperature": 0.8, "seed": 3, "structured_outputs": _REGEX},
}


OF_IMAGES = ("greedy", "seed", "seed, top_k", "penalties", "penalties, seed")
"""Classes of a model whose weights are made up, which ends neither a JSON nor an expression."""


class Asked(Endpoint):
    """Endpoint: completions of one class, with the likeliest tokens beside each."""

    def body(self, prompt: Prompt, max_tokens: int) -> Mapping[str, Any]:
        plain = {**super().body(prompt, max_tokens), "ignore_eos": False}
        return {**plain, "logprobs": _TOP, **CLASSES[self.name]}


class Adapted(Asked):
    """Endpoint: the same by adapters in turn, and by the model without one."""

    def body(self, prompt: Prompt, max_tokens: int) -> Mapping[str, Any]:
        models = ("verify", *NAMES)
        named = models[sum(prompt.text.encode()) % len(models)]
        return {**super().body(prompt, max_tokens), "model": named}


class Seeing(Asked):
    """Endpoint: chats of one class about an image each."""

    path = "/v1/chat/completions"
    mark = b'"content"'

    def body(self, prompt: Prompt, max_tokens: int) -> Mapping[str, Any]:
        plain = {**super().body(prompt, max_tokens), "logprobs": True, "top_logprobs": _TOP}
        plain.pop("prompt")
        shade = sum(prompt.text.encode()) % 256
        image = {"url": vision_model.image_url((shade, 255 - shade, 60))}
        parts = [{"type": "image_url", "image_url": image}, {"type": "text", "text": prompt.text}]
        return {**plain, "messages": [{"role": "user", "content": parts}]}


@dataclass
class Stream:
    """One stream: what came and when, and how much of it before the kill."""

    answer: Reads
    before: int = 0
    hung: bool = False


@dataclass(frozen=True)
class Told:
    """What a stream has told: its tokens, the likeliest beside each, its text and its end.

    One that was sent while no engine was there, and refused so, has ended as "refused".
    """

    tokens: Sequence[str]
    likeliest: Sequence[Mapping[str, float]]
    text: str
    end: str
    cut: int = 0
    """Tokens before the kill."""

    @classmethod
    def of(cls, stream: Stream) -> Told:
        """Read the events of a stream; `end` is its finish reason, or the code of its error."""
        told = events(stream.answer.text)
        found = [choice for event in told for choice in event.get("choices", ())]
        log_probs = [_flat(choice["logprobs"]) for choice in found if choice.get("logprobs")]
        ends = [choice["finish_reason"] for choice in found if choice.get("finish_reason")]
        errors = [event["error"] for event in told if event.get("error")]
        ended = errors[-1].get("code") or str(errors[-1]) if errors else "cut"
        if stream.answer.status == 503:
            ended = REFUSED
        return cls(
            [token for one in log_probs for token in one["tokens"]],
            [top or {} for one in log_probs for top in one["top_logprobs"]],
            "".join(_text(choice) for choice in found),
            "hung" if stream.hung else ends[-1] if ends and not errors else ended,
            len(re.findall(rb'"logprobs":\s*\{', stream.answer.text[: stream.before])),
        )

    @property
    def whole(self) -> bool:
        """Whether it came to an end of its own."""
        return self.end in ("stop", "length")


def _flat(log_probs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Log probabilities of a chat in the form of those of completions, which stay as they are."""
    if "content" not in log_probs:
        return log_probs
    told = log_probs["content"] or ()
    likeliest = [{_token(top): top["logprob"] for top in one["top_logprobs"]} for one in told]
    return {"tokens": [_token(one) for one in told], "top_logprobs": likeliest}


def _token(told: Mapping[str, Any]) -> str:
    """A token's text, and its bytes where these are no text: others have the same one then."""
    text = str(told["token"])
    return f"{text}{told.get('bytes')}" if "\ufffd" in text else text


def _text(choice: Mapping[str, Any]) -> str:
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


def first_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    """Where two lists of tokens part, None if they do not."""
    places = (n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    shortest = min(len(one), len(other))
    return next(places, None if len(one) == len(other) else shortest)


def fault(asked: Mapping[str, Any], undisturbed: Told, found: Told) -> str:
    """Why the first difference of two runs is no near tie, "" if it is one, or there is none."""
    place = first_difference(undisturbed.tokens, found.tokens)
    if place is None:
        return ""
    if place >= min(len(undisturbed.likeliest), len(found.likeliest)):
        return ""  # one has ended there: its end mark is told with no log probability
    one, other = undisturbed.likeliest[place], found.likeliest[place]
    moved = max((abs(one[token] - other[token]) for token in one.keys() & other), default=99.0)
    if moved > NEAR:
        return f"at {place}: log probabilities differ by {moved:.3f}"
    if asked.get("temperature") or "response_format" in asked or "structured_outputs" in asked:
        return ""  # what was drawn is not told
    made = Counter(undisturbed.tokens[:place])
    frequency, presence = (asked.get(f"{name}_penalty", 0.0) for name in ("frequency", "presence"))
    scores = sorted(
        value - frequency * made[token] - presence * (token in made) for token, value in one.items()
    )
    apart = scores[-1] - scores[-2] if len(scores) > 1 else 99.0
    return f"at {place}: the two best are {apart:.3f} apart" if apart > NEAR else ""


def shares(undisturbed: Sequence[Told], found: Sequence[Told]) -> dict[str, str]:
    """How many went on the same, by the tokens they had at the kill."""
    rows: dict[str, str] = {}
    for least, most in itertools.pairwise((*_LENGTHS, sys.maxsize)):
        pairs = [
            (one, other)
            for one, other in zip(undisturbed, found, strict=True)
            if least <= other.cut < most and other.cut < len(other.tokens)
        ]
        if pairs:
            same = sum(list(one.tokens) == list(other.tokens) for one, other in pairs)
            rows[f"cut from {least} on"] = f"{same} of {len(pairs)}"
    return rows


def is_json(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


async def _read(endpoint: Endpoint, prompt: Prompt, stream: Stream) -> None:
    try:
        with suppress(TransportError):  # told as one that was cut
            await read(endpoint, prompt, TOKENS, stream.answer, _LONG_S)
    except asyncio.CancelledError:
        stream.hung = True
        raise


async def stream_all(
    asked: Sequence[Asked],
    texts: Sequence[Prompt],
    kill_after_s: float | None,
    kill: Callable[[], None],
) -> dict[str, list[Stream]]:
    """All classes at once, and the kill meanwhile, if there is one."""
    found = {each.name: [Stream(Reads(each.mark)) for _ in texts] for each in asked}
    tasks = [
        asyncio.create_task(_read(each, prompt, stream))
        for each in asked
        for prompt, stream in zip(texts, found[each.name], strict=True)
    ]
    if kill_after_s is not None:
        await asyncio.sleep(kill_after_s)
        kill()
        for stream in itertools.chain(*found.values()):
            stream.before = len(stream.answer.text)
    _, late = await asyncio.wait(tasks, timeout=_PATIENCE_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


class Resumed:
    """Phase `resume`: undisturbed twice, and once for each time of a kill."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def phases(self) -> dict[str, Callable[[Phase], None]]:
        """What each phase runs."""
        return {
            "resume": self.resume,
            "resume-adapters": self.adapters,
            "resume-images": self.images,
        }

    def resume(self, phase: Phase) -> None:
        """Kill EngineCore under 64 streams of each class, and judge what came of each."""
        self._resume(phase, Asked, self._of_bytes if self._driver.rehearsal else self._small)

    def adapters(self, phase: Phase) -> None:
        """The same with LoRA adapters."""
        self._resume(phase, Adapted, self._adapted)

    def images(self, phase: Phase) -> None:
        """The same with an image in each prompt."""
        self._resume(phase, Seeing, self._seeing)

    def _resume(self, phase: Phase, kind: type[Asked], model: Callable[[], Path]) -> None:
        driver = self._driver
        variables = {"RESUME": "1", "TRITON_MAX_RESTARTS": "50"}
        if driver.rehearsal:
            variables |= {"VLLM_DOUBLE_SAMPLES": "1", "VLLM_DOUBLE_DELAY": "0.01"}
        server = driver.ours(phase.name, model(), **variables)
        count = 6 if driver.rehearsal else STREAMS
        texts = [Prompt(f"Tale {n} of a king: ", []) for n in range(count)]
        if not driver.rehearsal:
            texts = prompts.make(driver.small, count, 24, seed=33)
        names = OF_IMAGES if kind is Seeing else tuple(CLASSES)
        asked = [kind(name, server.openai) for name in names]
        with running(server):
            driver.put_start(phase, server)
            self._rounds(phase, server, asked, texts)

    def _rounds(
        self, phase: Phase, server: Ours, asked: Sequence[Asked], texts: Sequence[Prompt]
    ) -> None:
        def run(after_s: float | None = None) -> dict[str, list[Stream]]:
            while not server.healthy() and time.monotonic() < self._driver.until:
                time.sleep(0.2)
            return asyncio.run(stream_all(asked, texts, after_s, lambda: strike(server)))

        def strike(server: Ours) -> None:
            role, pid = victim(server)
            print(f"  kill -9 {pid} ({role})", flush=True)
            os.kill(pid, signal.SIGKILL)

        began = time.monotonic()
        undisturbed = _told(run())
        lasted = time.monotonic() - began
        self._judge(phase, "undisturbed again", undisturbed, run())
        said = "".join(path.read_text("utf-8", "replace") for path in server.logs())
        taken = "takes tokens as output" in said
        phase.check("the engine takes tokens as output", taken, self._reason(said))
        for part in _KILLED_AT:
            if time.monotonic() + lasted + 60 > self._driver.until:
                print("  no time is left for more", flush=True)
                break
            self._judge(phase, f"killed at {part:.0%}", undisturbed, run(part * lasted))

    def _judge(
        self,
        phase: Phase,
        when: str,
        undisturbed: Mapping[str, Sequence[Told]],
        streams: Mapping[str, Sequence[Stream]],
    ) -> None:
        for name, found in _told(streams).items():
            before = undisturbed[name]
            ends = Counter(told.end for told in found if not told.whole)
            refused = ends.pop(REFUSED, 0)
            faults = [
                fault(CLASSES[name], one, other)
                for one, other in zip(before, found, strict=True)
                if other.end != REFUSED
            ]
            row = {
                "when": when,
                "class": name,
                "whole": f"{sum(told.whole for told in found)} of {len(found) - refused}",
                **({"refused": refused} if refused else {}),
                "same": sum(a.tokens == b.tokens for a, b in zip(before, found, strict=True)),
                **shares(before, found),
                "longest_pause_s": round(max(stream.answer.pause for stream in streams[name]), 2),
            }
            phase.add("streams", row)
            print(f"  {row}", flush=True)
            phase.check(f"{when}: {name}: all are whole", not ends, dict(ends))
            if when != "undisturbed again":
                wrong = [told for told in faults if told]
                phase.check(f"{when}: {name}: they part at near ties alone", not wrong, wrong[:3])
            if "response_format" in CLASSES[name]:
                lost = [b.text[-80:] for a, b in zip(before, found, strict=True)
                        if is_json(a.text) and b.end == "stop" and not is_json(b.text)]  # fmt: skip
                phase.check(f"{when}: JSON stays JSON", not lost, lost[:2])

    @staticmethod
    def _reason(said: str) -> str:
        lines = [line for line in said.splitlines() if "generations go on from" in line]
        return lines[-1] if lines else "the log does not say"

    def _small(self) -> Path:
        """SmolLM2, whose nine heads no two GPUs share; else a model whose weights are made up."""
        driver = self._driver
        return driver.billion if driver.extra.get("tensor_parallel_size", 1) > 1 else driver.small

    def _adapted(self) -> Path:
        driver = self._driver
        directory = driver.root / "models" / "resume-adapters"
        plain = json.loads((driver.small / "model.json").read_text("utf-8"))
        template = REPOSITORY / "configs" / "chat_templates" / "chatml-tools.jinja"
        return with_adapters(driver.small, directory, plain, template)

    def _seeing(self) -> Path:
        driver = self._driver
        plain = json.loads((driver.small / "model.json").read_text("utf-8"))
        mark = "\x01" if driver.rehearsal else vision_model.PLACEHOLDER
        arguments = {**plain, "max_num_seqs": 512, "max_model_len": 4096}
        return vision_model.write(driver.root / "models" / "resume-images", arguments, mark)

    def _of_bytes(self) -> Path:
        """A model of the double, whose grammars know bytes alone."""
        sys.path.append(str(REPOSITORY / "tests"))
        import vllm_engines

        directory: Path = self._driver.root / "models" / "bytes"
        made: Path = vllm_engines.vllm_engine(directory, max_model_len=2048, max_num_seqs=1024)
        return made


def _told(streams: Mapping[str, Sequence[Stream]]) -> dict[str, list[Told]]:
    return {name: [Told.of(stream) for stream in found] for name, found in streams.items()}
