"""The chat page and its files, from the package.

Knows: three files and their headers. The page is an ordinary client of /v1/chat/completions.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mlxserve.server.faults import NotFound

STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing but the page's own files runs, and nothing else may frame it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@lru_cache(maxsize=16)
def _file(name: str) -> tuple[bytes, str, str]:
    """Content, type and tag. Raises NotFound; a caller's word is compared with names, and never becomes a path."""
    path = next((each for each in STATIC.iterdir() if each.name == name and each.suffix in _TYPES), None)
    if path is None:
        raise NotFound(f"There is no file {name}.")
    content = path.read_bytes()
    return content, _TYPES[path.suffix], f'"{sha256(content).hexdigest()[:16]}"'


def _answer(request: HttpRequest, name: str) -> Response:
    content, kind, tag = _file(name)
    headers = {
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": tag,
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


async def index(request: HttpRequest) -> Response:
    return _answer(request, "index.html")


async def asset(request: HttpRequest) -> Response:
    return _answer(request, request.path_params["name"])


async def favicon(request: HttpRequest) -> Response:
    return _answer(request, "icon.svg")
