"""OpenAI's /v1/files: training data that clients upload, and what jobs leave behind.

Knows: files on disk under their ids, https://platform.openai.com/docs/api-reference/files. Does not know what
is in them. A caller's word never becomes a path: ids are looked up, names are kept as text only.

    data_dir/files/<id>/meta.json     written last, so that a file that lacks it was never whole
                       <id>.jsonl
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.types import Message

from mlxserve.config import ServerConfig
from mlxserve.errors import Cancelled, DoesNotFit, Unsupported, UsageError
from mlxserve.server.answer import json_response, service_of
from mlxserve.server.faults import BodyTimeout, NotFound, TooLarge

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
FORM_BYTES = 64 * 1024  # of a form beside the file itself
META = "meta.json"


class StoredFile(msgspec.Struct):
    """One file's facts. `suffix` tells readers the format."""

    id: str
    filename: str
    purpose: str
    nbytes: int
    created: int
    suffix: str = ".jsonl"

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.nbytes,
            "created_at": self.created,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """Files of one folder, at most `limit_bytes` of them. Methods touch the disk: call them off the loop."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._files = {file.id: file for file in _found(folder)}

    def listed(self) -> list[StoredFile]:
        """The newest first."""
        return sorted(self._files.values(), key=lambda file: (-file.created, file.id))

    def get(self, file_id: str) -> StoredFile:
        """Raises NotFound."""
        found = self._files.get(file_id)
        if found is None:
            raise NotFound(f"There is no file '{file_id}'.", param="file_id")
        return found

    def path(self, file_id: str) -> Path:
        """Where the content lies. Raises NotFound."""
        file = self.get(file_id)
        return self.folder / file.id / f"{file.id}{file.suffix}"

    def add(self, filename: str, purpose: str, source: BinaryIO, nbytes: int) -> StoredFile:
        """Keep a copy, whole or not at all. Raises DoesNotFit where the store is full."""
        held = sum(file.nbytes for file in self._files.values())
        if held + nbytes > self.limit_bytes:
            raise DoesNotFit(
                f"The files here take {held:,} bytes, this one {nbytes:,}, and {self.limit_bytes:,} are allowed; "
                "delete some.",
                needed_bytes=nbytes,
                available_bytes=self.limit_bytes - held,
            )
        suffix = Path(filename).suffix.lower()
        suffix = suffix if suffix in SUFFIXES else ".jsonl"
        file_id = f"file-{secrets.token_hex(12)}"
        file = StoredFile(file_id, filename[:255], purpose, nbytes, int(time.time()), suffix)
        place = self.folder / file_id
        place.mkdir(mode=0o700, parents=True)
        try:
            with (place / f"{file_id}{suffix}").open("wb") as target:
                shutil.copyfileobj(source, target)
            (place / META).write_bytes(msgspec.json.encode(file))
        except OSError:
            shutil.rmtree(place, ignore_errors=True)
            raise
        self._files[file_id] = file
        return file

    def remove(self, file_id: str) -> None:
        """Raises NotFound."""
        del self._files[self.get(file_id).id]
        shutil.rmtree(self.folder / file_id, ignore_errors=True)


def _found(folder: Path) -> Iterator[StoredFile]:
    """Whole files; what an upload that broke off has left goes."""
    for place in folder.iterdir() if folder.is_dir() else ():
        try:
            yield msgspec.json.decode((place / META).read_bytes(), type=StoredFile)
        except (OSError, msgspec.MsgspecError):
            shutil.rmtree(place, ignore_errors=True)


# The calls.


def store_of(request: HttpRequest) -> FileStore:
    """Raises Unsupported where the server keeps no files."""
    store: FileStore | None = request.app.state.files
    if store is None:
        raise Unsupported("This server keeps no files; start it with --data-dir.")
    return store


async def upload(request: HttpRequest) -> Response:
    store, config = store_of(request), service_of(request).config
    form = await _form(request, config)
    try:
        file = await _keep(form, store, config)
    finally:
        await form.close()
    return json_response(file.shown())


async def _form(request: HttpRequest, config: ServerConfig) -> FormData:
    """The multipart form, its file on disk. Raises TooLarge, BodyTimeout, UsageError, Cancelled."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise UsageError(
            "Send the file as multipart/form-data with the fields file and purpose.", param="file"
        )
    bounded = HttpRequest(request.scope, _bounded(request, config.max_file_bytes + FORM_BYTES))
    try:
        async with asyncio.timeout(config.upload_timeout_s):
            return await bounded.form(max_files=1, max_fields=8, max_part_size=FORM_BYTES)
    except HTTPException as error:
        raise UsageError(f"The form cannot be read: {error.detail}", param="file") from None
    except TimeoutError:
        raise BodyTimeout(f"The file did not arrive within {config.upload_timeout_s:g} s.") from None
    except ClientDisconnect:
        raise Cancelled("The client went away.") from None


