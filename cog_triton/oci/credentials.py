"""Credentials of registries, as docker and podman keep them, and how a registry is given them."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cog_triton.errors import InvalidArgument
from cog_triton.oci.reference import is_loopback
from cog_triton.system.paths import expanded

_HELPER_TIMEOUT_S = 60
_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "docker.io")
_HELPER = re.compile(r"[\w.-]+")
_TOKEN_USER = "<token>"
_CHALLENGE = re.compile(r"\b(Bearer|Basic)\b((?:\s*,?\s*\w+=(?:\"[^\"]*\"|[^\s,\"]+))*)", re.I)
_PARAMETER = re.compile(r"(\w+)=(?:\"([^\"]*)\"|([^\s,\"]+))")
_TIMEOUT_S = 30.0
_MAX_TOKEN = 1 << 20
_CLIENT = "cog-triton"


@dataclass(frozen=True)
class Credentials:
    """User and password, or an identity token that is exchanged for others."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str | None = field(default=None, repr=False)

    @property
    def basic(self) -> str:
        """Value of the header ``Authorization``."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def find(
    host: str, repository: str, environment: Mapping[str, str] = os.environ
) -> Credentials | None:
    """Credentials of `host`, the most specific of the first file that has some; None is nobody.

    Raises:
        InvalidArgument: a file or helper is broken; names it, and nothing of what is in it.
    """
    # Podman's keys may have a path, the longest of which is meant.
    parts = [host, *repository.split("/")]
    keys = ["/".join(parts[:count]) for count in range(len(parts), 1, -1)]
    keys += _HUB_KEYS if host == "docker.io" else (host,)
    for path in config_files(environment):
        try:
            config = json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            kind = type(error).__name__  # the text of a JSON error may quote the file
            raise InvalidArgument(f"{path}: cannot be read as credentials ({kind})") from None
        if isinstance(config, dict) and (found := _of_config(config, path, keys)):
            return found
    return None


def config_files(environment: Mapping[str, str]) -> Iterator[Path]:
    """Where docker and podman keep credentials, in the order they are asked here."""
    home = expanded(environment.get("HOME") or "~")
    if named := environment.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
    yield Path(environment.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers/auth.json"
    yield Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "containers/auth.json"


def _of_config(config: dict[str, Any], path: Path, keys: Sequence[str]) -> Credentials | None:
    helpers, entries = (
        value if isinstance(value, dict) else {}
        for value in (config.get("credHelpers"), config.get("auths"))
    )
    named = [helpers[key] for key in keys if key in helpers]
    for helper in [*named, *filter(None, [config.get("credsStore")])]:
        for key in keys:
            if found := _from_helper(str(helper), key, path):
                return found
    for key in keys:
        entry = entries.get(key, entries.get(f"https://{key}"))
        if isinstance(entry, dict) and (found := _from_entry(entry, path, key)):
            return found
    return None


def _from_entry(entry: Mapping[str, Any], path: Path, key: str) -> Credentials | None:
    try:
        user, _, password = base64.b64decode(entry.get("auth") or "").decode().partition(":")
    except (ValueError, TypeError):
        raise InvalidArgument(f"{path}: auths of {key!r}: auth is no base64") from None
    user, password = entry.get("username") or user, entry.get("password") or password
    token = entry.get("identitytoken") or None
    found = Credentials(str(user), str(password).rstrip("\0"), token)
    return found if found.user or token else None


def _from_helper(helper: str, key: str, path: Path) -> Credentials | None:
    """What ``docker-credential-HELPER get`` says of `key`; an exit code is for having none."""
    if not _HELPER.fullmatch(helper):
        raise InvalidArgument(f"{path}: credential helper {helper[:80]!r}: is no name")
    command = [f"docker-credential-{helper}", "get"]
    try:
        asked = subprocess.run(
            command, input=key.encode(), capture_output=True, timeout=_HELPER_TIMEOUT_S, check=False
        )
        if asked.returncode:
            return None
        answer = json.loads(asked.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except FileNotFoundError:
        raise InvalidArgument(f"{path}: names {command[0]}, which is not in PATH") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidArgument(f"{command[0]}: {type(error).__name__}") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidArgument(f"{command[0]}: its answer is not docker's") from None
    return Credentials(identity_token=secret) if user == _TOKEN_USER else Credentials(user, secret)


class RegistryAuth(httpx.Auth):
    """Authorization header of requests to the registry at `origin`.

    Tokens are fetched at a challenge, and anew when one has expired, as in long downloads. What
    another host answers, after a redirect, is no challenge, and it gets no header.

    Args:
        credentials: None for nobody's.
    """

    def __init__(self, origin: httpx.URL, credentials: Credentials | None) -> None:
        self._origin = _place(origin)
        self._credentials = credentials
        self._lock = threading.Lock()
        self._header: str | None = None
        self.problem: str | None = None
        """Why there is no token, for the error that a 401 becomes."""

    def sync_auth_flow(
        self, request: httpx.Request
    ) -> Generator[httpx.Request, httpx.Response, None]:
        """As httpx asks: the request, and after a challenge the request again."""
        if _place(request.url) != self._origin:
            yield request
            return
        sent = self._header
        if sent is not None:
            request.headers["Authorization"] = sent
        response = yield request
        if response.status_code != 401 or _place(response.request.url) != self._origin:
            return
        header = self._answer(response.headers.get_list("www-authenticate"), sent)
        if header is not None:
            request.headers["Authorization"] = header
            yield request

    def _answer(self, challenges: list[str], sent: str | None) -> str | None:
        """The header that answers a challenge to a request `sent` with another; None without."""
        with self._lock:
            if self._header is not None and self._header != sent:
                return self._header  # another thread was faster
            found: dict[str, dict[str, str]] = {}
            for scheme, parameters in _CHALLENGE.findall(", ".join(challenges)):
                values = {
                    key.lower(): one or two for key, one, two in _PARAMETER.findall(parameters)
                }
                found.setdefault(scheme.lower(), values)
            self.problem = None if self._credentials else "no credentials for it are here"
            if "bearer" in found:
                self._header = self._token(found["bearer"])
            elif "basic" in found and self._credentials is not None:
                basic = self._credentials.basic
                self._header = None if basic == sent else basic
            else:
                self._header = None
            return self._header

    def _token(self, challenge: dict[str, str]) -> str | None:
        try:
            realm = httpx.URL(challenge.get("realm", ""))
        except httpx.InvalidURL:
            realm = httpx.URL("")
        local = self._origin[0] == "http" or is_loopback(realm.netloc.decode())
        if realm.scheme not in ("https", *(["http"] if local else [])) or not realm.host:
            self.problem = "its token service is not reached by https"
            return None
        query = {key: challenge[key] for key in ("service", "scope") if challenge.get(key)}
        known = self._credentials
        why = "gives no token"
        try:
            # Not followed: a redirect would take the password with it.
            with httpx.Client(follow_redirects=False, timeout=_TIMEOUT_S) as client:
                if known is not None and known.identity_token:
                    form = {"grant_type": "refresh_token", "refresh_token": known.identity_token}
                    response = client.post(realm, data={**form, **query, "client_id": _CLIENT})
                else:
                    headers = {"Authorization": known.basic} if known else {}
                    response = client.get(realm.copy_merge_params(query), headers=headers)
            if response.is_success and len(response.content) <= _MAX_TOKEN:
                answer = response.json()
                token = answer.get("token") or answer.get("access_token")
                if isinstance(token, str) and token.isascii() and token.isprintable():
                    return f"Bearer {token}"
            else:
                why = f"answers HTTP {response.status_code}"
        except httpx.HTTPError as error:
            why = f"cannot be asked: {type(error).__name__}"
        except (ValueError, AttributeError):
            pass  # no JSON, or no object
        self.problem = f"its token service {realm.host} {why}"
        return None


def _place(url: httpx.URL) -> tuple[str, str, int | None]:
    """What makes two URLs one place for a secret: scheme, host, port."""
    return url.scheme, url.host, url.port
