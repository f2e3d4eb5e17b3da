"""Credentials of registries, as docker and podman keep them: files, and credential helpers."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cog_triton.errors import InvalidArgument

_HELPER_TIMEOUT_S = 60
_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "docker.io")
_HELPER = re.compile(r"[\w.-]+")
_TOKEN_USER = "<token>"


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
    for path in config_files(environment):
        try:
            config = json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            kind = type(error).__name__  # the text of a JSON error may quote the file
            raise InvalidArgument(f"{path}: cannot be read as credentials ({kind})") from None
        if isinstance(config, dict) and (found := _of_config(config, path, host, repository)):
            return found
    return None


def config_files(environment: Mapping[str, str]) -> Iterator[Path]:
    """Where docker and podman keep credentials, in the order they are asked here."""
    home = Path(environment.get("HOME") or Path.home())
    if named := environment.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
    yield Path(environment.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers/auth.json"
    yield Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "containers/auth.json"


def _of_config(
    config: dict[str, Any], path: Path, host: str, repository: str
) -> Credentials | None:
    keys = list(_keys(host, repository))
    helpers = config.get("credHelpers")
    named = [helpers[key] for key in keys if key in helpers] if isinstance(helpers, dict) else []
    for helper in [*named, *([config["credsStore"]] if config.get("credsStore") else [])]:
        for key in keys:
            if found := _from_helper(str(helper), key, path):
                return found
    entries = config.get("auths")
    if not isinstance(entries, dict):
        return None
    for key in keys:
        entry = entries.get(key, entries.get(f"https://{key}"))
        if isinstance(entry, dict) and (found := _from_entry(entry, path, key)):
            return found
    return None


def _keys(host: str, repository: str) -> Iterator[str]:
    """Keys of a registry: podman's may have a path, the longest of which is meant."""
    parts = repository.split("/")
    for count in range(len(parts), 0, -1):
        yield "/".join((host, *parts[:count]))
    yield from _HUB_KEYS if host == "docker.io" else (host,)


def _from_entry(entry: Mapping[str, Any], path: Path, key: str) -> Credentials | None:
    try:
        user, _, password = base64.b64decode(entry.get("auth") or "").decode().partition(":")
    except (binascii.Error, ValueError, TypeError):
        raise InvalidArgument(f"{path}: auths of {key!r}: auth is no base64") from None
    user, password = entry.get("username") or user, entry.get("password") or password
    token = entry.get("identitytoken") or None
    found = Credentials(str(user), str(password).rstrip("\0"), token)
    return found if found.user or token else None


def _from_helper(helper: str, key: str, path: Path) -> Credentials | None:
    """What ``docker-credential-HELPER get`` says of `key`; an exit code is for having none."""
    if not _HELPER.fullmatch(helper):
        raise InvalidArgument(f"{path}: credential helper {helper[:80]!r}: is no name")
    program = f"docker-credential-{helper}"
    try:
        asked = subprocess.run(
            [program, "get"],
            input=key.encode(),
            capture_output=True,
            timeout=_HELPER_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise InvalidArgument(f"{path}: names {program}, which is not in PATH") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidArgument(f"{program}: {type(error).__name__}") from None
    if asked.returncode:
        return None
    try:
        answer = json.loads(asked.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError):
        raise InvalidArgument(f"{program}: its answer is not docker's") from None
    return Credentials(identity_token=secret) if user == _TOKEN_USER else Credentials(user, secret)
