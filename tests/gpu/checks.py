"""Checks of the vLLM family on a real GPU, through every endpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from client import PATIENCE_S, Client
from endpoints import Endpoint, Predictions, TritonIds, TritonText
from load import LoadResult, measure
from prompts import Prompt
from results import Phase
from tokenizers import Tokenizer

from cog_triton.engines.request import EngineRequest
from cog_triton.text.sampling import SamplingParams

QUESTION = "What is the capital of France?"
_RESTART_S = 300
_LONG = 3500  # tokens of an answer that nobody waits for
_METRICS = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
)


@dataclass(frozen=True)
class Checks:
    """The checks of one served model; `sensible` if its weights are real."""

    name: str
    client: Client
    phase: Phase
    model: Path
    prompts: Sequence[Prompt]
    sensible: bool

    def all(self) -> None:
        """Run every check but the restart; a part that fails does not end the others."""
        parts: list[Callable[[], None]] = [self.texts, self.streams, self.ends, self.seeds]
        parts += [self.errors, self.triton, self.structured, self.cancel, self.metrics, self.many]
        for part in parts:
            self._attempt(part)

    def check(self, name: str, holds: bool, seen: object = "") -> None:
        self.phase.check(f"{self.name}: {name}", holds, seen)

    def texts(self) -> None:
        """Every endpoint gives the same answer, of the right length, and sensible."""
        told = self.client.predict(QUESTION, max_tokens=32)
        if self.sensible:
            self.check("/predictions knows a capital", "Paris" in told["text"], told)
            messages = [{"role": "user", "content": QUESTION}]
            chat = self.client.openai("chat/completions", messages=messages, max_tokens=32)
            said = chat.get("choices", [{}])[0].get("message", {}).get("content")
            self.check("/v1/chat/completions says the same", said == told["text"], chat)
        prompt = self.prompts[0]
        ids = self.client.ids(self._request(prompt, 32))
        self.check("Triton brings all tokens", len(ids) == 32, ids)
        text = self._decoded(ids)
        cog = self.client.predict(prompt.text, prompt_template="{prompt}", max_tokens=32)
        self.check("/predictions: the same tokens", cog["text"] == text, (cog, text))
        counted = cog.get("metrics", {})
        right = counted.get("input_token_count"), counted.get("output_token_count")
        self.check("tokens are counted", right == (len(prompt.ids), 32), counted)
        plain = self.client.openai("completions", prompt=prompt.text, max_tokens=32)
        said = plain.get("choices", [{}])[0].get("text")
        self.check("/v1/completions: the same tokens", said == text, (plain, text))
        sampling = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
        answer = self.client.text(text_input=prompt.text, parameters={"stream": False, **sampling})
        self.check("vllm_model: the same text", self._same(answer, prompt, text), (answer, text))

    def streams(self) -> None:
        """Events arrive while the answer is generated."""
        prompt = self.prompts[1]
        values = {"prompt_template": "{prompt}", "max_tokens": 64}
        began = time.monotonic()
        with self.client.stream(prompt.text, **values) as events:
            times = [time.monotonic() - began for event, _ in events if event == "output"]
        spread = times[-1] - times[0] if times else 0
        self.check("a stream has many events", len(times) >= 16, times)
        self.check("over most of its time", spread > times[-1] / 2 if times else False, times)
        whole = self.client.ids(self._request(prompt, 64, streaming=False))
        self.check(
            "without streaming: the same", whole == self.client.ids(self._request(prompt, 64))
        )

    def ends(self) -> None:
        """Stop strings, stop words, end ids and bad words."""
        prompt = self.prompts[2]
        ids = self.client.ids(self._request(prompt, 48))
        text = self._decoded(ids)
        stop = re.findall(r"\w{3,}", text[len(text) // 2 :])[0]
        values = {"prompt_template": "{prompt}", "max_tokens": 48, "stop_sequences": stop}
        cut = self.client.predict(prompt.text, **values)
        expected = text[: text.index(stop)]
        self.check("a stop string ends the text", cut["text"] == expected, (cut, stop, text))
        word = tuple(ids[10:12])
        place = next(n for n in range(len(ids)) if tuple(ids[n : n + 2]) == word)
        words = self.client.ids(self._request(prompt, 48, stop_words=(word,)))
        self.check("stop words are cut", words == ids[:place], (words, ids))
        ended = self.client.ids(self._request(prompt, 48, end_id=ids[5]))
        self.check("end_id ends and is cut", ended == ids[: ids.index(ids[5])], (ended, ids))
        other = self.client.ids(self._request(prompt, 48, bad_words=((ids[0],),)))
        self.check("bad words are not generated", ids[0] not in other, other)
        events = self.client.events(self._request(prompt, 4, return_log_probs=True))
        found = [event.get("cum_log_probs") for event in events]
        negative = all(value is not None and value < 0 for value in found)
        self.check("log probabilities", bool(found) and negative, events)

    def seeds(self) -> None:
        """A seed repeats itself alone and among others, and another one differs."""
        values = {"prompt_template": "{prompt}", "max_tokens": 48, "temperature": 1.0}
        text = self.prompts[3].text
        one, two, other = (
            self.client.predict(text, seed=seed, **values)["text"] for seed in (11, 11, 12)
        )
        self.check("a seed repeats itself", one == two and bool(one), (one, two))
        self.check("another seed differs", one != other, (one, other))
        unseeded = {self.client.predict(text, **values)["text"] for _ in range(2)}
        self.check("without a seed texts differ", len(unseeded) == 2, unseeded)

    def errors(self) -> None:
        """Every endpoint refuses what cannot be served, with a code."""
        long = " and" * 9000
        told = self.client.predict(long, prompt_template="{prompt}")
        self.check("/predictions: E1002", "E1002" in str(told.get("error")), told)
        told = self.client.openai("completions", prompt=long)
        code = told.get("error", {}).get("code")
        self.check("/v1: E1002 and 400", (told["status"], code) == (400, "E1002"), told)
        told = self.client.openai("completions", prompt="a", temperature=3)
        self.check("/v1: E1005", told.get("error", {}).get("code") == "E1005", told)
        told = self.client.text(text_input="a", parameters={"temperature": 9.5})
        self.check("vllm_model: what vLLM refuses", "E1005" in str(told.get("error")), told)
        told = self.client.text(text_input="a", parameters={"temprature": 1})
        self.check("vllm_model: unknown names", "temperature" in str(told.get("error")), told)
        hot = SamplingParams(max_tokens=4, temperature=9.0, top_p=0.5)
        events = self.client.events(EngineRequest(input_ids=[5, 6], sampling=hot))
        self.check("tensorrt_llm: what vLLM refuses", "E1005" in str(events), events)

    def triton(self) -> None:
        """Further outputs of vllm_backend."""
        asked = {"return_finish_reason": True, "return_num_output_tokens": True}
        asked |= {"return_logprobs": True, "return_cumulative_logprob": True}
        sampling = {"max_tokens": 5, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        told = self.client.text(
            text_input=self.prompts[4].text, exclude_input_in_output=True,
            sampling_parameters=json.dumps(sampling), **asked,
        )  # fmt: skip
        counts = told.get("num_output_tokens"), told.get("finish_reason")
        self.check("vllm_model: counts and reason", counts == (5, "length"), told)
        likely = json.loads(told.get("logprobs") or "null")
        self.check("vllm_model: logprobs", likely is not None and len(likely) == 5, told)

    def structured(self) -> None:
        """Structured output: JSON schemas and choices."""
        choice = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 8}
        told = self.client.text(
            text_input="Is it so? ", exclude_input_in_output=True,
            sampling_parameters=json.dumps(choice),
        )  # fmt: skip
        self.check("a choice", told.get("text_output") in ("yes", "no"), told)
        if not self.sensible:
            return
        schema = {
            "type": "object",
            "properties": {"capital": {"type": "string"}},
            "required": ["capital"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        messages = [{"role": "user", "content": f"{QUESTION} Answer in JSON."}]
        told = self.client.openai(
            "chat/completions", messages=messages, response_format=form, max_tokens=64
        )
        said = told.get("choices", [{}])[0].get("message", {}).get("content") or ""
        try:
            fits = set(json.loads(said)) == {"capital"}
        except ValueError:
            fits = False
        self.check("a JSON Schema", fits, told)

    def cancel(self) -> None:
        """A client that leaves frees the engine: our own metrics say so."""
        self._settled()
        values = {"prompt_template": "{prompt}", "max_tokens": _LONG}
        most: dict[str, float] = {}
        with ExitStack() as stack:
            streams = [  # one that is forgotten is closed
                stack.enter_context(self.client.stream(prompt.text, **values))
                for prompt in self.prompts[5:13]
            ]
            for events in streams:
                next(data for event, data in events if event == "output")
            for _ in range(4):
                time.sleep(0.15)
                now = self.client.metrics()
                most = {name: max(value, most.get(name, 0)) for name, value in now.items()}
        running, usage = "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
        self.check("running requests are shown", most[running] == 8, most)
        self.check("so are their KV blocks", most[usage] > 0, most)
        time.sleep(1)
        left = self._settled()
        self.check("none of the cancelled requests runs", left[running] == 0, left)
        self.check("their KV blocks are free", left[usage] < most[usage] / 8, (left, most))

    def metrics(self) -> None:
        """The names of vLLM that platforms read."""
        found = self.client.metrics()
        missing = [name for name in _METRICS if f"vllm:{name}" not in found]
        self.check("metrics under vllm: names", not missing, missing)

    def many(self) -> None:
        """256 concurrent requests on every endpoint, each answered with all of its tokens."""
        server = self.client.server
        endpoints: list[Endpoint] = [Predictions("cog", server.cog), Endpoint("/v1", server.openai)]
        endpoints += [TritonIds("triton", server.triton), TritonText("vllm_model", server.triton)]
        for endpoint in endpoints:
            self.load(endpoint, f"256 at once: {endpoint.name}")

    def load(self, endpoint: Endpoint, name: str) -> None:
        """512 requests, 256 at once."""
        self.judge(partial(measure, endpoint, self.prompts, 512, 256, 64), name)

    def judge(self, load: Callable[[], LoadResult], name: str) -> None:
        """Check that `load` brings all answers of 512 requests; an exception is a failure."""
        try:
            measured = load()
        except Exception as error:  # noqa: BLE001 - the other loads are to be seen, too
            self.check(name, False, f"{type(error).__name__}: {error}")
            return
        print(f"    {self.name:10} {measured}", flush=True)
        right = not measured.errors and measured.requests == 512
        self.check(name, right, measured.errors)

    def restart(self, role: str) -> None:
        """kill -9 of `role`: clients that wait get E2105, and the server recovers."""
        self._attempt(lambda: self._restart(role))

    def _restart(self, role: str) -> None:
        prompt, server = self.prompts[0], self.client.server
        greedy = self.client.predict(prompt.text, prompt_template="{prompt}", max_tokens=32)
        (victim,) = (pid for pid, found in server.processes().items() if found == role)
        values = {"prompt_template": "{prompt}", "max_tokens": _LONG}
        with self.client.stream(self.prompts[1].text, **values) as events:
            next(data for event, data in events if event == "output")
            os.kill(victim, signal.SIGKILL)
            began = time.monotonic()
            rest = [data for event, data in events if event == "completed"]
        told = time.monotonic() - began
        last = rest[-1] if rest else {}
        self.check(f"kill -9 of {role}: E2105", "E2105" in str(last.get("error")), rest)
        self.check("it is told within 5 s", told < 5, told)
        again: dict[str, Any] = {}
        while time.monotonic() - began < _RESTART_S:
            if server.healthy():
                again = self.client.predict(prompt.text, prompt_template="{prompt}", max_tokens=32)
                if again.get("status") == "succeeded":
                    break
            time.sleep(0.5)
        self.phase.put(f"{self.name}: restart_s", round(time.monotonic() - began, 1))
        self.check("then it answers as before", again.get("text") == greedy["text"], again)

    def _attempt(self, part: Callable[[], None]) -> None:
        name = getattr(part, "__name__", "part").strip("_<>")
        try:
            part()
        except Exception as error:  # noqa: BLE001 - the other parts are to be seen, too
            self.check(f"{name} went through", False, f"{type(error).__name__}: {error}")

    def _request(self, prompt: Prompt, max_tokens: int, **values: Any) -> EngineRequest:
        """A greedy request that no end of sequence cuts short."""
        sampling = SamplingParams(max_tokens=max_tokens, top_k=1)
        return EngineRequest(**{"end_id": -1, **values}, input_ids=prompt.ids, sampling=sampling)

    def _decoded(self, ids: Sequence[int]) -> str:
        tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        return str(tokenizer.decode(list(ids)))

    @staticmethod
    def _same(told: dict[str, Any], prompt: Prompt, text: str) -> bool:
        found = str(told.get("text_output"))
        return found.removeprefix(prompt.text) == text

    def _settled(self) -> dict[str, float]:
        """Metrics after one more token, once they no longer change."""
        self.client.ids(self._request(self.prompts[0], 1))
        deadline, last, now = time.monotonic() + PATIENCE_S, {}, self.client.metrics()
        while now != last and time.monotonic() < deadline:
            time.sleep(0.7)
            last, now = now, self.client.metrics()
        return now


def load_all_at_once(served: Sequence[Checks]) -> None:
    """Check 256 concurrent requests on every model at the same time."""
    with ThreadPoolExecutor() as threads:
        loads = []
        for checks in served:
            endpoint = Predictions("cog", checks.client.server.cog)
            loads.append(threads.submit(measure, endpoint, checks.prompts, 512, 256, 64))
    for checks, load in zip(served, loads, strict=True):
        checks.judge(load.result, "256 at once, as for the others")
