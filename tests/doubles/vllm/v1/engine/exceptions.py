"""Double of vllm/v1/engine/exceptions.py."""


class EngineGenerateError(Exception):
    pass


class EngineDeadError(Exception):
    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above)")
