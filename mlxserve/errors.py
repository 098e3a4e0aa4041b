"""Every error a person can meet, with the HTTP status and the exit code it turns into.

Knows: what went wrong in words, and how bad it is. Knows nothing of HTTP frameworks, MLX or models.

MlxServeError                 500  exit 1
├── UsageError                400  exit 2   a value, a flag or a field is wrong
│   ├── Unsupported           400  exit 2   right in itself, but not something this model or version does
│   └── PromptTooLong         400  exit 2   does not fit the context
├── ModelError                400  exit 3
│   ├── ModelNotFound         404  exit 3   no such file, alias or repository
│   ├── ModelGated            403  exit 3   the repository wants a login or a licence accepted
│   ├── ModelInvalid          400  exit 3   the files are damaged, incomplete or contradict each other
│   └── ModelUnsupported      400  exit 3   sound files that no definition here can run
├── DoesNotFit                507  exit 4   memory: the message holds both numbers
├── Busy                      429  exit 5   a queue is full; carries retry_after_s
├── Cancelled                 499  exit 130 the client went away or pressed Ctrl-C
├── EngineFailed              500  exit 70  a step raised; this request is lost, the engine goes on
│   └── EngineStopped         503  exit 70  the engine cannot go on
└── DependencyMissing         501  exit 69  a package, driver or library is absent
"""

from __future__ import annotations


class MlxServeError(Exception):
    """Base of all errors that are shown to a person as one sentence.

    `param` names the field, flag or file at fault where there is one; `code` is the
    machine-readable word that APIs put beside the message.
    """

    http_status = 500
    exit_code = 1
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return self.message


class UsageError(MlxServeError):
    http_status = 400
    exit_code = 2
    code = "invalid_value"


class Unsupported(UsageError):
    code = "unsupported"


class PromptTooLong(UsageError):
    """The prompt (plus what it asks for) exceeds a limit; `needed` and `limit` are in tokens."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, needed: int, limit: int) -> None:
        super().__init__(message, param="prompt")
        self.needed = needed
        self.limit = limit


class ModelError(MlxServeError):
    http_status = 400
    exit_code = 3
    code = "model_error"


class ModelNotFound(ModelError):
    http_status = 404
    code = "model_not_found"


class ModelGated(ModelError):
    http_status = 403
    code = "model_gated"


class ModelInvalid(ModelError):
    code = "model_invalid"


class ModelUnsupported(ModelError):
    code = "model_unsupported"


class DoesNotFit(MlxServeError):
    """Memory: `needed_bytes` of `available_bytes`; both also stand in the message."""

    http_status = 507
    exit_code = 4
    code = "insufficient_memory"

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class Busy(MlxServeError):
    http_status = 429
    exit_code = 5
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(MlxServeError):
    http_status = 499
    exit_code = 130
    code = "cancelled"


class EngineFailed(MlxServeError):
    http_status = 500
    exit_code = 70
    code = "engine_failed"


class EngineStopped(EngineFailed):
    http_status = 503
    code = "engine_stopped"


class DependencyMissing(MlxServeError):
    http_status = 501
    exit_code = 69
    code = "dependency_missing"
