"""Responses that are kept by Redis or Valkey, so that each of several replicas answers for all.

A worker that lives renews a key, so that what it has not finished is known to be lost once that is
gone. All that changes a response is a script, which takes a change only once: what a broken
connection leaves unanswered is sent again.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cog_triton import errors
from cog_triton.serving.openai.response_book import (
    MOST_PARTS,
    RUNNING,
    Changes,
    Entry,
    Events,
    Kept,
    Object,
    events_from,
    failure,
)
from cog_triton.system.redaction import redact_address

_log = logging.getLogger(__name__)

_PREFIX = "{cog-triton:responses:1}:"
"""Of all keys; in braces, so that a cluster has them in one slot."""
_LIFE_S, _BEAT_S = 15.0, 3.0
_TIMEOUT_S = 5.0
_MOST_SWEPT = 1000
_COMMON = f"""
local P, running = KEYS[1], '{RUNNING}'
local function ended(id, tenant, created, size)
  redis.call('ZADD', P..'ages', created, id)
  redis.call('ZADD', P..'ages:'..tenant, created, id)
  redis.call('ZINCRBY', P..'sizes', size, tenant)
end
local function delete(id)
  local of = redis.call('HMGET', P..'r:'..id, 'tenant', 'status', 'size')
  if not of[1] then return end
  redis.call('DEL', P..'r:'..id, P..'e:'..id)
  redis.call('DECRBY', P..'size', of[3])
  redis.call('SREM', P..'running', id)
  if of[2] ~= running then
    redis.call('ZREM', P..'ages', id)
    redis.call('ZREM', P..'ages:'..of[1], id)
    if tonumber(redis.call('ZINCRBY', P..'sizes', -of[3], of[1])) <= 0 then
      redis.call('ZREM', P..'sizes', of[1])
    end
  end
