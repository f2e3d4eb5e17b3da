"""Engine interface: all that the rest of the project knows of an engine.

An engine has two sides. `ServedEngine` is in the engine's process: token ids in, token ids out.
`EngineFamily` lives in the serving process: it detects an engine directory, reads its limits, and
renders the Triton model named ``tensorrt_llm`` that runs it. The wire format between the two is
`cog_triton.engines.tensor_contract`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from cog_triton import errors
from cog_triton.artifact.lora_adapter import LoRALimits
from cog_triton.engines import tensor_contract
from cog_triton.engines.adapter_registry import REGISTRY, AdapterRegistry
from cog_triton.engines.kv_cache_stats import KVCacheStats
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.errors import InvalidArgument
from cog_triton.text import generation_config
from cog_triton.text.guide import Guide, GuideKind

if TYPE_CHECKING:
    from cog_triton.settings import Settings
    from cog_triton.sizing.fit import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Abilities of an engine; by default it generates text, and has none of the others.

    `generation` is whether it answers with text, `embeddings` whether with embeddings.
    `guides` are the kinds of guided decoding; `check_guide` raises E1005, after the name of its
    field, for one that the engine may not get. `top_log_probs` is the number of likeliest tokens
    told beside each token, `prompt_log_probs` whether those of the prompt's tokens are, `sampling`
    are those of `ABILITIES` that it heeds, `structural_tags` is whether calls amid text are guided
    from their opening on, `native_tags` whether tags that vLLM has made for its parser guide it.
    `images` is how many a prompt may have; `image_placeholder` stands for
    one in its text (``{}`` is the image's number), None if only the model's chat template knows
    what does. `priorities` is whether its scheduler heeds those of requests.
    """

    generation: bool = True
    embeddings: bool = False
    guides: Set[GuideKind] = frozenset()
    check_guide: Callable[[Guide, str], None] = Guide.check
    top_log_probs: int = 0
    prompt_log_probs: bool = False
    sampling: Set[str] = frozenset()
    structural_tags: bool = False
    native_tags: bool = False
    images: int = 0
    image_placeholder: str | None = None
    priorities: bool = False

    def require_generation(self) -> None:
        """Raise E1005 if the model makes embeddings alone."""
        if not self.generation:
            raise InvalidArgument(
                "this model makes embeddings, and generates no text; POST /v1/embeddings"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRules:
    """Resumption rules of an engine family; by default what counts output alone is not carried.

    The front end resumes a generation from its prompt and the tokens made so far.

    An engine that `imports` takes these as output, `EngineRequest.made`: always, or once it has
    answered such a request when it started (``asked``). Others take them for a prompt: what counts
    output alone begins anew, unless it is carried otherwise.

    With `replays` the same request makes the same tokens, alone and in a batch: where seed, guide
    or penalties cannot go on otherwise, all are made again, compared, and told from there on.

    `frequency_penalty` and `presence_penalty` are ``sequence`` where the engine counts prompt and
    output alike, ``logit_bias`` where a bias is the same, None where it cannot be carried.
    `max_input_len` says whether prompt and tokens made must fit the engine's max_input_len.
    """

    imports: Literal["never", "asked", "always"] = "never"
    replays: bool = False
    frequency_penalty: Literal["sequence", "logit_bias"] | None = None
    presence_penalty: Literal["sequence"] | None = None
    max_input_len: bool = False


ENGINE = "engine"
"""Parameter of a rendered engine model: the class of the engine's process, ``module:class``."""
COALESCE = "coalesce"
"""Another: whether events of a request that are late leave as one response."""
REQUEST_DECODER = "request_decoder"
"""Another, also of text models: the function that makes requests of tensors, ``module:function``;
none for an engine that computes inside tritonserver."""
_NOT_OPTIONS = frozenset({COALESCE, "engine_dir", ENGINE, REGISTRY, REQUEST_DECODER})
_MODEL_PY = '''"""Written by cog_triton when the model repository was rendered."""

from cog_triton.backend.token_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
_TRITON_ENDS = re.compile(
    r"Stub process .{0,200} is not healthy|stopped accepting new inference requests"
    r"|Request for unknown model"
)
"""What Triton says of a model whose stub has died, or while it stops."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Request counts: `active` are unfinished, `waiting` those of them without a slot.

    `kv_cache` is None until the engine has reported it. `step_requests` are those of front ends,
    which are not among the others.
    """

    active: int
    waiting: int
    max_batch_size: int
    kv_cache: KVCacheStats | None = None
    step_requests: int = 0


class ServedEngine(Protocol):
    """What every engine does for its `EngineServer`, in the thread of that."""

    max_batch_size: int

    def submit(self, number: int, request: Any, /) -> None:
        """Add a request under a new number; raises a coded error if it cannot be served."""

    def cancel(self, number: int, /) -> None:
        """Stop a request; its last event follows. Unknown numbers are no error."""

    def kv_cache(self) -> KVCacheStats | None:
        """Statistics of the KV cache now; None if there are none."""


class StepEngine(ServedEngine, Protocol):
    """In-flight batching engine that computes only when `step` is called."""

    waits_for_readers: bool
    """Whether to make no step while a peer has not read the last ones."""

    def wait_s(self) -> float | None:
        """Seconds until the next step is due; None while only a request can bring one."""

    def step(self) -> list[tuple[int, TokenEvent]]:
        """Compute one step for all live requests; returns (number, event) pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Engine limits: lengths in tokens; `max_seq_len` bounds prompt and output together.

    With `min_output` 0, a prompt may fill all of it: nothing is generated.
    """

    max_input_len: int
    max_seq_len: int
    max_batch_size: int
    end_id: int | None
    pad_id: int | None
    min_output: int = 1


class EngineFamily(ABC):
    """Engine family: one kind of engine, opened on one engine directory."""

    name: ClassVar[str]
    backend: ClassVar[str] = "python"
    """Of the engine's model. With Triton's Python backend, the last response has the output
    `tensor_contract.FINISH_REASON`, and steps come through the Triton model ``engine_steps``."""
    engine_class: ClassVar[str] = ""
    """Class of the engine process, ``module:class``, of a family on Triton's Python backend."""
    extra_models: ClassVar[tuple[str, ...]] = ()
    request_decoder: ClassVar[str] = "cog_triton.engines.tensor_contract:decode_request"
    """Function that reads a request's input tensors in Triton's stubs."""
    resume_rules: ClassVar[ResumeRules] = ResumeRules()
    replicable: ClassVar[bool] = False
    """Whether several engines of it can serve behind one front end."""
    sealable: ClassVar[bool] = False
    """Whether a seal may have compiled code for it."""
    parses: ClassVar[bool] = False
    """Whether its library has parsers of tool calls and reasoning, for formats unknown here."""
    secrets: ClassVar[frozenset[str]] = frozenset()
    """Environment variables with secrets that the engine's process needs; others are removed."""

    def __init__(
        self, directory: Path, limits: EngineLimits, tokenizer_dir: Path | None = None
    ) -> None:
        self.directory = directory
        self.limits = limits
        self.tokenizer_dir = tokenizer_dir or directory
        self.registry: AdapterRegistry | None = None
        """Where adapters are found by name, set before `render`; None without LoRA."""

    @classmethod
    @abstractmethod
    def matches(cls, directory: Path) -> bool:
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

    @property
    def model_dir(self) -> Path:
        """The directory of the model's own small files."""
        return self.tokenizer_dir

    def generation_config(self) -> Mapping[str, Any]:
        """The model's generation_config.json, empty if it has none."""
        return generation_config.load(self.model_dir)

    def render_python(self, config: Any, max_batch_size: int, options: Mapping[str, Any]) -> str:
        """Fill `config` for `engine_class` and its `options`; returns its model.py."""
        config.backend = "python"
        config.max_batch_size = max_batch_size
        config.ClearField("dynamic_batching")  # the engine batches in flight by itself
        config.parameters.clear()
        own = {"engine_dir": self.directory.resolve(), ENGINE: self.engine_class}
        own[REQUEST_DECODER] = self.request_decoder
        for name, value in {COALESCE: True, **options, **own}.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            config.parameters[name].string_value = text
        return _MODEL_PY

    def render_extra_model(self, config: Any) -> None:  # noqa: B027
        """Fill `config` of one of `extra_models`, Triton models that only this family has.

        Their code is in ``triton_model_repo``; by default there are none.
        """

    def adapt_text_model(self, config: Any) -> None:  # noqa: B027
        """Adapt the config of a text model to the engine, after `render`; a no-op by default."""

    def encode_request(self, request: EngineRequest) -> dict[str, Any]:
        """Encode a request as values of the inputs of the Triton model ``tensorrt_llm``."""
        return tensor_contract.encode_request(request)

    def engine_request(self, request: EngineRequest, inputs: Mapping[str, Any]) -> EngineRequest:
        """The request of the engine's process; `inputs` are those that only this engine has.

        Raises E1005. What `abilities` lack is refused before.
        """
        if inputs:
            raise InvalidArgument(f"{next(iter(inputs))}: this engine does not support it")
        return request

    @property
    def abilities(self) -> Abilities:
        """What requests may ask for beyond text; known after `render`."""
        return Abilities()

    @property
    def adapters(self) -> Mapping[str, str]:
        """LoRA adapters that the engine directory names, as the serve config does."""
        return {}

    def lora_limits(self) -> LoRALimits:
        """What LoRA adapters the engine takes; raises E1305 saying why it takes none."""
        raise errors.EngineIncompatible(
            f"{self.directory}: a {self.name} engine takes no LoRA adapters"
        )

    @property
    def world_size(self) -> int:
        """Number of ranks: processes of one GPU each; 0 for an engine that needs no GPU."""
        return 0

    @property
    def gpus(self) -> int:
        """GPUs that an engine process of its own computes on; 0 for one that needs none."""
        return 0

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the libraries that the engine was built with, as far as it records them."""
        return {}

    def options(self, settings: Settings) -> Mapping[str, object]:
        """Arguments of its engine model by the settings, which override those of others."""
        return {}

    def check_environment(self, settings: Settings) -> None:
        """Raise E1005 or E1305 for settings, or packages of this machine, that it cannot have."""
        count = settings.engine_replicas
        if count > 1 and not self.replicable:
            raise InvalidArgument(
                f"ENGINE_REPLICAS={count}: must be 1 with a {self.name} engine; start a server for"
                " each, as a cluster does (deploy.md)"
            )

    def memory(self) -> Demand | None:
        """What it asks of each GPU; None for nothing. Raises E1301 or E1304 where none can tell."""
        return None

    def classify_start_failure(self, log: str) -> errors.CogTritonError | None:
        """The coded error behind Triton's log after a failed start; None if it is not known."""
        return None

    def classify_error(self, text: str) -> errors.CogTritonError:
        """The coded error behind an error text of the engine or of Triton."""
        known = errors.TritonUnavailable if _TRITON_ENDS.search(text) else errors.TritonUnknownError
        return errors.from_text(text) or known(text)


def options_of(parameters: Mapping[str, str]) -> dict[str, str]:
    """The options of its engine among the parameters of a rendered engine model."""
    return {name: value for name, value in parameters.items() if name not in _NOT_OPTIONS}
