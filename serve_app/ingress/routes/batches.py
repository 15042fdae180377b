"""Files, OpenAI's batches and Anthropic's message batches, of the caller's tenant. Headers tell Anthropic's clients."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from serve_app.api.request import ignored_fields
from serve_app.batch.batches import OF_INPUT, StoredBatch, new_id
from serve_app.batch.files import MAX_FILE_BYTES, File
from serve_app.batch.wire import (
    BatchBody,
    MessageBatchBody,
    PageQuery,
    anthropic_batch,
    anthropic_file,
    expiry_of,
    openai_batch,
    page,
)
from serve_app.errors import Conflict, InvalidRequest, NotFound
from serve_app.ingress.address import Address
from serve_app.ingress.batches import BatchDesk
from serve_app.ingress.entrance import arrive
from serve_app.ingress.http import WARNING, body_parts, json_response, read_body
from serve_app.ingress.multipart import read_form
from serve_app.ingress.routes.handler import ANTHROPIC, SMALL_BODY_BYTES, guarded, speaks_anthropic, takes
from serve_app.ingress.shared import BODIES

router = APIRouter(tags=["batches"])

BATCHES_PATH = "/v1/messages/batches"
PURPOSES = ("batch", "user_data", "assistants", "evals", "fine-tune", "vision")
DAY_S = 86_400.0


def _desk(request: Request, address: Address) -> tuple[BatchDesk, str]:
    """Return the desk, and the name of the caller's tenant. Raises NotFound if there are no batches here."""
    tenant = address.guard.tenant(request).name
    if (desk := address.batches) is None:
        raise NotFound(
            "This server keeps no files and batches (setting files_max_bytes, or no database); `warmpath infer` "
            "answers a file of requests."
        )
    return desk, tenant


@router.post("/v1/files", openapi_extra={"requestBody": {"content": {"multipart/form-data": {"schema": {
    "type": "object", "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
}}}, "required": True}})  # fmt: skip
@guarded("files", None)
async def create_file(request: Request, address: Address) -> Response:
    """Upload a file (a form with `file`, `purpose`, and `expires_after[seconds]`), at most 200 MiB."""
    desk, tenant = _desk(request, address)
    content: tuple[str, str, int] | None = None

    async def take(filename: str, parts: AsyncIterator[bytes]) -> None:
        nonlocal content
        if content is not None:
            raise InvalidRequest("The form holds two files; send one.", param="file")
        content = (
            filename,
            *await desk.files.write(tenant, parts, desk.objects.ttl_s, await desk.batches.room(tenant)),
        )

    with arrive(address, address.guard.tenant(request)):
        try:
            too_large = f"A file may have {MAX_FILE_BYTES >> 20} MiB; send several."
            parts = body_parts(request, MAX_FILE_BYTES + (1 << 20), too_large)
            form = await read_form(request.headers.get("content-type", ""), parts, take, "file")
            if content is None:
                raise InvalidRequest("The form has no file in its field file.", param="file")
            default = "user_data" if speaks_anthropic(request) else ""
            if (purpose := form.get("purpose", default)) not in PURPOSES:
                raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}.", param="purpose")
            file = await desk.files.create(tenant, *content, purpose, expiry_of(form))
        except BaseException:
            if content is not None:
                await desk.files.discard(tenant, content[1])
            raise
    return json_response(_shown_file(request, file))


@router.get("/v1/files")
@guarded("files", None)
async def files(request: Request, address: Address) -> Response:
    """The files, the newest first; `after`, `limit`, `order`, `purpose`; Anthropic's `page`, `limit`, `ids[]`."""
    desk, tenant = _desk(request, address)
    of_anthropic, ids = speaks_anthropic(request), set(request.query_params.getlist("ids[]"))
    asked = PageQuery.checked({"limit": "20" if of_anthropic and not ids else "10000", **request.query_params})

    def listed(found: list[File]) -> msgspec.Raw:
        chosen = [one for one in found if asked.purpose in (None, one.purpose) and (not ids or one.id in ids)]
        shown = page(chosen, asked, "file-", partial(_shown_file, request))
        more = {"next_page": shown["last_id"] if shown["has_more"] else None} if of_anthropic else {"object": "list"}
        return msgspec.Raw(msgspec.json.encode({**more, **shown}))

    return json_response(await desk.files.listed(tenant, listed))


@router.get("/v1/files/{file_id}")
@guarded("files", None)
async def file(request: Request, address: Address, file_id: str) -> Response:
    """One file, without its content."""
    desk, tenant = _desk(request, address)
    return json_response(_shown_file(request, await desk.files.get(tenant, file_id)))


