"""Responses in Redis or Valkey, which replicas share.

A script may be sent again after a broken connection, so each changes a response only once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from cog_triton import errors
from cog_triton.serving.openai.response_store import RUNNING, StoredResponse
from cog_triton.system.redaction import redact_address

_log = logging.getLogger(__name__)

_PREFIX = "{cog-triton:responses:1}:"
"""Of all keys; in braces, so that a cluster has them in one slot."""
_FIELDS = ("tenant", "status", "created", "previous", "input", "body", "owner")
_LIFE_S, _BEAT_S = 15.0, 3.0
# r:ID is a response. Of those that ended, o:TENANT has "ID SIZE" by age, and bytes each sum.
_REMOVE = """
local P, id = KEYS[1], ARGV[1]
local key = P..'r:'..id
local function remove(tenant, member)
  redis.call('DEL', P..'r:'..string.match(member, '^%S+'))
  if redis.call('ZREM', P..'o:'..tenant, member) == 1 then
    redis.call('ZINCRBY', P..'bytes', -string.match(member, '%d+$'), tenant)
  end
end
local size = redis.call('HSTRLEN', key, 'input') + redis.call('HSTRLEN', key, 'body')
local tenant = redis.call('HGET', key, 'tenant')
"""
_FROM_0_4 = """
local P = KEYS[1]
for _, id in ipairs(redis.call('ZRANGE', P..'ages', 0, -1)) do
  redis.call('PEXPIRE', P..'r:'..id, ARGV[1])
  redis.call('DEL', P..'e:'..id)
end
for _, t in ipairs(redis.call('ZRANGE', P..'sizes', 0, -1)) do redis.call('DEL', P..'ages:'..t) end
redis.call('DEL', P..'ages', P..'sizes', P..'size', P..'running')
"""
_DELETE = f"{_REMOVE} if tenant then remove(tenant, id..' '..size) end"
_STORE = f"""
local before, age, now, most = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
if (redis.call('HGET', KEYS[1]..'r:'..ARGV[1], 'status') or '') ~= before then return end
redis.call('HSET', KEYS[1]..'r:'..ARGV[1], 'status', unpack(ARGV, 6))
{_REMOVE}
if before == '' then redis.call('PEXPIRE', key, age) end
if ARGV[6] == '{RUNNING}' then return end
redis.call('ZADD', P..'o:'..tenant, redis.call('HGET', key, 'created'), id..' '..size)
redis.call('ZINCRBY', P..'bytes', size, tenant)
local total = 0
for _, of in ipairs(redis.call('ZRANGE', P..'bytes', 0, -1)) do
  local old = redis.call('ZRANGEBYSCORE', P..'o:'..of, 0, now - age / 1000, 'LIMIT', 0, 1000)
  for _, member in ipairs(old) do remove(of, member) end
  total = total + redis.call('ZSCORE', P..'bytes', of)
end
for _ = 1, 1000 do
  local largest = redis.call('ZREVRANGE', P..'bytes', 0, 0)[1]
  local oldest = redis.call('ZRANGE', P..'o:'..largest, 0, 0)[1]
  if total <= most or not oldest then break end
  remove(largest, oldest)
  total = total - string.match(oldest, '%d+$')
