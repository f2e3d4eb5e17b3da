"""Tensors of ``vllm_model``: reads requests from inputs, writes events to outputs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cog_triton.backend.answers import Part
from cog_triton.backend.text_inputs import Tensors
from cog_triton.engines.request import EngineRequest, TokenEvent
from cog_triton.engines.vllm import sampling_arguments
from cog_triton.engines.vllm.argument_types import ArgumentTypes
from cog_triton.engines.vllm.host_messages import TextEvent, TextRequest
from cog_triton.errors import InvalidArgument, PromptRequired, nearest
from cog_triton.pictures.image_limits import ImageLimits, ImagePart, decode_base64
from cog_triton.text import client_json
from cog_triton.text.sampling import SamplingParams

NAME = "embedding_request"
Encode = Callable[[str], Sequence[int]]
"""Encodes a prompt."""
_KNOWN = ("input", "pooling_params")
# Of OpenAI's request: they change no number.
_WITHOUT_EFFECT = ("model", "user", "encoding_format")


def parse_embedding_request(text: str, encode: Encode) -> EngineRequest:
    """The request; raises E1001 and E1005.

    `input` is a text, which `encode` makes token ids of, or a list of these;
    ``pooling_params.dimensions`` is a number, or a list of one.
    """
    try:
        values = client_json.parse(text)
    except ValueError as error:
        raise InvalidArgument(f"{NAME}: not JSON: {error}") from error
    _check_names(values, NAME, (*_KNOWN, *_WITHOUT_EFFECT))
    given = values.get("input")
    if given in ("", [], None):
        raise PromptRequired(f"{NAME}: input is empty")
    dimensions = _dimensions(values.get("pooling_params"))
    if isinstance(given, str):
        given = encode(given)
    elif not (isinstance(given, list) and all(type(token) is int for token in given)):
        raise InvalidArgument(f"{NAME}: input: must be a text, or a list of token ids")
    sampling = SamplingParams(max_tokens=1)
    return EngineRequest(input_ids=given, sampling=sampling, embeds=True, dimensions=dimensions)


def _dimensions(params: Any) -> int | None:
    if params is None:
        return None
    _check_names(params, f"{NAME}: pooling_params", ("dimensions",))
    given = params.get("dimensions")
    found = given[0] if isinstance(given, list) and len(given) == 1 else given
    if found is None or (type(found) is int and found > 0):
        return found
    raise InvalidArgument(
        f"{NAME}: pooling_params: dimensions={str(given)[:80]}: must be a whole number, at least 1"
    )


def _check_names(values: Any, where: str, known: tuple[str, ...]) -> None:
    if not isinstance(values, dict):
        raise InvalidArgument(f"{where}: must be a JSON object")
    for name in values:
        if name not in known:
            hint = nearest(name, list(known)) or f"; known: {', '.join(known)}"
            raise InvalidArgument(f"{where}: {name[:80]}: not taken{hint}")


_RETURNS = (
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
_COUNTS = frozenset(_RETURNS[-2:])
_INPUTS = ["text_input", "image", "embedding_request", "stream", "sampling_parameters"]
_INPUTS += ["exclude_input_in_output", *_RETURNS]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Parsed request: the engine's part, a `prefix` of each text, and the outputs `wanted`.

    `images` are in base64; `with_images` decodes them.
    """

    request: TextRequest | EngineRequest
    prefix: str
    wanted: frozenset[str]
    images: tuple[bytes, ...] = ()

    def with_images(self, limits: ImageLimits) -> ParsedRequest:
        """The text request with its images, within limits; raises E1005."""
        limits.check_count("image", len(self.images))
        parts = tuple(
            ImagePart(f"image[{place}]", decode_base64(f"image[{place}]", text, limits))
            for place, text in enumerate(self.images)
        )
        limits.check(parts)
        assert isinstance(self.request, TextRequest)
        return replace(self, request=replace(self.request, images=parts), images=())


