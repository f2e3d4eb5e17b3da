"""Stand-in for the cluster's DNS: addresses of Services, and that there are no other names."""

from __future__ import annotations

import ipaddress
import socket
import struct
import threading

from kubectl import Kubectl

_DOMAIN = ".svc.cluster.local"
_ADDRESS, _INTERNET = 1, 1
_ANSWER, _NO_SUCH_NAME = 0x8580, 0x8583


class NameServer:
    """A thread that answers on port 53, until `close`."""

    def __init__(self, address: str, kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 53))
        self._socket.settimeout(0.5)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._ended.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                query, client = self._socket.recvfrom(512)
            except TimeoutError:
                continue
            self._socket.sendto(answer(query, self._services(query)), client)

    def _services(self, query: bytes) -> dict[str, str]:
        if _DOMAIN not in f".{question(query)[0]}":
            return {}
        services = self._kubectl.objects("services", "-A").values()
        return {
            f"{one['metadata']['name']}.{one['metadata']['namespace']}{_DOMAIN}": one["spec"][
                "clusterIP"
            ]
            for one in services
            if one["spec"]["clusterIP"] != "None"
        }


def question(query: bytes) -> tuple[str, int, int]:
    """The name that is asked for, the record's type, and where the question ends."""
    labels, place = [], 12
    while length := query[place]:
        labels.append(query[place + 1 : place + 1 + length].decode())
        place += 1 + length
    (kind,) = struct.unpack_from("!H", query, place + 1)
    return ".".join(labels).lower(), kind, place + 5


def answer(query: bytes, addresses: dict[str, str]) -> bytes:
    """What the server sends: an address, no address of that type, or that there is no such name."""
    name, kind, end = question(query)
    found = [addresses[name]] if name in addresses and kind == _ADDRESS else []
    flags = _ANSWER if name in addresses else _NO_SUCH_NAME
    header = query[:2] + struct.pack("!HHHHH", flags, 1, len(found), 0, 0)
    records = [
        struct.pack("!HHHIH", 0xC00C, _ADDRESS, _INTERNET, 5, 4) + ipaddress.ip_address(one).packed
        for one in found
    ]
    return header + query[12:end] + b"".join(records)
