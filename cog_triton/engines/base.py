"""What the rest of the project knows of an engine.

An engine has two sides. `TokenEngine` serves Triton's model process: token ids in, token
ids out. `EngineFamily` lives in the serving process: it recognises an engine
directory, tells its limits, and renders the Triton model named ``tensorrt_llm`` that runs
it. Between the two stands one wire format, `cog_triton.engines.tensor_contract`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from typing_extensions import Self

from cog_triton import errors
from cog_triton.engines import tensor_contract
from cog_triton.engines.request import EngineRequest, TokenEvent


@dataclass(frozen=True, slots=True)
class EngineStats:
    """`active` counts unfinished requests, `waiting` those of them that found no slot yet."""

    active: int
    waiting: int
    max_batch_size: int


class StepEngine(Protocol):
    """An in-flight batching engine that computes only when told to; not thread-safe."""

    max_batch_size: int

    @property
    def live(self) -> int:
        """How many requests are unfinished."""
        ...

    def submit(self, handle: int, request: EngineRequest) -> None:
        """Add a request under a handle of the caller's; raises why it cannot be served."""
        ...

    def cancel(self, handle: int) -> None:
        """Stop a request; its last event follows from `step`. Unknown handles are no error."""
        ...

    def step(self) -> list[tuple[int, TokenEvent]]:
        """Compute one step for all live requests, and return what it brought to each."""
        ...


class TokenEngine(Protocol):
    """An engine as Triton's model process sees it: it computes on its own, and calls back."""

    def submit(
        self, handle: int, request: EngineRequest, emit: Callable[[TokenEvent], None]
    ) -> None:
        """Queue a request under a new handle; never blocks. `emit` runs on another thread.

        A request that cannot be served ends with an ``error`` event.
        """
        ...

    def cancel(self, handle: int) -> None:
        """Stop a request; it ends with a ``cancelled`` event. Unknown handles are no error."""
        ...

    def stats(self) -> EngineStats:
        """What the engine holds now."""
        ...

    def close(self) -> None:
        """Stop the engine and everything it runs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Lengths in tokens; `max_seq_len` bounds prompt and output together."""

    max_input_len: int
    max_seq_len: int
    max_batch_size: int
    end_id: int | None
    pad_id: int | None


class EngineFamily(ABC):
    """One kind of engine, opened on one engine directory."""

    name: ClassVar[str]
    backend: ClassVar[str] = "python"
    options: ClassVar[Mapping[str, type]] = {}
    own_models: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, directory: Path, limits: EngineLimits, tokenizer_dir: Path | None = None
    ) -> None:
        self.directory = directory
        self.limits = limits
        self.tokenizer_dir = tokenizer_dir or directory

    @classmethod
    @abstractmethod
    def recognises(cls, directory: Path) -> bool:
        """Whether `directory` holds an engine of this family."""

    @classmethod
    @abstractmethod
    def open(cls, directory: Path) -> Self:
        """Read the engine's limits; raises E1306 naming the file that is missing or broken."""

    @abstractmethod
    def render(self, config: Any, arguments: Mapping[str, Any]) -> str | None:
        """Fill `config` (tritonclient's ModelConfig of ``tensorrt_llm``) for this engine.

        `arguments` come from the serve config. Returns the source of the Python backend's
        ``model.py``, or None for a compiled backend; raises E1202 for unknown arguments.
        `limits` are final after it: arguments may move them.
        """

    def render_own(self, config: Any, arguments: Mapping[str, Any]) -> None:  # noqa: B027
        """Fill `config` of one of `own_models`, which only this family adds to the repository.

        Their code is in ``triton_model_repo``; by default there are none. Raises E1202 for
        unknown arguments.
        """

    def adapt(self, config: Any) -> None:  # noqa: B027
        """Fit the config of a text model to the engine, after `render`; by default it fits."""

    def values(self, request: EngineRequest) -> dict[str, Any]:
        """The request as JSON values for Triton's generate endpoints."""
        return tensor_contract.to_values(request)

    @property
    def tells_end(self) -> bool:
        """Whether the last response has the output `contract.FINISH_REASON`."""
        return self.backend == "python"

    @property
    def guides(self) -> bool:
        """Whether requests may have a `guide`; asked after `render`."""
        return False

    @property
    def world_size(self) -> int:
        """Processes the engine runs in, of one GPU each; 0 for one that needs no GPU."""
        return 0

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the libraries that the engine was built with, as far as it tells itself."""
        return {}

    def start_error(self, log: str) -> errors.CogTritonError | None:
        """What Triton's log says of the engine after a start that failed; None is no news."""
        return None

    def error(self, text: str) -> errors.CogTritonError:
        """The coded error behind an error text of the engine or of Triton."""
        return errors.from_text(text) or errors.TritonUnknownError(text)