def _bounded(request: HttpRequest, limit: int) -> Any:
    """The request's own `receive`, which raises TooLarge once more than `limit` bytes have come."""
    taken = 0

    async def receive() -> Message:
        nonlocal taken
        message = await request.receive()
        taken += len(message.get("body", b""))
        if taken > limit:
            raise TooLarge(f"The file is longer than the limit of {limit - FORM_BYTES} bytes.")
        return message

    return receive


async def _keep(form: FormData, store: FileStore, config: ServerConfig) -> StoredFile:
    unknown = sorted(set(form) - {"file", "purpose"})
    if unknown:
        raise Unsupported(f"'{unknown[0]}' is not a field this server knows.", param=unknown[0])
    content, purpose = form.get("file"), form.get("purpose")
    if not isinstance(content, UploadFile):
        raise UsageError("'file' is required, as a file.", param="file", code="missing_field")
    if purpose != "fine-tune":
        raise Unsupported(f"The purpose must be 'fine-tune', not {purpose!r}.", param="purpose")
    size = content.size or 0
    if size > config.max_file_bytes:
        raise TooLarge(f"The file is longer than the limit of {config.max_file_bytes} bytes.")
    if size == 0:
        raise UsageError("The file is empty.", param="file")
    return await asyncio.to_thread(store.add, content.filename or "file", purpose, content.file, size)


async def list_files(request: HttpRequest) -> Response:
    query = request.query_params
    files = [f for f in store_of(request).listed() if query.get("purpose") in (None, f.purpose)]
    if ascending(query):
        files.reverse()
    items = [file.shown() for file in files]
    return json_response(page_of(items, query, most=10_000, also=("purpose", "order")))


def ascending(query: Mapping[str, str]) -> bool:
    """What `order` says; the newest come first unless it says asc. Raises UsageError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise UsageError(f"order must be asc or desc, not {order!r}.", param="order")
    return order == "asc"


def page_of(
    items: list[dict[str, Any]], query: Mapping[str, str], *, most: int = 100, also: Sequence[str] = ()
) -> dict[str, Any]:
    """OpenAI's list object: `limit` items behind the one whose id `after` names.

    also: what the query may say beside. Raises UsageError, and Unsupported for anything else in the query.
    """
    refuse_unknown(query, ("after", "limit", *also))
    after, text = query.get("after"), query.get("limit")
    limit = most if text is None else int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= limit <= most:
        raise UsageError(f"limit must be a whole number from 1 to {most}, not {text!r}.", param="limit")
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise UsageError(f"after names '{after}', which is not in this list.", param="after")
        items = items[ids.index(after) + 1 :]
    data = items[:limit]
    edge = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, "has_more": len(items) > limit, **edge}


def refuse_unknown(query: Mapping[str, str], known: Sequence[str]) -> None:
    """Unsupported that names what the query says beyond `known`."""
    for name in query:
        if name not in known:
            raise Unsupported(f"'{name}' is not a query parameter of this path.", param=name)


async def retrieve(request: HttpRequest) -> Response:
    return json_response(store_of(request).get(request.path_params["id"]).shown())


async def content(request: HttpRequest) -> Response:
    store, file_id = store_of(request), request.path_params["id"]
    return FileResponse(store.path(file_id), media_type="application/octet-stream")


async def delete(request: HttpRequest) -> Response:
    file_id = request.path_params["id"]
    await asyncio.to_thread(store_of(request).remove, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})
