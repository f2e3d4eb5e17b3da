"""Network namespaces: the networks of two machines on one, joined by a pair of interfaces (veth).

No program and no package is needed: the calls and the one message of rtnetlink(7) are here.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

ADDRESSES = ("10.255.77.1", "10.255.77.2")
"""Of the first and of the second namespace."""
NAMES = ("node0", "node1")
_NETMASK = "255.255.255.252"
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_RTM_NEWLINK, _NLM_F = 16, 0x0001 | 0x0004 | 0x0200 | 0x0400  # request, ack, excl, create
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_NET_NS_FD = 3, 18, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_IFF_UP = 1


@contextmanager
def two_namespaces() -> Iterator[tuple[int, int]]:
    """Descriptors of two joined namespaces; raises OSError where the kernel or rights lack it.

    They are gone once no process is in them and the context has ended.
    """
    with ExitStack() as stack:
        before = _opened(stack)
        try:
            both = []
            for _ in range(2):
                _call(_LIBC.unshare(_CLONE_NEWNET))
                both.append(_opened(stack))
                _bring_up("lo")
            _join(both[0])  # this thread is in the second one
            _bring_up(NAMES[1], ADDRESSES[1])
            _call(_LIBC.setns(both[0], _CLONE_NEWNET))
            _bring_up(NAMES[0], ADDRESSES[0])
        finally:
            _call(_LIBC.setns(before, _CLONE_NEWNET))
        yield both[0], both[1]


@contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Have this thread, and the threads and processes that it starts meanwhile, in a namespace."""
    with ExitStack() as stack:
        before = _opened(stack)
        _call(_LIBC.setns(namespace, _CLONE_NEWNET))
        try:
            yield
        finally:
            _call(_LIBC.setns(before, _CLONE_NEWNET))


def own_shared_memory() -> None:
    """Give this thread for good, and what it starts, an empty /dev/shm of its own.

    vLLM takes processes that see the same one for those of one machine.
    """
    _call(_LIBC.unshare(_CLONE_NEWNS))
    _call(_LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _call(_LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None))


def _opened(stack: ExitStack) -> int:
    descriptor = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def _call(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _attribute(kind: int, value: bytes) -> bytes:
    size = 4 + len(value)
    return struct.pack("=HH", size, kind) + value + bytes(-size % 4)


def _join(other: int) -> None:
    """Make a pair of interfaces: one here, its peer in the namespace `other`."""
    interface = bytes(16)  # struct ifinfomsg
    peer = interface + _attribute(_IFLA_IFNAME, NAMES[0].encode() + b"\0")
    peer += _attribute(_IFLA_NET_NS_FD, struct.pack("=i", other))
    data = _attribute(_IFLA_INFO_DATA, _attribute(_VETH_INFO_PEER, peer))
    info = _attribute(_IFLA_INFO_KIND, b"veth\0") + data
    body = interface + _attribute(_IFLA_IFNAME, NAMES[1].encode() + b"\0")
    body += _attribute(_IFLA_LINKINFO, info)
    header = struct.pack("=IHHII", 16 + len(body), _RTM_NEWLINK, _NLM_F, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as asking:
        asking.bind((0, 0))
        asking.send(header + body)
        (code,) = struct.unpack_from("=i", asking.recv(4096), 16)
    if code:
        raise OSError(-code, f"no pair of interfaces (veth): {os.strerror(-code)}")


def _bring_up(name: str, address: str = "") -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        packed = name.encode().ljust(16, b"\0")
        for number, value in (
            ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, _NETMASK)) if address else ()
        ):
            where = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(asking, number, packed + where)
        fcntl.ioctl(asking, _SIOCSIFFLAGS, packed + struct.pack("=h14x", _IFF_UP))