@router.get("/v1/files/{file_id}/content")
@guarded("files", None)
async def file_content(request: Request, address: Address, file_id: str) -> Response:
    """The content of a file."""
    desk, tenant = _desk(request, address)
    found = await desk.files.get(tenant, file_id)
    return await _content(desk, tenant, found.content, found.bytes, "application/octet-stream")


@router.delete("/v1/files/{file_id}")
@guarded("files", None)
async def delete_file(request: Request, address: Address, file_id: str) -> Response:
    """Delete a file. One that a batch in progress reads stays (409)."""
    desk, tenant = _desk(request, address)
    content = (await desk.files.get(tenant, file_id)).content
    for batch in await desk.batches.open(tenant):
        if batch.content == content:
            raise Conflict(f"The batch {batch.id} still reads this file; cancel it first.", param="file_id")
    await desk.files.delete(tenant, file_id)
    gone = {"type": "file_deleted"} if speaks_anthropic(request) else {"object": "file", "deleted": True}
    return json_response({"id": file_id, **gone})


@router.post("/v1/batches", **takes(BatchBody))
@guarded("batches")
async def create_batch(request: Request, address: Address) -> Response:
    """Answer an uploaded file's requests, when nothing else waits; the results are files."""
    desk, tenant = _desk(request, address)
    with arrive(address, address.guard.tenant(request)) as arrival:
        raw = await read_body(request, min(SMALL_BODY_BYTES, address.config.max_body_bytes), arrival.grow)
        body = BatchBody.parse(raw)
        try:
            source = await desk.files.get(tenant, body.input_file_id)
        except NotFound as error:
            raise InvalidRequest(error.message, param="input_file_id", code="file_not_found") from error
        if source.purpose != "batch":
            raise InvalidRequest(f"The file's purpose is {source.purpose}; upload it as batch.", param="input_file_id")
        now_s = desk.objects.now_s()
        batch = StoredBatch(
            id=new_id("batch_", now_s),
            endpoint=body.endpoint,
            content=source.content,
            size=source.bytes,
            created_at=now_s,
            expires_at=now_s + min(body.window_s, OF_INPUT * (source.expires_at - now_s)),
            completion_window=body.completion_window,
            input_file_id=source.id,
            metadata=body.metadata,
            output_life_s=body.output_expires_after.seconds if body.output_expires_after is not None else None,
        )
        await desk.batches.create(tenant, batch)
    desk.worker.wake()
    told = ignored_fields(body.unknown())
    return json_response(openai_batch(batch), headers={WARNING: told} if told else {})


@router.get("/v1/batches")
@guarded("batches")
async def batches(request: Request, address: Address) -> Response:
    """The batches, the newest first; `after`, `limit`."""
    desk, tenant = _desk(request, address)
    asked = PageQuery.checked(dict(request.query_params))

    def listed(found: list[StoredBatch]) -> msgspec.Raw:
        chosen = [batch for batch in found if not batch.anthropic]
        return msgspec.Raw(msgspec.json.encode({"object": "list", **page(chosen, asked, "batch_", openai_batch)}))

    return json_response(await desk.batches.listed(tenant, listed))


@router.get("/v1/batches/{batch_id}")
@guarded("batches")
async def batch(request: Request, address: Address, batch_id: str) -> Response:
    """One batch, with its counts."""
    return json_response(openai_batch((await _found(request, address, batch_id, anthropic=False))[2]))


@router.post("/v1/batches/{batch_id}/cancel")
@guarded("batches")
async def cancel_batch(request: Request, address: Address, batch_id: str) -> Response:
    """End a batch; what is answered stays."""
    desk, tenant, known = await _found(request, address, batch_id, anthropic=False)
    found = await desk.batches.cancel(tenant, known.id)
    if found.status not in ("cancelling", "cancelled"):
        raise Conflict(f"A batch that is {found.status} cannot be cancelled.", param="batch_id")
    desk.worker.wake()
    return json_response(openai_batch(found))