def parse_request(
    model: str,
    inputs: Tensors,
    parameters: Mapping[str, Any],
    types: ArgumentTypes = sampling_arguments.RECORDED,
    *,
    takes_images: bool = False,
    encode: Encode | None = None,
) -> ParsedRequest:
    """Parse a request for vLLM of the version of `types`; raises E1001, E1005.

    `encode` is for a model that makes embeddings, and no text.
    """
    embeds = encode is not None
    if _given(inputs, "embedding_request") is not embeds:
        name, kind = ("text_input", "generate") if embeds else ("embedding_request", "embed")
        raise InvalidArgument(f"{name}: Model {model} does not support '{kind}' request")
    wanted = frozenset(name for name in _RETURNS if _flag(inputs, name, False))
    if encode is not None:
        for name in parameters:
            if not _is_tritons(name):
                raise InvalidArgument(f"{name}: embeddings have no such parameter")
        embedding = parse_embedding_request(_text("embedding_request", inputs), encode)
        return ParsedRequest(embedding, "", wanted & _COUNTS)
    if _given(inputs, "image") and not takes_images:
        raise InvalidArgument(f"image: {model} takes text only; send no image")
    prompt = _text("text_input", inputs)
    if not prompt:
        raise PromptRequired("text_input is empty")
    stream = _flag(inputs, "stream", False)
    excluded = _flag(inputs, "exclude_input_in_output", stream)
    if stream and not excluded:
        raise InvalidArgument(
            "exclude_input_in_output=False: When streaming, `exclude_input_in_output` = False is"
            " not allowed."
        )
    request = TextRequest(
        prompt=prompt,
        sampling=_sampling(inputs, parameters, types),
        stream=stream,
        return_logprobs="return_logprobs" in wanted,
        return_cumulative_logprob="return_cumulative_logprob" in wanted,
    )
    images = tuple(inputs["image"].ravel().tolist()) if _given(inputs, "image") else ()
    return ParsedRequest(request, "" if excluded else prompt, wanted, images)


class VLLMPart(Part):
    """A request to vLLM; each of its events becomes a response."""

    def __init__(self, parsed: ParsedRequest) -> None:
        request = parsed.request
        # Distinguishes prompts: token ids, else bytes of the text, as vLLM encodes it itself.
        text = isinstance(request, TextRequest) and request.prompt
        super().__init__(request, text.encode() if text else None)
        self._parsed = parsed

    def feed(self, event: TextEvent | TokenEvent) -> list[Tensors]:
        """See `Part.feed`: the output tensors that the client requested."""
        if isinstance(event, TokenEvent):  # an embedding, as JSON
            event = TextEvent(
                texts=[json.dumps(list(event.embedding))],
                finish_reasons=["stop"],
                cumulative_logprobs=[math.nan],
                logprobs=["null"],
                output_token_counts=[0],
                input_token_count=len(self.request.input_ids),
            )
        self.prompt_tokens = event.input_token_count
        self.tokens = sum(event.output_token_counts)
        self.outcome = next(filter(None, event.finish_reasons), self.outcome)
        made: Tensors = {
            "text_output": _strings(self._parsed.prefix + text for text in event.texts),
            "finish_reason": _strings(map(str, event.finish_reasons)),
            "cumulative_logprob": np.array(event.cumulative_logprobs, dtype=np.float32),
            "logprobs": _strings(event.logprobs),
            "num_input_tokens": np.array([event.input_token_count], dtype=np.uint32),
            "num_output_tokens": np.array(event.output_token_counts, dtype=np.uint32),
        }
        wanted = {"return_text_output", *self._parsed.wanted}
        return [{name: tensor for name, tensor in made.items() if f"return_{name}" in wanted}]


def _sampling(
    inputs: Tensors, parameters: Mapping[str, Any], types: ArgumentTypes
) -> dict[str, Any]:
    given: dict[str, Any] = {}
    names = sampling_arguments.names(types)
    if "sampling_parameters" in inputs:
        given = sampling_arguments.parse_json(_text("sampling_parameters", inputs))
    for name, value in parameters.items():
        if _is_tritons(name):
            continue
        if name not in names:
            hint = nearest(name, [*_INPUTS, *names])
            raise InvalidArgument(f"{name}: unknown input or sampling parameter{hint}")
        if name in given and given[name] != value:
            raise InvalidArgument(
                f"{name}: {given[name]!r} in sampling_parameters, {value!r} as a parameter of the"
                " request; give one"
            )
        given[name] = value
    return sampling_arguments.from_client(given, types)


def _is_tritons(parameter: str) -> bool:
    """Whether a parameter is the request id, or one of Triton's own."""
    return parameter == "id" or parameter.startswith("triton_")


def _given(inputs: Tensors, name: str) -> bool:
    return name in inputs and any(inputs[name].ravel().tolist())


def _text(name: str, inputs: Tensors) -> str:
    values = inputs[name].ravel().tolist()
    if len(values) != 1:
        raise InvalidArgument(f"{name}: {len(values)} values; must be one text")
    try:
        return str(values[0].decode())
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name}: not UTF-8: {error.reason} at {error.start}") from error


def _flag(inputs: Tensors, name: str, default: bool) -> bool:
    return bool(inputs[name].flat[0]) if name in inputs else default


def _strings(texts: Any) -> npt.NDArray[np.object_]:
    return np.array([text.encode() for text in texts], dtype=np.object_)
