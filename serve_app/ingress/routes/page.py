"""The page at ``/``: static files of this package. They hold no data, so they need no key."""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parents[1] / "page"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""The page loads and requests nothing from other sites, no site may frame it, and received text is never code."""

router = APIRouter(include_in_schema=False)


@cache
def page_files() -> dict[str, bytes]:
    """Return the page's files by path, such as ``map/map.js``."""
    found = (path for path in _FOLDER.rglob("*") if path.suffix[1:] in _TYPES)
    return {path.relative_to(_FOLDER).as_posix(): path.read_bytes() for path in found}


def page_response(path: str, etags: str | None = None) -> Response:
    """Return one file. ``etags``: the browser's tags (``If-None-Match``). Raises HTTPException: 404."""
    return static(page_files().get(path), path.rpartition(".")[2], etags)


def static(content: bytes | None, kind: str, etags: str | None, headers: Mapping[str, str] = HEADERS) -> Response:
    """Return a file's content. ``kind``: the ending of its name. Raises HTTPException: 404, without content."""
    if content is None:
        raise HTTPException(404)
    told = {**headers, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if etags is not None and told["etag"] in etags:
        return Response(status_code=304, headers=told)
    return Response(content, headers=told, media_type=_TYPES[kind])


@router.get("/")
async def index(request: Request) -> Response:
    """The page."""
    return page_response("index.html", request.headers.get("if-none-match"))


@router.get("/page/{path:path}")
async def file(request: Request, path: str) -> Response:
    """A file of the page."""
    return page_response(path, request.headers.get("if-none-match"))
