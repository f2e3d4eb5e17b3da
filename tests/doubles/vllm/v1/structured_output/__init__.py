"""Double of vllm/v1/structured_output: grammars are compiled in threads, and fed what is made.

A token is a byte. With VLLM_DOUBLE_SAMPLES, choices, regexes and objects of strings are obeyed.
With a reasoning parser, reasoning ends with the token ``~``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from vllm.v1.request import Request
from vllm.v1.structured_output.byte_grammar import Grammar, expression_of

REASONING_END = ord("~")


class ConstraintBounds(NamedTuple):
    grammar_start: int
    constraint_start: int


class StructuredOutputManager:
    def __init__(self, vllm_config: Any) -> None:
        config = vllm_config.structured_outputs_config
        self._reasons = bool(config.reasoning_parser)
        self.enable_in_reasoning = config.enable_in_reasoning
        self.executor = ThreadPoolExecutor(1)

    def grammar_init(self, request: Request) -> None:
        if request.structured_output_request is not None and "VLLM_DOUBLE_SAMPLES" in os.environ:
            made = self.executor.submit(self._create_grammar, request)
            request.structured_output_request.grammar = made

    def _create_grammar(self, request: Request) -> Grammar:
        return Grammar(expression_of(request.structured_output_request.params))

    def _bounds(
        self, request: Request, spec_tokens: Sequence[int], spec_tokens_committed: bool = False
    ) -> ConstraintBounds:
        """As vLLM has it for reasoning parsers that know an end token."""
        structured = request.structured_output_request
        free = self.enable_in_reasoning or structured.reasoning_ended or not self._reasons
        if structured.reasoning_ended is None and not free:
            free = REASONING_END in request.prompt_token_ids
            structured.reasoning_ended = None if free else False
        if free:
            return ConstraintBounds(0, 0)
        if REASONING_END not in spec_tokens:
            return ConstraintBounds(len(spec_tokens) + 1, len(spec_tokens) + 1)
        assert not spec_tokens_committed or REASONING_END in request.all_token_ids
        start = list(spec_tokens).index(REASONING_END) + 1
        return ConstraintBounds(start, start)

    _get_constraint_bounds = _bounds

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        structured = request.structured_output_request
        if structured is None or structured.grammar is None:
            return True
        start, _ = self._bounds(request, new_token_ids, spec_tokens_committed=True)
        if start > len(new_token_ids):
            return True
        structured.reasoning_ended = True
        return structured.grammar.accept_tokens(request.request_id, new_token_ids[start:])

    def allowed(self, request: Request) -> set[int] | None:
        """In vLLM a bit mask."""
        structured = request.structured_output_request
        if structured is None or structured.grammar is None:
            return None
        if self._bounds(request, ()).constraint_start:
            return None
        return structured.grammar.allowed()

    def is_ready(self, request: Request) -> bool:
        """In vLLM the scheduler's; raises what the compilation has raised."""
        structured = request.structured_output_request
        if structured is not None and isinstance(structured.grammar, Future):
            if not structured.grammar.done():
                return False
            structured.grammar = structured.grammar.result()
        return True