@router.post(BATCHES_PATH, tags=["messages"], **takes(MessageBatchBody))
@guarded("message_batches", ANTHROPIC)
async def create_message_batch(request: Request, address: Address) -> Response:
    """Answer many messages, when nothing else waits."""
    desk, tenant = _desk(request, address)
    with arrive(address, address.guard.tenant(request)) as arrival:
        raw = await read_body(request, BODIES // 2 * address.config.max_body_bytes, arrival.grow)
        workers = address.workers
        body = await workers.run(tenant, len(raw), MessageBatchBody.parse, raw)
        lines = await workers.run(tenant, len(raw), body.lines)

        async def parts() -> AsyncIterator[bytes]:
            yield lines

        now_s = desk.objects.now_s()
        room = await desk.batches.room(tenant)
        content, size = await desk.files.write(tenant, parts(), desk.objects.ttl_s, room)
        batch = StoredBatch(
            id=new_id("msgbatch_", now_s),
            endpoint="/v1/messages",
            content=content,
            size=size,
            created_at=now_s,
            expires_at=now_s + min(DAY_S, OF_INPUT * desk.objects.ttl_s),
            owns_content=True,
            total=len(body.requests),
        )
        try:
            await desk.batches.create(tenant, batch)
        except BaseException:
            await desk.files.discard(tenant, content)
            raise
    desk.worker.wake()
    return json_response(_shown(request, batch))


@router.get(BATCHES_PATH, tags=["messages"])
@guarded("message_batches", ANTHROPIC)
async def message_batches(request: Request, address: Address) -> Response:
    """The message batches, the newest first; `after_id`, `before_id`, `limit`."""
    desk, tenant = _desk(request, address)
    asked, shown = PageQuery.checked(dict(request.query_params)), partial(_shown, request)

    def listed(found: list[StoredBatch]) -> msgspec.Raw:
        chosen = [batch for batch in found if batch.anthropic]
        return msgspec.Raw(msgspec.json.encode(page(chosen, asked, "msgbatch_", shown)))

    return json_response(await desk.batches.listed(tenant, listed))


@router.get(f"{BATCHES_PATH}/{{batch_id}}", tags=["messages"])
@guarded("message_batches", ANTHROPIC)
async def message_batch(request: Request, address: Address, batch_id: str) -> Response:
    """One message batch, with its counts."""
    return json_response(_shown(request, (await _found(request, address, batch_id, anthropic=True))[2]))


@router.get(f"{BATCHES_PATH}/{{batch_id}}/results", tags=["messages"])
@guarded("message_batches", ANTHROPIC)
async def message_batch_results(request: Request, address: Address, batch_id: str) -> Response:
    """The results of a message batch that has ended, one JSON object per line."""
    desk, tenant, found = await _found(request, address, batch_id, anthropic=True)
    if not found.ended:
        raise InvalidRequest(f"The batch {batch_id[:64]} has not ended; its results are not available yet.")
    return await _content(desk, tenant, found.results, found.results_size, "application/x-jsonl")


@router.post(f"{BATCHES_PATH}/{{batch_id}}/cancel", tags=["messages"])
@guarded("message_batches", ANTHROPIC)
async def cancel_message_batch(request: Request, address: Address, batch_id: str) -> Response:
    """End a message batch; what is answered stays."""
    desk, tenant, known = await _found(request, address, batch_id, anthropic=True)
    if known.ended:
        raise InvalidRequest(f"The batch {batch_id[:64]} has ended; it cannot be canceled.")
    found = await desk.batches.cancel(tenant, known.id)
    desk.worker.wake()
    return json_response(_shown(request, found))


@router.delete(f"{BATCHES_PATH}/{{batch_id}}", tags=["messages"])
@guarded("message_batches", ANTHROPIC)
async def delete_message_batch(request: Request, address: Address, batch_id: str) -> Response:
    """Delete a message batch that has ended, and its results."""
    desk, tenant, found = await _found(request, address, batch_id, anthropic=True)
    if not found.ended:
        raise InvalidRequest(f"The batch {batch_id[:64]} is in progress; cancel it first.")
    await desk.batches.delete(tenant, found)
    return json_response({"id": found.id, "type": "message_batch_deleted"})


async def _found(
    request: Request, address: Address, batch_id: str, *, anthropic: bool
) -> tuple[BatchDesk, str, StoredBatch]:
    """Return the desk, the tenant's name and its batch, if it is of this API. Raises NotFound."""
    desk, tenant = _desk(request, address)
    found = await desk.batches.get(tenant, batch_id)
    if found.anthropic != anthropic:
        raise NotFound(f"There is no batch {batch_id[:64]!r} of this API.", param="batch_id")
    return desk, tenant, found


def _shown(request: Request, batch: StoredBatch) -> dict[str, Any]:
    path = f"{request.scope.get('root_path', '')}{BATCHES_PATH}/{batch.id}/results"
    scheme = request.headers.get("x-forwarded-proto", "").lower()  # what a proxy with the certificate was asked by
    scheme = scheme if scheme in ("http", "https") else request.base_url.scheme
    return anthropic_batch(batch, str(request.base_url.replace(scheme=scheme, path=path)))


def _shown_file(request: Request, file: File) -> dict[str, Any]:
    return anthropic_file(file) if speaks_anthropic(request) else file.shown()


async def _content(desk: BatchDesk, tenant: str, content: str, size: int, media_type: str) -> Response:
    """Return a content as it is read. Raises NotFound if it is gone already."""
    chunks = desk.files.content(tenant, content, size)
    first = await anext(chunks, b"")

    async def whole() -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    return StreamingResponse(whole(), headers={"content-length": str(size)}, media_type=media_type)
