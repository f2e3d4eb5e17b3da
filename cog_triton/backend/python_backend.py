"""Python-backend helpers of the Triton models: parameters, inputs, responses, errors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from cog_triton.errors import CogTritonError, FrameworkError, InvalidPredictorConfig
from cog_triton.pictures.image_limits import ImageLimits
from cog_triton.system import process_tuning
from cog_triton.text.stop_strings import WordLimits
from cog_triton.text.tokenizer import EngineTokenizer


class Parameters:
    """Typed access to the parameters in a model's ``config.pbtxt``."""

    def __init__(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._model = args["model_name"]
        self.outputs: list[dict[str, Any]] = config["output"]
        self.inputs = [item["name"] for item in config["input"]]
        policy = config.get("model_transaction_policy", {})
        self.decoupled = bool(policy.get("decoupled", False))
        """Whether requests may have any number of responses, not one alone."""
        self._values: dict[str, str] = {
            name: item["string_value"] for name, item in config["parameters"].items()
        }

    def text(self, name: str) -> str:
        """A parameter's text; raises E1202 if it is missing or empty."""
        if not self._values.get(name):
            raise InvalidPredictorConfig(f"{self._model}.args.{name}: missing")
        return self._values[name]

    def optional(self, name: str) -> str:
        """A parameter's text, empty if it is missing."""
        return self._values.get(name, "")

    def _matching(self, name: str, value: str, pattern: str, rule: str) -> str:
        if not re.fullmatch(pattern, value):
            raise InvalidPredictorConfig(f"{self._model}.args.{name}={value!r}: must be {rule}")
        return value

    def flag(self, name: str, default: str = "") -> bool:
        """A parameter that is true or false; raises E1202 for anything else."""
        value = (self._values.get(name) or default or self.text(name)).lower()
        return self._matching(name, value, "true|false", "true or false") == "true"

    def positive_int(self, name: str) -> int:
        """A parameter that is a positive whole number; raises E1202 for anything else."""
        rule = "a whole number, at least 1"
        return int(self._matching(name, self.text(name), "0*[1-9][0-9]*", rule))

    def count(self, name: str) -> int | None:
        """A parameter that is a positive whole number, None if it is empty; raises E1202."""
        return self.positive_int(name) if self._values.get(name) else None

    def word_limits(self) -> WordLimits:
        """Limits of stop words and bad words."""
        return WordLimits(self.positive_int("max_words"), self.positive_int("max_word_length"))

    def image_limits(self) -> ImageLimits | None:
        """Limits of a request's images; None if the engine takes none."""
        if (count := self.count("max_images")) is None:
            return None
        size, pixels = self.positive_int("max_image_bytes"), self.positive_int("max_image_pixels")
        return ImageLimits(count, size, pixels)

    def token_id(self, name: str) -> int | None:
        """A parameter that is a token id, None if it is empty; raises E1202 for anything else."""
        value = self._matching(name, self._values.get(name, ""), "[0-9]*", "a token id")
        return int(value) if value else None

    def names(self, name: str) -> dict[str, str]:
        """A parameter that renames, as ``ours:theirs,ours:theirs``; may be empty."""
        pairs = self._values.get(name, "").split(",")
        return dict(pair.split(":", 1) for pair in pairs if pair)

    def tokenizer(self) -> EngineTokenizer:
        """The tokenizer in `tokenizer_dir`, and malloc settings for long prompts; raises E2102."""
        process_tuning.limit_arenas()
        return EngineTokenizer.load(Path(self.text("tokenizer_dir")))


def input_tensors(request: Any) -> dict[str, npt.NDArray[Any]]:
    """The request's input tensors by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def request_parameters(request: Any) -> dict[str, Any]:
    """The request's parameters by name: text, numbers, booleans; misspelt inputs are among them."""
    values: dict[str, Any] = json.loads(request.parameters() or "{}")
    return values


def response(tensors: Mapping[str, npt.NDArray[Any]]) -> Any:
    """A response that carries `tensors`."""
    return pb_utils.InferenceResponse(
        output_tensors=[pb_utils.Tensor(name, tensor) for name, tensor in tensors.items()]
    )


def send(sender: Any, answer: Any, flags: int = 0) -> None:
    """Send a response; its tensors outlive the call.

    The stub (24.10) drops tensors that the client did not ask for without holding the GIL. Was that
    the last reference, Python 3.12 ends with a segmentation fault, and earlier ones may.
    """
    tensors = answer.output_tensors()
    sender.send(answer, flags=flags)
    del tensors


def error_response(error: CogTritonError, prefix: str = "") -> Any:
    """A response with the coded error's text, after `prefix`."""
    code = (
        pb_utils.TritonError.INTERNAL
        if isinstance(error, FrameworkError)
        else pb_utils.TritonError.INVALID_ARG
    )
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{prefix}{error}", code))
