"""Guesses of keys: how many an address has, and all of them together."""

from __future__ import annotations

from cog_triton.front.access import GuessLimit, network_of
from cog_triton.front.message import Refused


def tried(limit: GuessLimit, address: str, key: bytes, right: bool) -> bool:
    try:
        limit.check(address, key, right)
    except Refused as refused:
        return (refused.status, refused.error.code) != (429, "E2107")
    return True


def test_guesses_are_limited_and_keys_that_were_used_before_are_not() -> None:
    now = 0.0
    limit = GuessLimit(lambda: now)
    assert tried(limit, "192.0.2.1", b"good", True)
    assert sum(tried(limit, "192.0.2.1", b"%d" % place, False) for place in range(200)) == 60
    assert not tried(limit, "192.0.2.1", b"guessed", True)
    assert tried(limit, "192.0.2.1", b"good", True)
    assert tried(limit, "192.0.2.2", b"guessed", True)
    now = 5.0
    assert sum(tried(limit, "192.0.2.1", b"%d" % place, False) for place in range(200)) == 5


def test_what_is_known_of_addresses_is_bounded() -> None:
    now = 0.0
    limit = GuessLimit(lambda: now)
    for place in range(10_000):
        now += 1
        limit.check(f"10.0.{place // 256}.{place % 256}", b"x", False)
        limit.check("192.0.2.1", b"%d" % place, True)
        limit.check(f"10.1.{place // 256}.{place % 256}", b"x", True)
    assert len(limit._peers) == len(limit._good) == 4096
    assert len(limit._good["192.0.2.1"]) == 64


def test_guesses_of_many_addresses_are_limited_together() -> None:
    now = 0.0
    limit = GuessLimit(lambda: now)

    def guessed(addresses: int, each: int = 1, of: int = 10) -> int:
        return sum(
            tried(limit, f"{of}.{place // 65536}.{place // 256 % 256}.{place % 256}", b"x", False)
            for _ in range(each)
            for place in range(addresses)
        )

    assert tried(limit, "192.0.2.1", b"good", True)
    assert guessed(1000, each=20) == 1000  # one each, as 600 are all that there may be at once
    now = 30.0
    assert guessed(1000, each=20) == 600  # 300 of all together, and one a minute of each other
    assert tried(limit, "192.0.2.2", b"new", True)  # an address that has not guessed
    assert not tried(limit, "10.0.0.1", b"new", True)
    now = 60.0
    assert guessed(20_000, of=11) == 4096 - 1000
    assert not tried(limit, "192.0.2.3", b"new", True)  # all places are taken by guessers
    assert tried(limit, "192.0.2.1", b"good", True)
    now = 1000.0
    assert tried(limit, "192.0.2.3", b"new", True)


def test_an_ipv6_network_is_one_guesser() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1")
    assert network_of("") == ""
