"""Errors that only a server has, and every error as the JSON object that an API's clients expect.

Knows: statuses, headers and the three APIs' error objects. Does not know which request failed, or why.

    MlxServeError
    ├── NotAuthorized   401   no key, or a wrong one
    ├── Forbidden       403   a Host or an Origin that may not call
    ├── NotFound        404   no such route, or nothing stored under this id
    ├── WrongMethod     405
    ├── BodyTimeout     408   the body did not arrive
    ├── TooLarge        413   the body is longer than the limit
    └── ShuttingDown    503   a stop signal came; carries retry_after_s
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from mlxserve.errors import Busy, MlxServeError, PromptTooLong


class NotAuthorized(MlxServeError):
    http_status = 401
    code = "invalid_api_key"


class Forbidden(MlxServeError):
    http_status = 403
    code = "forbidden"


class NotFound(MlxServeError):
    http_status = 404
    code = "not_found"


class WrongMethod(MlxServeError):
    http_status = 405
    code = "method_not_allowed"


class BodyTimeout(MlxServeError):
    http_status = 408
    code = "request_timeout"


class TooLarge(MlxServeError):
    http_status = 413
    code = "request_too_large"


class ShuttingDown(Busy):
    http_status = 503
    code = "shutting_down"


ErrorObject = Callable[[MlxServeError], dict[str, Any]]

# https://platform.openai.com/docs/guides/error-codes
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
# https://docs.anthropic.com/en/api/errors
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def openai_error(error: MlxServeError) -> dict[str, Any]:
    """OpenAI's error object; `param` names the field at fault."""
    fallback = "server_error" if error.http_status >= 500 else "invalid_request_error"
    kind = _OPENAI_TYPES.get(error.http_status, fallback)
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def _naming_the_field(error: MlxServeError) -> str:
    """The sentence, for objects that have no place of their own for the field's name."""
    message = str(error)
    return message if error.param is None or error.param in message else f"{error.param}: {message}"


def anthropic_error(error: MlxServeError) -> dict[str, Any]:
    """Anthropic's error object, also the data of its `error` stream event.

    A prompt that is too long is told in the words by which agents know that they must shorten their history.
    """
    fallback = "api_error" if error.http_status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.http_status, fallback)
    message = _naming_the_field(error)
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.needed} tokens > {error.limit} maximum. {error}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def ollama_error(error: MlxServeError) -> dict[str, Any]:
    """Ollama's: one sentence."""
    return {"error": _naming_the_field(error)}


def object_for(path: str, headers: Mapping[str, str]) -> ErrorObject:
    """The error object of the API that a path belongs to."""
    if path.startswith("/api/"):
        return ollama_error
    if path.startswith("/v1/messages") or "anthropic-version" in headers:
        return anthropic_error
    return openai_error


def error_response(error: MlxServeError, shape: ErrorObject) -> Response:
    """The whole answer, with Retry-After where the error knows when to come back."""
    headers = {}
    if isinstance(error, Busy):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, NotAuthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(shape(error)),
        status_code=error.http_status,
        media_type="application/json",
        headers=headers,
    )
