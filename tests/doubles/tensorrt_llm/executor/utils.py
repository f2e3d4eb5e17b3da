"""Double of tensorrt_llm/executor/utils.py."""


class RequestError(RuntimeError):
    """What the engine refuses of one request."""
