"""Who may call: API keys, the Host and Origin headers, and how long a body may be.

Knows: headers and limits. Does not know what is asked for.

A page on the web can make a browser call 127.0.0.1: by a name that resolves there (DNS rebinding; the
Host header gives it away) or by a plain form post (the Origin header does). Both are refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxserve.config import ServerConfig
from mlxserve.errors import Cancelled, MlxServeError
from mlxserve.server.faults import BodyTimeout, Forbidden, NotAuthorized, TooLarge, error_response, object_for

# Open without a key: what a supervisor asks, and the page, which then asks its user for the key.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/favicon.ico"})


def is_loopback(host: str) -> bool:
    """True for localhost and any address of this machine's loopback interface."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(value: str) -> str:
    """The name in a Host header or URL authority, without port and brackets; empty where malformed."""
    try:
        return (urlsplit(f"//{value}").hostname or "").lower()
    except ValueError:
        return ""


class KeyRing:
    """API keys, compared in constant time. An empty ring lets everyone in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, headers: Headers) -> None:
        """Raises NotAuthorized unless a header carries one of the keys."""
        if not self._digests:
            return
        offered = _offered_key(headers)
        if offered is None:
            raise NotAuthorized(
                "An API key is required: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            )
        digest = _digest(offered)
        # Every key is compared, so that the time does not tell which one matched.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise NotAuthorized("The API key is not valid.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _offered_key(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or headers.get("api-key")


class Guard:
    """ASGI middleware: refuses callers before anything of the request is read."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app = app
        self._keys = KeyRing(config.api_keys)
        self._check_host = is_loopback(config.host)
        self._hosts = {host_name(name) for name in config.allowed_hosts}
        self._origins = set(config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self._check(scope["path"], headers)
            except MlxServeError as error:
                scope.setdefault("state", {})["error"] = error  # for the log and the numbers
                await error_response(error, object_for(scope["path"], headers))(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        host = host_name(headers.get("host", ""))
        if self._check_host and not (is_loopback(host) or host in self._hosts):
            raise Forbidden(f"Host '{host}' may not be used to reach this server; see --allowed-host.")
        self._check_origin(headers.get("origin"), headers.get("host", ""))
        if path not in OPEN_PATHS and not path.startswith("/static/"):
            self._keys.check(headers)

    def _check_origin(self, origin: str | None, host: str) -> None:
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        if urlsplit(origin).netloc.lower() != host.lower():
            raise Forbidden(f"Pages from {origin} may not call this server; see --cors-origin.")


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The whole body. Raises TooLarge, BodyTimeout, or Cancelled where the client left."""
    limit = config.max_body_bytes
    if _declared_length(request.headers) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await _read_up_to(request, limit)
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {config.body_timeout_s:g} s.") from None
    except ClientDisconnect:
        raise Cancelled("The client went away.") from None


def _declared_length(headers: Headers) -> int:
    value = headers.get("content-length", "0")
    return int(value) if value.isascii() and value.isdigit() else 0


async def _read_up_to(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is longer than the limit of {limit} bytes.")
