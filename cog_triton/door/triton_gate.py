"""The gate before Triton's HTTP port: a list of endpoints, and bodies that are written anew.

Triton 24.10 dies of JSON that is nested too deep, of a million one-byte chunks and of some
parameters, and lets clients map its shared memory and change its log. So only what is listed
passes, and of a body only what was parsed here.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from cog_triton import errors
from cog_triton.door.gate import PrivateGate
from cog_triton.door.json_body import Numbers, inflated
from cog_triton.door.message import Answer, Forward, Request, json_answer
from cog_triton.door.refusals import triton_refusal
from cog_triton.door.triton_bodies import rewritten_inference, rewritten_json
from cog_triton.door.upstream import Upstream
from cog_triton.triton.private_models import PRIVATE_MODELS

_VERSION = r"(?:/versions/\d{1,9})?"
_MODEL = rf"/v2/models/[\w.\-]{{1,128}}{_VERSION}"
_HEALTH = re.compile(r"/v2/health/(?:live|ready)", re.ASCII)
_READ = re.compile(rf"/v2/?|/v2/models/stats|{_MODEL}(?:/(?:config|stats|ready))?", re.ASCII)
_JSON = re.compile(rf"/v2/repository/index|{_MODEL}/generate(?:_stream)?", re.ASCII)
_PRIVATE = re.compile(rf"/v2/models/({'|'.join(PRIVATE_MODELS)})(?:/.*)?", re.DOTALL)
_LISTS = re.compile(r"/v2/models/stats|/v2/repository/index", re.ASCII)
_INFER = re.compile(rf"{_MODEL}/infer", re.ASCII)
_HEADER_LENGTH = b"inference-header-content-length"
_CODE = re.compile(rb"\bE[12]\d{3} ")
_NOT_PARSED = re.compile(r"(?i)unable to parse|failed to parse|attempt to access")
_SHM_KEY = re.compile(rb"(?<=key ')[^'\\\r\n]+(?=')|triton_python_backend_shm\w+|cog_triton_\d\w+")


class TritonGate(PrivateGate):
    """Decides on requests to Triton's HTTP port; answers have the shape of Triton's errors."""

    numbers = Numbers.FREE
    readiness = re.compile(rf"/v2/health/ready|{_MODEL}/ready", re.ASCII)
    dropped = frozenset({b"content-encoding", b"authorization", _HEADER_LENGTH})

    def refusal(self, status: int, error: errors.CogTritonError) -> Answer:
        """See `gate.Gate`."""
        return triton_refusal(status, error)

    async def _decide(self, request: Request) -> Forward:
        path = request.path
        reads = request.method in ("GET", "HEAD")
        if reads and _HEALTH.fullmatch(path):
            return self._passed(request, b"")
        self._access.check(request)
        if private := _PRIVATE.fullmatch(path):
            raise errors.NotFound(f"Request for unknown model: '{private[1]}' is not found")
        if reads and _READ.fullmatch(path):
            return self._passed(request, b"")
        if request.method == "POST" and (_JSON.fullmatch(path) or _INFER.fullmatch(path)):
            body, header_length = await self._rewritten(request)
            to = await self._route.upstream_of()
            return self._passed(request, body, header_length, to)
        raise errors.NotFound(
            f"{request.method} {path[:80]!r}: not published; see docs/security.md for what is"
        )

    async def _rewritten(self, request: Request) -> tuple[bytes, int | None]:
        limits, encoding = self._limits, request.header(b"content-encoding")
        # What is compressed may be large.
        size = limits.body_bytes if encoding else len(request.body)
        run, bounds = self._large_bodies.run, self._json_limits
        body = await run(size, inflated, request.body, encoding, limits.body_bytes)
        if _JSON.fullmatch(request.path):
            return await run(len(body), rewritten_json, body, bounds), None
        length = request.header(_HEADER_LENGTH)
        return await run(len(body), rewritten_inference, body, length, bounds)

    def _passed(
        self,
        request: Request,
        body: bytes,
        header_length: int | None = None,
        to: Upstream | None = None,
    ) -> Forward:
        forward = replace(
            self._forward(request, to),
            target=request.path.encode(),
            body=body,
            revise=published_models if _LISTS.fullmatch(request.path) else coded_failure,
            redact=without_shm_keys,
        )
        if header_length is not None:
            forward.headers.append((_HEADER_LENGTH, b"%d" % header_length))
        return forward


def coded_failure(status: int, body: bytes) -> Answer | None:
    """The answer in the place of a 5xx of Triton's own, which has no code; None to leave it."""
    if status < 500 or _CODE.search(body):
        return None
    try:
        text = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        text = f"HTTP {status}"
    if _NOT_PARSED.match(text):  # Triton calls this an internal error, too
        return triton_refusal(400, errors.InvalidArgument(f"body: {text}"))
    if status == 503:
        return triton_refusal(status, errors.TritonUnavailable(text))
    if "decoupled transaction policy" in text:
        hint = "use generate or generate_stream, or serve with decoupled_mode: false"
        return triton_refusal(400, errors.InvalidArgument(f"{text}: {hint}"))
    return triton_refusal(status, errors.TritonUnknownError(text))


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
