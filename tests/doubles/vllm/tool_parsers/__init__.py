"""Double of vllm/tool_parsers: names alone; `vllm.parser` reads their format."""


class ToolParserManager:
    tool_parsers = {}
    lazy_parsers = {
        "brackets": ("vllm.parser", "Brackets"),
        "glm45": ("vllm.parser", "Brackets"),
        "as_json": ("vllm.parser", "Brackets"),
        "mistral": ("vllm.parser", "Brackets"),
        "pythonic": ("vllm.parser", "Brackets"),
        "unguided": ("vllm.parser", "Brackets"),
    }
