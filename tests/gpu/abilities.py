"""Checks of what a request may ask beyond text, through /v1 and /predictions, on the real vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from adapters import NAMES
from checks import QUESTION
from client import Client
from prompts import Prompt
from results import Phase
from vision_model import image_url

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
_MESSAGES = [{"role": "user", "content": "What will the weather be in Paris for two days?"}]
_GREETING = [{"role": "user", "content": QUESTION}]


@dataclass(frozen=True)
class Abilities:
    """The checks; `real` if the engine is vLLM, whose double repeats the prompt."""

    client: Client
    phase: Phase
    prompts: Sequence[Prompt]
    real: bool

    def all(self) -> None:
        """Run every check; a part that fails does not end the others."""
        parts: list[Callable[[], None]] = [self.several, self.likeliest, self.of_the_prompt]
        parts += [self.bias, self.adapters, self.adapters_at_once, self.tokens]
        if self.real:
            parts += [self.forced_calls, self.streamed_call, self.guides, self.responses]
        for part in parts:
            name = getattr(part, "__name__", "part")
            try:
                part()
            except Exception as error:  # noqa: BLE001 - the other parts are to be seen, too
                self.check(f"{name} went through", False, f"{type(error).__name__}: {error}")

    def check(self, name: str, holds: bool, seen: object = "") -> None:
        self.phase.check(name, holds, seen)

    def chat(self, **values: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The whole answer and its first choice."""
        told = self.client.openai("chat/completions", **{"messages": _GREETING, **values})
        return told, (told.get("choices") or [{}])[0]

    def complete(self, **values: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The whole answer and its first choice."""
        asked = {"prompt": self.prompts[0].text, "max_tokens": 16, **values}
        told = self.client.openai("completions", **asked)
        return told, (told.get("choices") or [{}])[0]

    def forced_calls(self) -> None:
        """Tools with guided decoding: a named function, and one call or more."""
        named = {"type": "function", "function": {"name": "get_weather"}}
        for choice, what in ((named, "a named function"), ("required", "required")):
            told, first = self.chat(
                messages=_MESSAGES, tools=[_TOOL], tool_choice=choice, max_tokens=120
            )
            calls = first.get("message", {}).get("tool_calls") or []
            right = [_fits(call["function"]) for call in calls]
            self.check(
                f"tools, {what}: calls that fit the schema", bool(right) and all(right), told
            )
        told, first = self.chat(
            messages=_MESSAGES, tools=[_TOOL], tool_choice="auto", max_tokens=48
        )
        reasons = ("stop", "length", "tool_calls")
        self.check("tools, auto: an answer", first.get("finish_reason") in reasons, told)

    def streamed_call(self) -> None:
        """A forced call as a stream: its pieces together are its arguments."""
        body = {"messages": _MESSAGES, "tools": [_TOOL], "tool_choice": "required"}
        pieces = self.client.openai_stream("chat/completions", **body, max_tokens=120)
        calls = [
            call
            for piece in pieces
            for choice in piece.get("choices", ())
            for call in choice["delta"].get("tool_calls") or ()
        ]
        text = "".join(c["function"].get("arguments") or "" for c in calls if c["index"] == 0)
        names = [c["function"]["name"] for c in calls if c["function"].get("name")]
        made = {"name": names[0] if names else "", "arguments": text}
        self.check("tools: a streamed call", len(calls) > 2 and _fits(made), (pieces[-2:], made))

    def guides(self) -> None:
        """Guided decoding: a schema, an expression, choices, a grammar."""
        for name, value, fits in (
            ("regex", "[0-9]{3}-[0-9]{4}", r"[0-9]{3}-[0-9]{4}"),
            ("choice", ["red", "green"], "red|green"),
            ("grammar", 'root ::= "yes" | "no"', "yes|no"),
        ):
            told, first = self.complete(structured_outputs={name: value}, max_tokens=24)
            right = re.fullmatch(fits, first.get("text", "")) is not None
            self.check(f"guided: {name}", right, told)
        schema = _TOOL["function"]["parameters"]  # type: ignore[index]
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        told, first = self.chat(messages=_MESSAGES, response_format=form, max_tokens=64)
        said = first.get("message", {}).get("content") or ""
        right = _fits({"name": "get_weather", "arguments": said})
        self.check("guided: a JSON Schema", right, told)

    def several(self) -> None:
        """`n`: as many answers, each with its index; `best_of` chooses of more."""
        values = {"n": 4, "temperature": 1.0, "seed": 5}
        told, _ = self.complete(**values)
        choices = told.get("choices") or []
        right = [choice["index"] for choice in choices] == [0, 1, 2, 3]
        self.check("n: four answers", right, told)
        counted = told.get("usage", {}).get("completion_tokens")
        self.check("n: all tokens are counted", counted == 64 or not self.real, told)
        differ = len({choice.get("text") for choice in choices})
        self.check("n: they differ", differ > 1 or not self.real, told)
        again, _ = self.complete(**values)
        same = [c.get("text") for c in choices] == [c.get("text") for c in again.get("choices", ())]
        self.check("n: a seed repeats them", same, (told, again))
        best, _ = self.complete(n=1, best_of=3, temperature=1.0)
        self.check("best_of: one answer", len(best.get("choices") or []) == 1, best)

    def likeliest(self) -> None:
        """`top_logprobs`: five tokens beside each, the chosen one first where it is greedy."""
        told, first = self.chat(logprobs=True, top_logprobs=5, max_tokens=12)
        rows = (first.get("logprobs") or {}).get("content") or []
        self.check("top_logprobs: a row for each token", len(rows) >= 1, told)
        for row in rows:
            values = [top["logprob"] for top in row["top_logprobs"]]
            ordered = values == sorted(values, reverse=True) and len(values) == 5
            chosen = row["top_logprobs"][0]["token"] == row["token"]
            if not (ordered and chosen and row["logprob"] <= 0):
                self.check("top_logprobs: five, in order, the chosen one first", False, row)
                return
        self.check("top_logprobs: five, in order, the chosen one first", True)

    def of_the_prompt(self) -> None:
        """`echo` with `logprobs`: those of the prompt's tokens."""
        told, first = self.complete(echo=True, logprobs=1, max_tokens=4)
        probs = first.get("logprobs") or {}
        values = probs.get("token_logprobs") or []
        count = len(self.prompts[0].ids) + 4
        self.check("prompt logprobs: one for each token", len(values) == count, told)
        right = bool(values) and values[0] is None and all(value <= 0 for value in values[1:])
        self.check("prompt logprobs: none for the first, then below 0", right, values[:6])
        begins = str(first.get("text")).startswith(self.prompts[0].text.strip()[:20])
        begins |= str(first.get("text")).startswith(self.prompts[0].text[:20])
        self.check("echo: the prompt comes first", begins, str(first.get("text"))[:80])

    def bias(self) -> None:
        """`logit_bias`: a token that must come, and one that must not."""
        greedy, first = self.complete(logprobs=0, max_tokens=4)
        ids = self.client.post("tokenize", prompt=" moon", add_special_tokens=False)
        token = (ids.get("tokens") or [0])[-1]
        told, other = self.complete(logit_bias={str(token): 100}, max_tokens=4)
        wanted = other.get("text", "").count("moon") == 4 or not self.real
        self.check("logit_bias 100: that token alone", wanted, told)
        made = self.client.post("tokenize", prompt=first.get("text", ""))
        banned = {str(number): -100 for number in made.get("tokens") or ()}
        told, other = self.complete(logit_bias=banned, max_tokens=4)
        differs = other.get("text") != first.get("text") or not self.real
        self.check("logit_bias -100: not those tokens", "choices" in told and differs,
                   (greedy, told))  # fmt: skip

    def adapters(self) -> None:
        """LoRA: each of two adapters changes the text, the same way every time."""
        models = self.client.models()
        self.check("LoRA: adapters are models", set(NAMES) <= set(models), models)
        said = {name: self._by(name) for name in ("verify", *NAMES)}
        different = len(set(said.values())) == len(said)
        self.check("LoRA: each says something else", different or not self.real, said)
        again = {name: self._by(name) for name in said}
        self.check("LoRA: the same again", said == again, (said, again))
        values = {"prompt_template": "{prompt}", "max_tokens": 16, "lora_name": NAMES[0]}
        told = self.client.predict(self.prompts[0].text, **values)
        self.check("LoRA: /predictions says the same", told["text"] == said[NAMES[0]], (told, said))
        unknown = self.client.openai("completions", prompt="a", model="three", max_tokens=1)
        self.check("LoRA: another name is 404", unknown["status"] == 404, unknown)

    def adapters_at_once(self) -> None:
        """LoRA: 24 requests of three models at the same time, each as alone."""
        names = ("verify", *NAMES)
        alone = {name: self._by(name) for name in names}
        with ThreadPoolExecutor(24) as threads:
            asked = [(name, threads.submit(self._by, name)) for name in names * 8]
        same = sum(future.result() == alone[name] for name, future in asked)
        # In another batch two tokens of nearly the same probability may change places.
        self.check("LoRA: 24 at once, as alone", same >= 20, f"{same} of 24")
        self.phase.put("LoRA at once, as alone", same)

    def tokens(self) -> None:
        """/tokenize and /detokenize undo each other."""
        ids = self.client.post("tokenize", prompt=self.prompts[0].text).get("tokens")
        told = self.client.post("detokenize", tokens=ids)
        self.check("tokens: there and back", told.get("prompt") == self.prompts[0].text, told)

    def responses(self) -> None:
        """/v1/responses: text, and a forced call."""
        told = self.client.openai("responses", input=QUESTION, max_output_tokens=24)
        self.check("responses: a text", "Paris" in json.dumps(told.get("output")), told)

    def _by(self, model: str) -> str:
        _, first = self.complete(model=model)
        return str(first.get("text"))


@dataclass(frozen=True)
class Images:
    """The checks of a model that takes images."""

    client: Client
    phase: Phase

    def all(self) -> None:
        """Run every check."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - the other phases are to be seen, too
            name = f"{type(error).__name__}: {error}"
            self.phase.check("images went through", False, name)

    def _run(self) -> None:
        red, green = image_url((255, 0, 0)), image_url((0, 255, 0))
        asked = ((), (red,), (green,), (red, green))
        said = [self._ask(*urls) for urls in asked]
        right = all(told["status"] == 200 for told in said)
        self.phase.check("images: none, one, another, two", right, said)
        counts = [told.get("usage", {}).get("prompt_tokens", 0) for told in said]
        grows = counts[0] < counts[1] == counts[2] < counts[3]
        self.phase.check("images: their tokens are counted", grows, counts)
        texts = [_text(told) for told in said]
        # Whether made-up weights tell one image from another is not for a check.
        self.phase.put("images: different texts", len(set(texts)))
        again = _text(self._ask(red))
        self.phase.check("images: the same one says the same", again == texts[1], (again, texts))
        broken = self._ask(red[: len(red) * 2 // 3 // 4 * 4])
        code = broken.get("error", {}).get("code")
        self.phase.check("images: a broken one is 400", (broken["status"], code) == (400, "E1005"),
                         broken)  # fmt: skip
        many = self._ask(red, red, red)
        self.phase.check("images: too many are 400", many["status"] == 400, many)
        with ThreadPoolExecutor(16) as threads:
            found = list(threads.map(lambda url: _text(self._ask(url)), [red, green] * 8))
        same = sum(text in texts[1:3] for text in found)
        self.phase.check("images: 16 at once", all(found), found)
        self.phase.put("images at once, as alone", f"{same} of 16")

    def _ask(self, *urls: str) -> dict[str, Any]:
        parts: list[dict[str, Any]] = [{"type": "text", "text": "What is it?"}]
        parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        messages = [{"role": "user", "content": parts}]
        values = {"max_tokens": 48, "ignore_eos": True}
        return self.client.openai("chat/completions", messages=messages, **values)


def _text(told: Mapping[str, Any]) -> str:
    return str((told.get("choices") or [{}])[0].get("message", {}).get("content", ""))


def _fits(call: Mapping[str, Any]) -> bool:
    """Whether a call's arguments are what the tool's schema says."""
    try:
        given = json.loads(call["arguments"])
    except ValueError:
        return False
    named = call["name"] == "get_weather" and set(given) == {"city", "days"}
    return named and given["city"] in ("Paris", "Rome") and type(given["days"]) is int
