"""OpenTelemetry spans, where that package is installed and set up by its own environment variables.

Knows: span names and attributes (OpenTelemetry's conventions for HTTP and generative AI). Does not know how
spans are exported. Without the package, or without a provider, nothing happens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def _trace_api() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace


def _nothing(note: Any) -> None:
    pass


def _caller(note: Any) -> Any:
    """The trace that the caller's headers name (W3C Trace Context), if any."""
    from opentelemetry import propagate

    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in note.scope["headers"]}
    return propagate.extract(headers)


@contextlib.contextmanager
def span(method: str, route: str, note: Any) -> Iterator[Callable[[Any], None]]:
    """A span around one request; the yielded function adds what is known at its end."""
    api = _trace_api()
    if api is None:
        yield _nothing
        return
    tracer = api.get_tracer("mlxserve")
    name, kind = f"{method} {route}", api.SpanKind.SERVER
    with tracer.start_as_current_span(name, context=_caller(note), kind=kind) as current:
        current.set_attribute("http.request.method", method)
        current.set_attribute("http.route", route)
        yield lambda note: _describe(current, note)


def _describe(current: Any, note: Any) -> None:
    current.set_attribute("http.response.status_code", note.status)
    state = note.scope["state"]
    if state.get("model"):
        current.set_attribute("gen_ai.request.model", state["model"])
    if note.run is not None:
        current.set_attribute("gen_ai.usage.input_tokens", note.run.usage.prompt_tokens)
        current.set_attribute("gen_ai.usage.output_tokens", note.run.usage.completion_tokens)
