"""Settings of ports: addresses, keys, and limits of what comes in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from pydantic import Field

from cog_triton.settings.environment_types import (
    OptionalPath,
    OptionalPort,
    OptionalSecret,
    Port,
    SettingsGroup,
)

_LOOPBACK = "127.0.0.1"


class PortSettings(SettingsGroup):
    """Public ports, and those of Triton behind them."""

    title = "Ports and addresses"

    port: Port = Field(5000, description="Cog's HTTP API is on this port.")
    openai_port: OptionalPort = Field(
        None,
        description="The OpenAI API and /metrics are on this port; 0 or unset is off."
        " `cog-triton serve` sets 8080.",
    )
    metrics_port: OptionalPort = Field(
        None, description="/metrics and /health are on this port, too; 0 is off."
    )
    cog_host: str = Field(
        "127.0.0.1",
        description="Public ports are on this address; Triton's, if `TRITON_HOST` is not set.",
    )
    triton_host: str = Field(
        "127.0.0.1",
        description="Triton's ports but gRPC are on this address. Unset: that of `COG_HOST`.",
    )
    triton_http_port: Port = Field(8000, description="Triton's HTTP API is on this port.")
    triton_grpc_port: Port = Field(
        8001, description="Triton's gRPC API is on this port of 127.0.0.1."
    )
    triton_metrics_port: Port = Field(8002, description="Triton's metrics are on this port.")

    @property
    def http_ports(self) -> dict[str, tuple[str, int]]:
        """Address and port of our own HTTP listeners that are on, by the name of the setting."""
        ports = {"OPENAI_PORT": self.openai_port, "METRICS_PORT": self.metrics_port}
        return {name: (self.cog_host, port) for name, port in ports.items() if port is not None}

    @property
    def public_triton_host(self) -> str:
        """Address of Triton's public ports: TRITON_HOST if it is set, else COG_HOST."""
        return self.triton_host if "triton_host" in self.model_fields_set else self.cog_host

    @property
    def public_ports(self) -> dict[str, tuple[str, int]]:
        """Address and port of each port of the front, by the name of its setting."""
        return {
            "PORT": (self.cog_host, self.port),
            **self.http_ports,
            "TRITON_HTTP_PORT": (self.public_triton_host, self.triton_http_port),
            "TRITON_METRICS_PORT": (self.public_triton_host, self.triton_metrics_port),
        }

    @property
    def triton_ports(self) -> dict[str, tuple[str, int]]:
        """Address and port of each of Triton's endpoints, by the name of its setting."""
        return {
            "TRITON_HTTP_PORT": (self.triton_host, self.triton_http_port),
            "TRITON_GRPC_PORT": (_LOOPBACK, self.triton_grpc_port),
            "TRITON_METRICS_PORT": (self.triton_host, self.triton_metrics_port),
        }

    def behind_front(self, private: Mapping[str, int]) -> Self:
        """Settings of Triton and its clients: its HTTP and metrics on `private` ports."""
        ports = {name.lower(): port for name, port in private.items() if name != "PORT"}
        return self.model_copy(update={"triton_host": _LOOPBACK, **ports})

    @property
    def triton_url(self) -> str:
        """URL of Triton for the serving process; Triton itself may bind every address."""
        return f"http://{url_host(self.triton_host)}:{self.triton_http_port}"


class AccessSettings(SettingsGroup):
    """Keys, and what a client may send."""

    title = "Access and limits"

    cog_triton_api_key: OptionalSecret = Field(
        None,
        description="Requests must bring this key on every port but gRPC's; health checks need"
        " none (security.md).",
    )
    openai_api_key: OptionalSecret = Field(
        None, description="This is the old name of `COG_TRITON_API_KEY`."
    )
    cog_triton_keys: OptionalPath = Field(
        None,
        description="This file, or each file of this directory, has the keys of several"
        " tenants, and is read again when it changes (tenants.md). `COG_TRITON_API_KEY` is one"
        " more key, with all rights. Triton's gRPC port is off then.",
    )
    tls_cert_file: OptionalPath = Field(
        None,
        description="This PEM file has a certificate chain, and every public port but gRPC's"
        " has TLS then. The server reads the file again when it changes (security.md).",
    )
    tls_key_file: OptionalPath = Field(
        None,
        description="This PEM file has the key of `TLS_CERT_FILE`, without a password. If"
        " unset, the key is in that file.",
    )
    metrics_public: bool = Field(False, description="/metrics needs no key although there is one.")
    openai_page: bool = Field(True, description="A page to try the model is at `/` (openai.md).")
    max_request_bytes: int = Field(
        8 << 20, ge=1, description="A body has so many bytes at most, on any port; 413 beyond."
    )
    max_header_bytes: int = Field(
        32 << 10,
        ge=256,
        description="A request's first line and headers have so many bytes at most; 431 beyond.",
    )
    max_json_values: int = Field(
        32768,
        ge=1,
        description="The JSON of a body has so many values at most; 400 beyond. In `/v1`, eight"
        " token ids count as one; numbers of Triton's tensors do not count.",
    )
    max_connections: int = Field(
        4096,
        ge=1,
        description="Clients have so many connections at most, on all ports together; fewer if"
        " the limit of open files is lower. A new one takes the place of the oldest that awaits no"
        " answer; 503 if there is none.",
    )
    request_timeout: float = Field(
        30, gt=0, description="A request arrives within so many seconds; 408 beyond."
    )
    idle_timeout: float = Field(
        75,
        gt=0,
        description="A connection that asks for nothing, or does not read its answer, is closed"
        " after so many seconds.",
    )
    max_messages: int = Field(
        4096,
        ge=1,
        description="A chat has so many messages, and a message so many parts, at most; E1005"
        " beyond.",
    )
    max_stop_sequences: int = Field(
        64,
        ge=1,
        description="A request has so many stop strings or bad words at most; E1005 beyond.",
    )
    max_sequences: int = Field(
        64,
        ge=1,
        description="A request to `/v1` has so many sequences at most, which are its prompts"
        " times `n` or `best_of`; E1005 beyond. Each takes a place of its own among"
        " `MAX_CONCURRENCY`. Of embeddings, so many run at once.",
    )
    image_hosts: str = Field(
        "",
        description="Images of `http(s)` URLs may come from these hosts, as `WEBHOOK_HOSTS` has"
        " them; from a private address only if the list names it or its network. If unset, they"
        " come from none.",
    )
    max_images: int = Field(
        16, ge=0, description="A request has so many images at most; E1005 beyond."
    )
    max_image_bytes: int = Field(
        16 << 20,
        ge=1,
        description="The images of a request have so many bytes at most; E1005 beyond.",
    )

    @property
    def api_key(self) -> str | None:
        """COG_TRITON_API_KEY, else OPENAI_API_KEY."""
        key = self.cog_triton_api_key or self.openai_api_key
        return key.get_secret_value() if key else None

    @property
    def scheme(self) -> str:
        """Of the front's URLs."""
        return "http" if self.tls_cert_file is None else "https"

    @property
    def has_tenants(self) -> bool:
        """Whether each request is of a tenant."""
        return self.cog_triton_keys is not None


def url_host(host: str) -> str:
    """Host part of a URL for `host`, an address that a server on this machine binds."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
