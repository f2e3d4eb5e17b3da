"""Key trials of an attack: guesses before a file of thousands of keys, of one address and of many.

Addresses are of 127.0.0.0/8, all of which Linux takes as its own. No guess may be let in, no more
be tried than docs/security.md says, and whoever has a key goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from _attack_clients import send
from _attack_inputs import request
from _report import as_data, say
from _servers import Server
from tritonclient.grpc import service_pb2, service_pb2_grpc

TENANTS = 5000
AT_ONCE = 32
OWN = "127.0.0.1"
_ASK = {
    "cog": ("POST", "/predictions", {"input": {"prompt": "rivers", "max_tokens": 2}}),
    "openai": ("POST", "/v1/completions", {"model": "mock", "prompt": "x", "max_tokens": 2}),
    "triton": ("GET", "/v2", None),
    "metrics": ("GET", "/metrics", None),
}
_EACH, _ALL, _ALL_PER_S = 60, 600, 10
"""Wrong keys at once of an address, and of all; and those of all a second: docs/security.md."""


@dataclass(slots=True)
class Trial:
    """Guesses of so many addresses; `cpu_us` is what each has cost the server."""

    name: str
    addresses: int
    tried: int
    answers: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    cpu_us: float = 0.0
    problems: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """As data."""
        return {**as_data(self), "problems": sorted({*self.problems})}


def key_of(place: int) -> str:
    """The key of a tenant."""
    return f"ct-{hashlib.sha256(b'%d' % place).hexdigest()}"


def guesses(some: random.Random) -> Iterator[str]:
    """Wrong keys, many of them near to right ones: ids, hashes, names, beginnings, tokens."""
    while True:
        right = key_of(some.randrange(TENANTS))
        hashed = hashlib.sha256(right.encode()).hexdigest()
        near = [hashed, hashed[:8], right[:-1], right + "0", right.upper(), f" {right[:20]}"]
        near += [f"tenant-{some.randrange(TENANTS)}", f"{right}.{hashed}.x", "default", "x" * 4000]
        yield some.choice([*near, f"ct-{some.randbytes(32).hex()}"])


def most_tried(addresses: int, seconds: float) -> float:
    """Wrong keys that may be tried in that time, before and after the limit of all is reached."""
    alone = addresses * (_EACH + seconds)
    crowd = _ALL + _ALL_PER_S * seconds + min(addresses, 4096) * (1 + seconds / 60)
    return min(alone, crowd)


async def try_keys(
    start: Callable[[dict[str, str]], AbstractContextManager[Server]], seed: int
) -> list[Trial]:
    """Every trial, one after the other, on a server with keys that it starts."""
    some = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="cog-triton-keys-") as scratch:
        file = Path(scratch) / "keys"
        every = ["predictions", "openai", "triton", "metrics"]
        file.write_text(
            "\n".join(
                json.dumps(
                    {
                        "name": f"tenant-{place}",
                        "sha256": hashlib.sha256(key_of(place).encode()).hexdigest(),
                        "apis": every,
                    }
                )
                for place in range(TENANTS)
            )
        )
        with start({"COG_TRITON_KEYS": str(file)}) as target:
            return await _Trials(target, some).run()


class _Trials:
    """Trials on one server."""

    def __init__(self, target: Server, some: random.Random) -> None:
        self._target, self._guesses = target, guesses(some)
        urls = (target.url, target.openai, target.triton, target.metrics)
        self._ports = [int(urlsplit(url).port or 0) for url in urls]

    async def run(self) -> list[Trial]:
        alone = Trial("one address", 1, 1000)
        crowd = Trial("many addresses", 2000, 3)
        more = Trial("more than are known", 6000, 2)
        await self._right(alone, OWN, 0, "200")
        await self._guess(alone, [OWN])
        await self._right(alone, OWN, 0, "200")
        await self._right(alone, "127.0.0.2", 2, "200")
        await self._guess(crowd, addresses(2, crowd.addresses))
        await self._right(crowd, "127.0.0.3", 3, "200")
        await self._right(crowd, OWN, 0, "200")
        await self._guess(more, addresses(4, more.addresses))
        await self._right(more, OWN, 0, "200")
        await self._right(more, "127.0.0.2", 2, "200")
        return [alone, crowd, more, await self._grpc()]

    async def _guess(self, trial: Trial, sources: list[str]) -> None:
        """Each address tries so many keys, the ports in turns."""
        began, before = time.monotonic(), sum(self._target.cpu_seconds().values())
        todo = iter([(source, n) for n in range(trial.tried) for source in sources])

        async def some() -> None:
            for source, _ in todo:
                await self._ask(trial.answers, trial, source, next(self._guesses))

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        trial.seconds = time.monotonic() - began
        spent = sum(self._target.cpu_seconds().values()) - before
        trial.cpu_us = spent * 1e6 / sum(trial.answers.values())
        most = most_tried(len(sources), trial.seconds)
        if trial.answers["401"] > most:
            trial.problems.append(f"{trial.answers['401']} keys tried, {most:.0f} may be")
        if wrong := trial.answers.keys() - {"401", "429"}:
            trial.problems.append(f"answers {', '.join(sorted(wrong))} to wrong keys")
        say(f"keys, {trial.name}: {dict(trial.answers)} in {trial.seconds:.1f} s")

    async def _right(self, trial: Trial, source: str, tenant: int, wanted: str) -> None:
        """A right key, on each port."""
        found: Counter[str] = Counter()
        for _ in self._ports:
            await self._ask(found, trial, source, key_of(tenant))
        trial.right += found
        if set(found) != {wanted}:
            trial.problems.append(f"{dict(found)} to tenant-{tenant} of {source}, not {wanted}")

    async def _ask(self, answers: Counter[str], trial: Trial, source: str, key: str) -> None:
        place = sum(answers.values()) % len(self._ports)
        method, path, body = list(_ASK.values())[place]
        data = b"" if body is None else json.dumps(body).encode()
        head = request(method, path, data, f"Authorization: Bearer {key}")
        answer = await send(self._ports[place], head, source=source)
        status = answer[9:12].decode("ascii", "replace") or "closed"
        answers[status] += 1
        coded = {"401": b"E1007 ", "429": b"E2107 "}.get(status, b"")
        if coded not in answer:
            trial.problems.append(f"{status} without {coded.decode()}")
        if status != "200" and (b"tenant-" in answer or key[:24].encode() in answer):
            trial.problems.append(f"{status} tells a name or the key")

    async def _grpc(self) -> Trial:
        """Triton's gRPC port, which asks for no key."""
        trial = Trial("gRPC", 1, 1)
        async with grpc.aio.insecure_channel(self._target.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                await stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=5)
                trial.problems.append("gRPC answers without a key")
            except grpc.aio.AioRpcError as error:
                trial.answers[error.code().name] += 1
        return trial


def addresses(first: int, count: int) -> list[str]:
    """So many addresses of this machine."""
    return [f"127.{first + n // 65025}.{n // 255 % 255}.{n % 255 + 1}" for n in range(count)]
