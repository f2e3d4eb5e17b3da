"""Stand-in for kube-proxy, where there is none: rules of iptables for the Services of a cluster."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

_CHAIN = "COG-TRITON-SERVICES"
_PERIOD_S = 0.3


class ServiceRules:
    """Connections to a Service go to a ready endpoint at random, until `close`."""

    def __init__(self, server: str, pki: Path) -> None:
        context = ssl.create_default_context(cafile=pki / "ca.crt")
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self._client = httpx.Client(base_url=server, verify=context, trust_env=False)
        self._written: list[str] | None = None
        self._ended = threading.Event()
        for hook in ("OUTPUT", "PREROUTING"):
            _restore([f":{_CHAIN} - [0:0]", f"-A {hook} -j {_CHAIN}"])
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Write no more; the rules end with their namespace."""
        self._ended.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            try:
                services = self._listed("/api/v1/services")
                slices = self._listed("/apis/discovery.k8s.io/v1/endpointslices")
            except httpx.HTTPError:
                continue
            if (rules := [*_rules(services, slices)]) != self._written:
                _restore([f":{_CHAIN} - [0:0]", f"-F {_CHAIN}", *rules])
                self._written = rules

    def _listed(self, path: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self._client.get(path).raise_for_status().json()["items"]
        return items


def _rules(services: list[dict[str, Any]], slices: list[dict[str, Any]]) -> Iterator[str]:
    ends: Mapping[tuple[str, str], list[str]] = defaultdict(list)
    for one in slices:
        name = one["metadata"]["labels"].get("kubernetes.io/service-name", "")
        for port in one["ports"] or ():
            for endpoint in one["endpoints"] or ():
                if endpoint["conditions"].get("ready"):
                    address = f"{endpoint['addresses'][0]}:{port['port']}"
                    ends[name, port.get("name") or ""].append(address)
    for service in services:
        address = service["spec"].get("clusterIP", "None")
        for port in service["spec"].get("ports", ()) if address != "None" else ():
            found = sorted(ends[service["metadata"]["name"], port.get("name") or ""])
            for place, end in enumerate(found):
                share = f"-m statistic --mode random --probability {1 / (len(found) - place):.6f}"
                yield (
                    f"-A {_CHAIN} -d {address}/32 -p tcp --dport {port['port']} {share}"
                    f" -j DNAT --to-destination {end}"
                )


def _restore(lines: list[str]) -> None:
    text = "\n".join(["*nat", *lines, "COMMIT", ""])
    command = ["iptables-restore", "--noflush"]
    subprocess.run(command, input=text, text=True, check=True, capture_output=True)
