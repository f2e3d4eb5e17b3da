"""Authentication at a registry: its Bearer or Basic challenge, answered to its own host alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Generator

import httpx

from cog_triton.oci.credentials import Credentials
from cog_triton.oci.reference import is_loopback

_CHALLENGE = re.compile(r"\b(Bearer|Basic)\b((?:\s*,?\s*\w+=(?:\"[^\"]*\"|[^\s,\"]+))*)", re.I)
_PARAMETER = re.compile(r"(\w+)=(?:\"([^\"]*)\"|([^\s,\"]+))")
_TIMEOUT_S = 30.0
_MAX_TOKEN = 1 << 20
_CLIENT = "cog-triton"


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
        plain = realm.scheme == "http" and (
            self._origin[0] == "http" or is_loopback(realm.netloc.decode())
        )
        if not (realm.scheme == "https" or plain) or not realm.host:
            self.problem = "its token service is not reached by https"
            return None
        query = {key: challenge[key] for key in ("service", "scope") if challenge.get(key)}
        known = self._credentials
        try:
            # Not followed: a redirect would take the password with it.
            with httpx.Client(follow_redirects=False, timeout=_TIMEOUT_S) as client:
                if known is not None and known.identity_token:
                    form = {"grant_type": "refresh_token", "refresh_token": known.identity_token}
                    response = client.post(realm, data={**form, **query, "client_id": _CLIENT})
                else:
                    headers = {"Authorization": known.basic} if known else {}
                    response = client.get(realm.copy_merge_params(query), headers=headers)
        except httpx.HTTPError as error:
            self.problem = f"its token service {realm.host}: {type(error).__name__}"
            return None
        if not response.is_success or len(response.content) > _MAX_TOKEN:
            self.problem = f"its token service {realm.host} answers HTTP {response.status_code}"
            return None
        try:
            answer = response.json()
            token = answer.get("token") or answer.get("access_token")
        except (ValueError, AttributeError):
            token = None
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            self.problem = f"its token service {realm.host} gives no token"
            return None
        return f"Bearer {token}"


def _place(url: httpx.URL) -> tuple[str, str, int | None]:
    """What makes two URLs one place for a secret: scheme, host, port."""
    return url.scheme, url.host, url.port
