"""Open connections and bytes of request bodies, counted over all ports together."""

from __future__ import annotations

from typing import Protocol


class Closable(Protocol):
    """A connection that may be closed while it is idle."""

    @property
    def is_idle(self) -> bool:
        """Whether closing it loses nothing."""
        ...

    @property
    def is_answered(self) -> bool:
        """Whether a request has arrived whole, and its answer has not left whole."""
        ...

    @property
    def has_unread(self) -> bool:
        """Whether something was written that its client has not taken."""
        ...

    def close(self) -> None:
        """Close it."""
        ...

    def abort(self) -> None:
        """Close it at once."""
        ...


class Connections:
    """At most `limit` connections; a new one takes the place of the oldest that awaits no answer.

    Age counts from the last answer. A request that arrives slowly has no more right than none.

    The bodies that they hold have at most `body_bytes` together.
    """

    def __init__(self, limit: int, body_bytes: int) -> None:
        self._limit = limit
        self._free_bytes = body_bytes
        self._open: dict[Closable, None] = {}
        self.stopping = False
        """Whether no connection is kept for another request."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def busy(self) -> bool:
        """Whether a connection has a request that arrives or is answered."""
        return not all(one.is_idle for one in self._open)

    @property
    def answering(self) -> bool:
        """Whether a connection awaits the end of an answer."""
        return any(one.is_answered for one in self._open)

    @property
    def has_unread(self) -> bool:
        """Whether a client has not taken what was written."""
        return any(one.has_unread for one in self._open)

    def refuse_reuse(self) -> None:
        """Close idle connections, and from now on each one after its next answer."""
        self.stopping = True
        for connection in [one for one in self._open if one.is_idle]:
            connection.close()

    def add(self, connection: Closable) -> bool:
        """Count one more; whether there is room for it."""
        if len(self._open) >= self._limit and not self._close_one():
            return False
        self._open[connection] = None
        return True

    def remove(self, connection: Closable) -> None:
        """Count one less."""
        self._open.pop(connection, None)

    def used(self, connection: Closable) -> None:
        """Make it the last one to be closed."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def take_bytes(self, count: int) -> bool:
        """Take so many bytes for a body; whether they were free."""
        if count > self._free_bytes:
            return False
        self._free_bytes -= count
        return True

    def give_bytes(self, count: int) -> None:
        """Give back what was taken."""
        self._free_bytes += count

    def abort_all(self) -> None:
        """Close every connection at once."""
        for connection in list(self._open):
            connection.abort()

    def _close_one(self) -> bool:
        oldest = next((one for one in self._open if not one.is_answered), None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.close()
        return True