end
"""


class ResponseRedis:
    """Responses in the database at a URL, which together have `size` bytes for `age` seconds."""

    def __init__(self, url: str, size: int, age: float) -> None:
        """Raises E1005 without the client library, and for a URL that it does not take."""
        self._named = f"RESPONSE_STORE_URL={redact_address(url)!r}"
        try:
            from redis import asyncio as redis
        except ImportError as error:
            rule = "needs the package redis, of cog-triton's extra `redis`"
            raise errors.InvalidArgument(f"{self._named}: {rule}") from error
        scheme, _, rest = url.partition("://")
        timeouts = dict.fromkeys(("timeout", "socket_timeout", "socket_connect_timeout"), 5.0)
        given: dict[str, Any] = {"decode_responses": True, "health_check_interval": 10, **timeouts}
        given["retry_on_error"] = [redis.ConnectionError]  # once, as after a restart of Redis
        try:
            url = f"{scheme.replace('valkey', 'redis')}://{rest}"
            pool = redis.BlockingConnectionPool.from_url(url, **given)
        except ValueError as error:
            rule = "must be redis://, rediss:// or unix:// and an address"
            raise errors.InvalidArgument(f"{self._named}: {rule}: {error}") from error
        self._redis, self._error = redis.Redis.from_pool(pool), redis.RedisError
        self._store = self._redis.register_script(_STORE)
        self._delete = self._redis.register_script(_DELETE)
        self._owner, self._size, self._age = secrets.token_hex(8), size, age

    async def live(self, cancel: Callable[[str], None]) -> None:
        """Answer for this server's own from now on: `cancel` gets ids that others cancel.

        Raises E1005 unless it is a Redis or Valkey that answers.
        """
        try:
            await self._beat()
            adopt = self._redis.register_script(_FROM_0_4)
            await self._coded(adopt([_PREFIX], [int(self._age * 1000)]))
        except errors.CogTritonError as error:
            rule = "must be a Redis or Valkey that answers"
            raise errors.InvalidArgument(f"{self._named}: {rule}: {error.detail}") from error
        self._life = asyncio.create_task(self._live(cancel))

    async def add(self, response: StoredResponse) -> None:
        """See `ResponseStore.add`."""
        given = {**response._asdict(), "owner": self._owner, "previous": response.previous or ""}
        rest = [part for name in _FIELDS if name != "status" for part in (name, given[name])]
        await self._put(response.id, "", response.status, *rest)

    async def end(self, name: str, status: str, body: str) -> None:
        """See `ResponseStore.end`."""
        await self._put(name, RUNNING, status, "body", body)

    async def read(self, name: str, tenant: str) -> StoredResponse | None:
        """See `ResponseStore.read`."""
        found = await self._coded(self._redis.hmget(f"{_PREFIX}r:{name}", _FIELDS))
        if found[0] != tenant:
            return None
        _, status, created, previous, given, body, owner = found
        start = name, tenant, status, float(created), previous or None, given, body, owner
        if status != RUNNING or owner == self._owner:
            return StoredResponse(*start)
        alive = await self._coded(self._redis.exists(f"{_PREFIX}w:{owner}"))
        return StoredResponse(*start, alive == 1)

    async def delete(self, name: str) -> None:
        """See `ResponseStore.delete`."""
        await self._coded(self._delete([_PREFIX], [name]))

    async def cancel(self, response: StoredResponse) -> bool:
        """See `ResponseStore.cancel`; the other server waits for it."""
        key = f"{_PREFIX}c:{response.owner}"
        asked = self._redis.pipeline().rpush(key, response.id).expire(key, int(_LIFE_S))
        await self._coded(asked.execute())
        return True

    async def close(self) -> None:
        """End this server's part in it."""
        self._life.cancel()
        await self._redis.aclose()

    async def _put(self, name: str, before: str, *fields: object) -> None:
        bounds = int(self._age * 1000), time.time(), self._size
        await self._coded(self._store([_PREFIX], [name, before, *bounds, *fields]))

    async def _beat(self) -> None:
        key = f"{_PREFIX}w:{self._owner}"
        await self._coded(self._redis.set(key, 1, px=int(_LIFE_S * 1000)))

    async def _live(self, cancel: Callable[[str], None]) -> None:
        asked = [f"{_PREFIX}c:{self._owner}"]
        while True:
            try:
                await self._beat()
                if (found := await self._coded(self._redis.blpop(asked, _BEAT_S))) is not None:
                    cancel(found[1])
            except errors.CogTritonError as error:
                _log.warning("%s", error)
                await asyncio.sleep(_BEAT_S)

    async def _coded(self, asked: Any) -> Any:
        """An answer; E2302 if the memory is full, else E2100."""
        try:
            return await asked
        except self._error as error:
            kind = errors.DiskFull if "OOM" in str(error) else errors.TritonUnknownError
            raise kind(f"responses cannot be kept: {error}") from None