end
"""
_INSERT = """
local id, size = ARGV[1], ARGV[2]
if redis.call('EXISTS', P..'r:'..id) == 1 then return end
redis.call('HSET', P..'r:'..id, 'size', size, 'next', 0, unpack(ARGV, 3))
redis.call('INCRBY', P..'size', size)
local of = redis.call('HMGET', P..'r:'..id, 'tenant', 'status', 'created')
if of[2] == running then redis.call('SADD', P..'running', id)
else ended(id, of[1], of[3], size) end
"""
_APPEND = """
local id, first, count, data = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local of = redis.call('HMGET', P..'r:'..id, 'status', 'next')
if of[1] ~= running then return 0 end
if tonumber(of[2]) == first then
  redis.call('XADD', P..'e:'..id, (first + 1)..'-'..count, 'd', data)
  redis.call('HSET', P..'r:'..id, 'next', first + count)
  redis.call('HINCRBY', P..'r:'..id, 'size', #data)
  redis.call('INCRBY', P..'size', #data)
end
return 1
"""
_END = """
local id, status, body = ARGV[1], ARGV[2], ARGV[3]
local of = redis.call('HMGET', P..'r:'..id, 'status', 'tenant', 'created', 'size')
if of[1] ~= running then return end
redis.call('HSET', P..'r:'..id, 'status', status, 'body', body)
redis.call('SREM', P..'running', id)
ended(id, of[2], of[3], of[4])
"""
_DELETE = "delete(ARGV[1])"
_SWEEP = f"""
local old, most = '('..ARGV[1], tonumber(ARGV[2])
for _, id in ipairs(redis.call(
    'ZRANGEBYSCORE', P..'ages', '-inf', old, 'LIMIT', 0, {_MOST_SWEPT})) do delete(id) end
for _ = 1, {_MOST_SWEPT} do
  if tonumber(redis.call('GET', P..'size') or 0) <= most then break end
  local tenant = redis.call('ZREVRANGE', P..'sizes', 0, 0)[1]
  if not tenant then break end
  local id = redis.call('ZRANGE', P..'ages:'..tenant, 0, 0)[1]
  if id then delete(id) else redis.call('ZREM', P..'sizes', tenant) end
end
"""


class ResponseServer:
    """Responses in the database at a URL, which together hold `size` bytes for `age` seconds."""

    def __init__(self, url: str, size: int, age: float) -> None:
        """Reach it, and fail what workers have left that live no more.

        Raises E1005 unless it is a Redis or Valkey that answers, by its client library.
        """
        self._client = _connected(url)
        self._size, self._age = size, age
        self.scripts = {
            name: self._client.register_script(_COMMON + text)
            for name, text in {
                "insert": _INSERT,
                "append": _APPEND,
                "end": _END,
                "delete": _DELETE,
                "sweep": _SWEEP,
            }.items()
        }
        self.owner = secrets.token_hex(8)
        self._closed = threading.Event()
        self._beat()
        self._fail_orphans()
        self._heart = threading.Thread(target=self._live, name="responses-alive", daemon=True)
        self._heart.start()

    def read(self, name: str, tenant: str) -> Kept | None:
        """See `ResponseBook.read`."""
        fields = ("status", "owner", "streamed", "previous", "input", "body", "tenant", "created")
        found = self._fields(name, *fields)
        if found is None or found[6] != tenant or float(found[7]) <= time.time() - self._age:
            return None
        status, owner, streamed, previous, given, body = found[:6]
        return Kept(status, owner, int(streamed), previous or None, given, body)

    def owner_of(self, name: str) -> tuple[str, str] | None:
        """See `ResponseBook.owner_of`."""
        found = self._fields(name, "status", "owner")
        return None if found is None else (found[0], found[1])

    def events(self, name: str, first: int) -> Events:
        """See `ResponseBook.events`."""
        owned = self.owner_of(name)  # before its events, of which the last is written with it
        key, at = f"{_PREFIX}e:{name}", str(first + 1)
        with _coded():
            before = self._client.xrevrange(key, at, count=1)
            start = before[0][0] if before and sum(_place(before[0][0])) > first else at
            found = self._client.xrange(key, start, count=MOST_PARTS)
        parts = [(*_place(place), values[b"d"]) for place, values in found]
        return events_from(first, parts, owned and owned[0])

    def lives(self, owner: str) -> bool:
        """See `ResponseBook.lives`."""
        with _coded():
            return bool(self._client.exists(_life_of(owner)))

    @contextmanager
    def writing(self) -> Iterator[Changes]:
        """See `ResponseBook.writing`.

        A server whose memory is full may have applied some; it is told as if it had not.
        """
        pipeline = self._client.pipeline(transaction=True)
        batch = ServerChanges(self, pipeline)
        yield batch
        with _coded():
            answers = pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
        for place, lost in batch.awaited:
            if not answers[place]:
                lost()

    def body_of(self, name: str) -> str | None:
        """The object of a response, as JSON."""
        found = self._fields(name, "body")
        return None if found is None else found[0]

    def bounds(self) -> tuple[float, int]:
        """The time before which a response is too old, and the size of all."""
        return time.time() - self._age, self._size

    def close(self) -> None:
        """See `ResponseBook.close`."""
        self._closed.set()
        self._heart.join()
        with suppress(errors.CogTritonError), _coded():
            self._client.delete(_life_of(self.owner))
        self._client.close()

    def _fields(self, name: str, *fields: str) -> list[str] | None:
        if not name.isascii():
            return None
        with _coded():
            found = self._client.hmget(f"{_PREFIX}r:{name}", fields)
        return None if found[0] is None else [value.decode() for value in found]

    def _beat(self) -> None:
        with _coded():
            self._client.set(_life_of(self.owner), 1, px=int(_LIFE_S * 1000))

    def _live(self) -> None:
        while not self._closed.wait(_BEAT_S):
            try:
                self._beat()
            except errors.CogTritonError as error:
                _log.warning("%s", error)

    def _fail_orphans(self) -> None:
        with _coded():
            names = [name.decode() for name in self._client.smembers(f"{_PREFIX}running")]
        lost = [name for name in names if (of := self.owner_of(name)) and not self.lives(of[1])]
        with self.writing() as changes:
            for name in lost:
                changes.end(name, failure())
        if lost:
            _log.warning("responses that were made when a server ended, now failed: %d", len(lost))


class ServerChanges:
    """A transaction of the server; see `Changes`."""

    def __init__(self, server: ResponseServer, pipeline: Any) -> None:
        self._server, self._pipeline = server, pipeline
        self._count = 0
        self.awaited: list[tuple[int, Callable[[], None]]] = []
        """Places in the answers that are 0 if a response had ended, and what is called then."""

    def insert(self, entry: Entry) -> None:
        """See `Changes.insert`."""
        fields = {
            "tenant": entry.tenant,
            "owner": self._server.owner,
            "status": entry.status,
            "created": entry.created,
            "streamed": int(entry.streamed),
            "previous": entry.previous or "",
            "input": entry.input,
            "body": entry.body,
        }
        flat = [part for field in fields.items() for part in field]
        self._run("insert", entry.name, entry.size, *flat)

    def append(
        self, name: str, first: int, count: int, data: bytes, lost: Callable[[], None]
    ) -> None:
        """See `Changes.append`."""
        self.awaited.append((self._count, lost))
        self._run("append", name, first, count, data)

    def end(self, name: str, changes: Object) -> None:
        """See `Changes.end`; the object changes once, so that it may be read before."""
        if (body := self._server.body_of(name)) is not None:
            text = json.dumps(json.loads(body) | changes)
            self._run("end", name, changes["status"], text)

    def delete(self, name: str) -> None:
        """See `Changes.delete`."""
        self._run("delete", name)

    def sweep(self) -> None:
        """See `Changes.sweep`."""
        self._run("sweep", *self._server.bounds())

    def _run(self, script: str, *arguments: object) -> None:
        self._server.scripts[script](keys=[_PREFIX], args=arguments, client=self._pipeline)
        self._count += 1


def _connected(url: str) -> Any:
    named = f"RESPONSE_STORE_URL={redact_address(url)!r}"
    try:
        import redis
        from redis.backoff import ExponentialBackoff
        from redis.retry import Retry
    except ImportError as error:
        rule = "needs the package redis, of cog-triton's extra `redis`"
        raise errors.InvalidArgument(f"{named}: {rule}") from error
    scheme, _, rest = url.partition("://")
    try:
        client = redis.Redis.from_url(
            f"{scheme.replace('valkey', 'redis')}://{rest}",
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            health_check_interval=10,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 3),
        )
    except ValueError as error:
        rule = "must be redis://, rediss:// or unix:// and an address"
        raise errors.InvalidArgument(f"{named}: {rule}: {error}") from error
    try:
        client.ping()
    except redis.RedisError as error:
        rule = "must be a Redis or Valkey that answers"
        raise errors.InvalidArgument(f"{named}: {rule}: {error}") from error
    return client


@contextmanager
def _coded() -> Iterator[None]:
    """E2302 for a memory that is full, else E2100."""
    import redis

    try:
        yield
    except redis.RedisError as error:
        said = str(error).rpartition(" of pipeline caused error: ")[2]  # before it is what was sent
        full = isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM" in said
        kind = errors.DiskFull if full else errors.TritonUnknownError
        raise kind(f"responses cannot be kept: {said}") from None


def _place(identifier: bytes) -> tuple[int, int]:
    """Number of a part's first event, and how many there are."""
    first, count = identifier.split(b"-")
    return int(first) - 1, int(count)


def _life_of(owner: str) -> str:
    return f"{_PREFIX}w:{owner}"
