"""The gate before Triton's HTTP port: the paths that pass, and the answers that are revised.

Triton 24.10 dies of JSON that is nested too deep, of a million one-byte chunks and of some
parameters, and lets clients map its shared memory and change its log. So only these paths pass,
with bodies that `triton_schema` has written again.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field, replace

from cog_triton import errors
from cog_triton.engines.generate_stream import PRIVATE_MODELS
from cog_triton.front.gate import PrivateGate, status_of, triton_refusal
from cog_triton.front.json_body import Numbers, member
from cog_triton.front.message import Answer, Forward, Request, json_answer
from cog_triton.front.pass_through import ask
from cog_triton.front.triton_schema import (
    ModelTensors,
    rewritten_generation,
    rewritten_index,
    rewritten_inference,
)
from cog_triton.system.log_format import log_refusal

_MODEL = r"/v2/models/[\w.\-]{1,128}(?:/versions/\d{1,9})?"
_INDEX = "/v2/repository/index"
_LISTS = ("/v2/models/stats", _INDEX)
_HEALTH = re.compile(r"/v2/health/(?:live|ready)")
_READ = re.compile(rf"/v2/?|/v2/models/stats|{_MODEL}(?:/(?:config|stats|ready))?", re.ASCII)
_INFER = re.compile(rf"({_MODEL})/infer", re.ASCII)
_GENERATE = re.compile(rf"({_MODEL})/generate(?:_stream)?", re.ASCII)
_PRIVATE = re.compile(rf"/v2/models/({'|'.join(PRIVATE_MODELS)})(?:/.*)?", re.DOTALL)
_HEADER_LENGTH = b"inference-header-content-length"
_CODE = re.compile(rb"\bE[12]\d{3} ")
_SHM_KEY = re.compile(rb"(?<=key ')[^'\\\r\n]+(?=')|triton_python_backend_shm\w+|cog_triton_\d\w+")
# Faults of clients that Triton calls internal errors, and what is said of each.
_NOT_PARSED = re.compile(r"(?i)unable to parse|failed to parse|attempt to access")
_HINTS = {
    "decoupled transaction policy": (
        "use generate or generate_stream, or serve with decoupled_mode: false"
    ),
    "exactly 1 response": "use generate_stream for several prompts, and for stream: true",
}
_TIMEOUT_S = 5.0


class ServedModels:
    """Tensors of the models that Triton serves, asked for once: a model's config never changes."""

    def __init__(self) -> None:
        self._known: dict[str, ModelTensors] = {}

    async def tensors(self, port: int, model: str) -> ModelTensors | Answer:
        """Tensors of the model at the path `model`, or Triton's own answer if it serves none.

        Raises:
            TritonUnavailable: Triton does not answer.
        """
        if model not in self._known:
            try:
                asked = ask(port, b"GET", f"{model}/config".encode())
                status, body = await asyncio.wait_for(asked, _TIMEOUT_S)
                if status != 200:
                    return Answer(status, body)
                self._known[model] = _tensors(body)
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                rule = "the server behind this port does not answer; try again"
                raise errors.TritonUnavailable(rule) from error
        return self._known[model]


def _tensors(config: bytes) -> ModelTensors:
    model = json.loads(config)
    types = {one["name"]: one["data_type"].removeprefix("TYPE_") for one in model.get("input", ())}
    inputs = {name: "BYTES" if kind == "STRING" else kind for name, kind in types.items()}
    return ModelTensors(inputs, frozenset(one["name"] for one in model.get("output", ())))


