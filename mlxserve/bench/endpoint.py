"""Any server that speaks OpenAI's chat completions, streamed, as the one who answers.

Knows: the wire (https://platform.openai.com/docs/api-reference/chat): SSE frames, `usage` in the last one.
Tokens are counted by that usage, and by chunks where a server sends none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from mlxserve.bench.target import Ask, Heard, Totals
from mlxserve.errors import MlxServeError, UsageError

# Fields of a delta that hold text: the answer, and what reasoning servers put beside it.
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


class Endpoint:
    """A server behind the protocol of `Target`; use `Endpoint.open`."""

    kind = "endpoint"

    def __init__(self, http: httpx.AsyncClient, url: str, name: str, extra: Mapping[str, Any]) -> None:
        self.http = http
        self.url = url
        self.name = name
        self.context: int | None = None
        self.extra = dict(extra)

    @classmethod
    async def open(
        cls,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> Endpoint:
        """Reach the server at `url` (with or without /v1); `model` None takes the first that it lists.

        extra: fields put into every request's body. Raises UsageError if nobody answers, if the server wants
        another key, or if it lists no model and none was named.
        """
        base = base_url(url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        http = httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=limits)
        try:
            listed = await _models(http, base)
            name = model or next(iter(listed), None)
            if name is None:
                raise UsageError(f"{base} lists no model; name one with --model.", param="model")
        except BaseException:
            await http.aclose()
            raise
        found = cls(http, base, name, extra or {})
        found.context = listed.get(name)
        return found

    async def ask(self, question: Ask, heard: Heard) -> Totals:
        try:
            return await self._ask(self._body(question), heard)
        except httpx.HTTPError as error:
            raise MlxServeError(f"{self.url}: {_words(error)}.") from error

    async def _ask(self, body: dict[str, Any], heard: Heard) -> Totals:
        usage: Mapping[str, Any] = {}
        reason = None
        async with self.http.stream("POST", f"{self.url}/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise MlxServeError(f"{self.url} answers {response.status_code}: {await _fault(response)}")
            async for line in response.aiter_lines():
                chunk = _frame(line)
                if chunk is None:
                    continue
                if "error" in chunk:
                    raise MlxServeError(f"{self.url} broke off: {_message(chunk)}")
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    reason = choice.get("finish_reason") or reason
                    if text := _text(choice.get("delta") or {}):
                        heard(text, 1)
        details = usage.get("prompt_tokens_details") or {}
        return Totals(
            usage.get("prompt_tokens"), usage.get("completion_tokens"), details.get("cached_tokens"), reason
        )

    def _body(self, question: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": list(question.messages),
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if question.schema is not None:
            form = {"name": "answer", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return {**body, **self.extra}

    async def peak_bytes(self) -> int | None:
        return None

    async def close(self) -> None:
        await self.http.aclose()


def base_url(url: str) -> str:
    """The address that `/chat/completions` follows. Raises UsageError if it is no http address."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UsageError(f"--url {url!r} is no address: {error}.", param="url") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"--url must be like http://127.0.0.1:8080, not {url!r}.", param="url")
    bare = url.rstrip("/")
    return bare if parsed.path not in ("", "/") else f"{bare}/v1"


async def _models(http: httpx.AsyncClient, base: str) -> dict[str, int | None]:
    """Models that the server lists, with their context where it tells; none where it has no such list."""
    try:
        response = await http.get(f"{base}/models")
    except httpx.RemoteProtocolError:
        return {}
    except httpx.HTTPError as error:
        raise UsageError(f"No server answers at {base}: {_words(error)}.", param="url") from error
    if response.status_code in (401, 403):
        raise UsageError(f"{base} wants an API key; give it with --api-key.", param="api_key")
    if response.status_code != 200:
        return {}
    try:
        listed = response.json().get("data") or []
        return {item["id"]: item.get("context_length") for item in listed}
    except (ValueError, AttributeError, TypeError, KeyError):
        return {}


def _frame(line: str) -> dict[str, Any] | None:
    """The JSON object of a data line; None for heartbeats, comments and the end."""
    if not line.startswith("data:"):
        return None
    text = line[5:].strip()
    if not text or text == "[DONE]":
        return None
    try:
        chunk = json.loads(text)
    except ValueError as error:
        raise MlxServeError(f"The stream holds a frame that is no JSON: {text[:80]}") from error
    return chunk if isinstance(chunk, dict) else None


def _text(delta: Mapping[str, Any]) -> str:
    return "".join(delta.get(name) or "" for name in TEXT_FIELDS)


async def _fault(response: httpx.Response) -> str:
    await response.aread()
    try:
        return _message(response.json())
    except ValueError:
        return " ".join(response.text.split())[:200] or "no reason given"


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


def _words(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
