"""Double of vllm/parser, which parses as vLLM's server does: reasoning first, then calls.

Its format is ``{reasoning}text[name:arguments]``, character by character; an answer is open to
reasoning unless its prompt ends with token 9 or its template was told `thinking` is off. RAISE,
HANG (a pattern that backtracks, as often as errors end it), SLEEP, EAT and KILL in the text of a
delta make the parser do so, STRAY gives arguments of no call, and ODD text that is no UTF-8; a tool
of the name REFUSED is none that its grammar takes.
"""

import json
import os
import re
import signal
import time
from contextlib import suppress
from types import SimpleNamespace

from vllm.sampling_params import StructuredOutputsParams


class ParserManager:
    @classmethod
    def get_parser(
        cls,
        tool_parser_name=None,
        reasoning_parser_name=None,
        enable_auto_tools=False,
        model_name=None,
        is_harmony=False,
        tool_strict_level=None,
        tokenizer=None,
    ):
        names = {"tool": tool_parser_name, "reasons": reasoning_parser_name is not None}
        return type("_Parser", (Parser,), names)


class Parser:
    tool = None
    reasons = False

    def __init__(self, tokenizer, tools=None, *, model_config=None, chat_template_kwargs=None):
        json_calls = self.tool == "as_json"
        self.tool_parser = self.tool and SimpleNamespace(supports_required_and_named=json_calls)
        self._tools = tools
        thinks = (chat_template_kwargs or {}).get("thinking", True)
        self._state = "start" if self.reasons and thinks else "text"
        self._call = -1
        self._tail = ""
        self._kept = []

    def set_prompt_token_ids(self, ids):
        self._prompted = ids

    def adjust_request(self, request):
        if any(tool["function"]["name"] == "REFUSED" for tool in request.tools or ()):
            raise ValueError("REFUSED is no name of a function")
        if request.tools:
            request.skip_special_tokens = False
        strict = any(tool["function"].get("strict") for tool in request.tools or ())
        if request.tools and self.tool == "brackets" and (request.tool_choice != "auto" or strict):
            tag = json.dumps({"type": "structural_tag", "format": {"choice": request.tool_choice}})
            request.structured_outputs = StructuredOutputsParams(structural_tag=tag)
        return request

    def parse_delta(self, delta_text, delta_token_ids, request, prompt_token_ids=None, *, finished):
        if self._state == "start" and prompt_token_ids and prompt_token_ids[-1] == 9:
            self._state = "text"
        self._misbehave(self._tail + delta_text)
        self._tail = delta_text[-4:] if len(delta_text) > 3 else (self._tail + delta_text)[-4:]
        delta = SimpleNamespace(content="", reasoning="", tool_calls=[])
        for character in delta_text:
            self._take(character, delta)
        if "ODD" in delta_text:
            delta.content += "\ud83e"
        return delta if delta.content or delta.reasoning or delta.tool_calls else None

    def parse(self, model_output, request, enable_auto_tools=False, model_output_token_ids=()):
        delta = self.parse_delta(
            model_output, [*model_output_token_ids], request, self._prompted, finished=True
        )
        calls = {}
        for call in delta.tool_calls if delta else ():
            made = calls.setdefault(call.index, SimpleNamespace(name="", arguments=""))
            made.name += call.function.name or ""
            made.arguments += call.function.arguments or ""
        return (delta and delta.reasoning), (delta and delta.content), [*calls.values()]

    def _take(self, character, delta):
        if self._state == "start":
            self._state = "reasoning" if character == "{" else "text"
            if character == "{":
                return
        if self._state == "reasoning":
            if character == "}":
                self._state = "text"
            else:
                delta.reasoning += character
        elif self._state == "text":
            if character == "[" and self.tool and self._tools:
                self._state, self._name = "name", ""
            else:
                delta.content += character
        elif self._state == "name":
            if character == ":":
                self._call += 1
                self._state, self._depth = "arguments", 0
                self._tell(delta, self._name, None)
            else:
                self._name += character
        elif character == "]":
            self._state = "text"
        else:
            self._tell(delta, None, character)

    def _tell(self, delta, name, arguments):
        function = SimpleNamespace(name=name, arguments=arguments)
        delta.tool_calls.append(SimpleNamespace(index=self._call, id=None, function=function))

    def _misbehave(self, text):
        if "STRAY" in text:
            self._call = 99
        if "RAISE" in text:
            raise IndexError("list index out of range")
        while "HANG" in text:
            with suppress(Exception):
                re.match("(a+)+$", "a" * 99 + "b")
        if "SLEEP" in text:
            time.sleep(60)
        while "EAT" in text:
            self._kept.append(bytes(16 << 20))
        if "KILL" in text:
            os.kill(os.getpid(), signal.SIGSEGV)
