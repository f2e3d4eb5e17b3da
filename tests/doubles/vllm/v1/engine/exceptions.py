"""Double of vllm/v1/engine/exceptions.py."""

from vllm.exceptions import VLLMServerError


class EngineGenerateError(VLLMServerError):
    pass


class EngineDeadError(VLLMServerError):
    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above)")
