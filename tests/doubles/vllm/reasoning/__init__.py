"""Double of vllm/reasoning: names alone; `vllm.parser` reads their format."""


class ReasoningParserManager:
    reasoning_parsers = {}
    lazy_parsers = {"braces": ("vllm.parser", "Braces"), "glm45": ("vllm.parser", "Braces")}
