"""What web pages may post: a page in a user's browser reaches servers on the user's machine, and where no tenants are
configured it needs no key.

Knows headers only. What is no browser's sends no ``Origin``, and is not judged here.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import Request

from serve_app.errors import InvalidRequest, PermissionDenied


class UnsupportedMediaType(InvalidRequest):
    """The body is declared to be something else than JSON."""

    status = 415
    code = "unsupported_media_type"


def refuse_foreign_page(request: Request, allowed_hosts: Collection[str] | None) -> None:
    """Refuse a POST that a page of another site makes its reader's browser send.

    ``allowed_hosts``: the names in ``Host`` that are this server's, beside addresses and localhost; None: any.
    Raises UnsupportedMediaType for what is not declared to be JSON: a browser sends JSON to another site only after
    asking that, and nobody here says yes. Raises PermissionDenied for a page whose own name was made to lead here
    (DNS rebinding).
    """
    origin = request.headers.get("origin")
    if request.method != "POST" or origin is None:
        return
    host = request.headers.get("host", "")
    if allowed_hosts is not None and not _is_ours(host, allowed_hosts):
        raise PermissionDenied(
            f"Pages of {host[:200]!r} may not post here; if that is a name of this server, start it with it in the "
            "setting allowed_hosts."
        )
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if origin.partition("://")[2] != host and media_type != "application/json":
        raise UnsupportedMediaType("Send the header Content-Type: application/json.")


def _is_ours(host: str, allowed_hosts: Collection[str]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost") or name in allowed_hosts:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
