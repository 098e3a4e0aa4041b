"""Reading streams as they stand on the wire."""

from __future__ import annotations

import json
from typing import Any

import httpx


def data_of(response: httpx.Response) -> list[Any]:
    """The data of each event of a stream, [DONE] as a string; comments are skipped."""
    found = []
    for block in response.text.split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: "):
                text = line.removeprefix("data: ")
                found.append(text if text == "[DONE]" else json.loads(text))
    return found


def events_of(response: httpx.Response) -> list[tuple[str, Any]]:
    """(name, data) of each named event; the name is also in the data."""
    found = []
    for block in response.text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
            assert found[-1][0] == found[-1][1]["type"]
    return found


def lines_of(response: httpx.Response) -> list[Any]:
    """The objects of newline-delimited JSON."""
    return [json.loads(line) for line in response.text.splitlines()]
