"""What vLLM's own serving layer makes of answers: run in vLLM's Python, alone.

Reads a JSON line a parser, and writes one: for each answer and size of chunks what the stream
told, joined, and what the whole answer is, by vLLM's detokenizer, parser and message assembly.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any


def _joined(deltas: list[Any], finish: str | None) -> dict[str, Any]:
    content, reasoning = "", ""
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        content += delta.content or ""
        reasoning += delta.reasoning or ""
        for call in delta.tool_calls or ():
            made = calls.setdefault(call.index, ["", ""])
            made[0] += (call.function and call.function.name) or ""
            made[1] += (call.function and call.function.arguments) or ""
    return {"content": content, "reasoning": reasoning, "calls": [*calls.values()], "end": finish}


class Reference:
    """VLLM's parsers of a job, called as its server calls them."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm.parser import ParserManager
        from vllm.tokenizers import get_tokenizer

        self.job = job
        self.tokenizer = get_tokenizer(job["tokenizer"])
        self.parser_cls = ParserManager.get_parser(
            job["tool"],
            job["reasoning"] or None,
            enable_auto_tools=True,
            is_harmony=job["tool"] == "openai",
            tokenizer=self.tokenizer,
        )

    def request(self, prompt: list[int]) -> tuple[Any, Any]:
        """A request as its parser has adjusted it, and the parser that reads the answer."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(
            model="m", messages=[], tools=self.job["tools"], tool_choice="auto"
        )
        chat = request.build_chat_params(None, "auto", None).with_defaults({})
        made = [
            self.parser_cls(
                self.tokenizer, request.tools, chat_template_kwargs=chat.chat_template_kwargs
            )
            for _ in range(2)
        ]
        made[0].set_prompt_token_ids(prompt)
        return made[0].adjust_request(request=request), made[1]

    def stream(self, prompt: list[int], ids: list[int], size: int) -> dict[str, Any]:
        """What a stream of an answer tells, whose tokens come in chunks."""
        from vllm.entrypoints.openai.chat_completion.stream_processor import ChatStreamProcessor

        request, parser = self.request(prompt)
        processor = ChatStreamProcessor(
            request, parser, enable_auto_tools=True, parser_cls=self.parser_cls
        )
        decoder, deltas, finish = self.decoder(request, prompt), [], None
        everything = [*ids, self.job["eos"]]
        for start in range(0, len(everything), size):
            chunk = everything[start : start + size]
            last = start + size >= len(everything)
            decoder.update(chunk, last)
            text = decoder.get_next_output_text(last, delta=True)
            step = processor.step(text, chunk, "stop" if last else None, None if start else prompt)
            finish = step.finish_reason
            if step.delta is not None:
                deltas.append(step.delta)
        return _joined(deltas, finish)

    def whole(self, prompt: list[int], ids: list[int]) -> dict[str, Any]:
        """The whole answer, as a request without a stream gets it."""
        from vllm.entrypoints.openai.chat_completion.message_assembly import (
            assemble_chat_message_fields,
        )

        request, parser = self.request(prompt)
        decoder = self.decoder(request, prompt)
        everything = [*ids, self.job["eos"]]
        decoder.update(everything, True)
        text = decoder.get_next_output_text(True, delta=True)
        parser.set_prompt_token_ids(prompt)
        found = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=everything
        )
        made = assemble_chat_message_fields(
            request, *found, enable_auto_tools=True, parser_cls=self.parser_cls
        )
        calls = [[call.function.name, call.function.arguments] for call in made.tool_calls]
        return {
            "content": made.content or "",
            "reasoning": made.reasoning or "",
            "calls": calls,
            "end": "tool_calls" if calls else "stop",
        }

    def decoder(self, request: Any, prompt: list[int]) -> Any:
        """The detokenizer of vLLM's engine."""
        from types import SimpleNamespace

        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        sampling = SamplingParams(
            skip_special_tokens=request.skip_special_tokens is not False,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
        )
        made = SimpleNamespace(sampling_params=sampling, request_id="r", prompt_token_ids=prompt)
        return IncrementalDetokenizer.from_new_request(self.tokenizer, made)


def main() -> None:
    """Answer the jobs on stdin."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = _answers(Reference(job))
        except Exception as error:  # noqa: BLE001 - told in the report
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        output.write(json.dumps(answer) + "\n")
        output.flush()


def _answers(reference: Reference) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, ids in reference.job["answers"].items():
        prompt = reference.job["prompts"][case]
        found[case] = {
            size: _tried(partial(reference.stream, prompt, ids, size))
            if size
            else _tried(partial(reference.whole, prompt, ids))
            for size in reference.job["sizes"]
        }
    return found


def _tried(made: Any) -> Any:
    try:
        return made()
    except Exception as error:  # noqa: BLE001 - told in the report
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


if __name__ == "__main__":
    main()