@dataclass(eq=False)
class TritonGate(PrivateGate):
    """Decides on requests to Triton's HTTP port; answers have the shape of Triton's errors."""

    refusal = staticmethod(triton_refusal)
    numbers = Numbers.FREE
    readiness = re.compile(rf"/v2/health/ready|{_MODEL}/ready", re.ASCII)
    dropped = PrivateGate.dropped | {_HEADER_LENGTH}

    models: ServedModels = field(default_factory=ServedModels)

    async def _decide(self, request: Request) -> Forward | Answer:
        path = request.path
        reads = request.method in ("GET", "HEAD")
        if reads and _HEALTH.fullmatch(path):
            return self._passed(request, b"")
        request = self.access.check(request, "triton")
        if private := _PRIVATE.fullmatch(path):
            raise errors.NotFound(f"Request for unknown model: '{private[1]}' is not found")
        if reads and _READ.fullmatch(path):
            return self._passed(request, b"")
        if request.method == "POST" and path == _INDEX:
            body = (await self._inflated(request)).body
            body = await self.large_bodies.run(len(body), rewritten_index, body, self.json_limits)
            return self._passed(request, body)
        infers = _INFER.fullmatch(path)
        if request.method == "POST" and (called := infers or _GENERATE.fullmatch(path)):
            return await self._called(request, called[1], infers=infers is not None)
        raise errors.NotFound(
            f"{request.method} {path[:80]!r}: not published; see docs/security.md for what is"
        )

    async def _called(self, request: Request, model: str, *, infers: bool) -> Forward | Answer:
        tensors = await self.models.tensors(self.upstream.ports[self.port], model)
        if isinstance(tensors, Answer):
            return coded_failure(tensors.status, tensors.body) or tensors
        body = (await self._inflated(request)).body
        run, bounds = self.large_bodies.run, self.json_limits
        header_length = None
        if infers:
            length = request.header(_HEADER_LENGTH)
            checked = run(len(body), rewritten_inference, body, length, bounds, tensors)
            body, header_length = await checked
        else:
            body = await run(len(body), rewritten_generation, body, bounds, tensors)
        return self._passed(request, body, header_length)

    def _passed(self, request: Request, body: bytes, header_length: int | None = None) -> Forward:
        probes = _HEALTH.fullmatch(request.path) or self.readiness.fullmatch(request.path)
        revise = published_models if request.path in _LISTS else coded_failure
        forward = replace(
            self._forward(request),
            target=request.path.encode(),
            body=body,
            revise=probed if probes else revise,
            redact=without_shm_keys,
        )
        if header_length is not None:
            forward.headers.append((_HEADER_LENGTH, b"%d" % header_length))
        return forward


def coded_failure(status: int, body: bytes) -> Answer | None:
    """The answer in the place of a failure of Triton's own, which has no code; None to leave it.

    A failure of `generate` comes with 200 once a model has answered, or has answered twice.
    """
    failed_late = status == 200 and body.startswith(b'{"error":')
    if not failed_late and (status < 400 or _CODE.search(body) or (status < 500 and not body)):
        return None
    text = str(member(body, "error") or f"HTTP {status}")
    if failed_late and (error := errors.from_text(text)):
        return triton_refusal(status_of(error), error)
    status, error = _coded(status, text)
    log_refusal("triton", error)  # no model has had it, which would have
    return triton_refusal(status, error)


def _coded(status: int, text: str) -> tuple[int, errors.CogTritonError]:
    if status == 404 or text.startswith("Request for unknown model"):
        return 404, errors.NotFound(text)
    if 400 <= status < 500:
        return status, errors.InvalidArgument(text)
    if _NOT_PARSED.match(text):
        return 400, errors.InvalidArgument(f"body: {text}")
    if status == 503:
        return status, errors.TritonUnavailable(text)
    for words, hint in _HINTS.items():
        if words in text:
            return 400, errors.InvalidArgument(f"{text}: {hint}")
    return max(status, 500), errors.TritonUnknownError(text)


def probed(status: int, body: bytes) -> Answer | None:
    """The answer in the place of one to a probe that fails: Triton's 400, often without a body."""
    if status < 400 or _CODE.search(body):
        return None
    text = str(member(body, "error") or "not ready")
    return triton_refusal(status, errors.TritonUnavailable(text))


def published_models(status: int, body: bytes) -> Answer | None:
    """The answer in the place of a list of all models, without private ones."""
    if status != 200:
        return coded_failure(status, body)
    try:
        found = json.loads(body)
        models = found["model_stats"] if isinstance(found, dict) else found
        models[:] = [model for model in models if model["name"] not in PRIVATE_MODELS]
    except (ValueError, KeyError, TypeError):
        return None
    return json_answer(200, found)


def without_shm_keys(text: bytes) -> bytes:
    """An error of Triton's without the names of shared memory in it, at the same length."""
    return _SHM_KEY.sub(lambda found: b"*" * len(found[0]), text)
