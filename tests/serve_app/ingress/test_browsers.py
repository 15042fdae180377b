"""A page of another site cannot post through its reader's browser; programs are not asked for more than before."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from serve_app.errors import PermissionDenied, WarmpathError
from serve_app.ingress.browsers import UnsupportedMediaType, refuse_foreign_page

EVIL = "http://evil.example"
OURS = "127.0.0.1:8000"
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


def judged(
    origin: str | None, content_type: str | None, host: str = OURS, *, method: str = "POST", allowed: list[str] | None
) -> type[WarmpathError] | None:
    """Which error a request gets."""
    given = {"host": host, "origin": origin, "content-type": content_type}
    headers = [(name.encode(), value.encode()) for name, value in given.items() if value is not None]
    try:
        refuse_foreign_page(Request({"type": "http", "method": method, "headers": headers}), allowed)
    except WarmpathError as error:
        return type(error)
    return None


@pytest.mark.parametrize("content_type", [None, FORM, "text/plain", "multipart/form-data; boundary=x"])
def test_what_a_browser_sends_anywhere_is_refused(content_type: str | None) -> None:
    """Forms, and fetch without a preflight; also from a page without an origin (a file, a sandboxed frame)."""
    for origin in (EVIL, "null", "http://127.0.0.1:3000"):
        assert judged(origin, content_type, allowed=None) is UnsupportedMediaType


def test_programs_are_not_judged() -> None:
    """Without an Origin there is no page: curl -d and urllib call their JSON a form."""
    for content_type in (None, FORM, JSON):
        assert judged(None, content_type, "api.example", allowed=[]) is None


def test_pages_that_were_let_in_are_served() -> None:
    """Our own /docs; JSON that a proxy in front has allowed by CORS; what changes nothing."""
    assert judged(f"http://{OURS}", None, allowed=None) is None
    assert judged(EVIL, f"{JSON}; charset=utf-8", allowed=None) is None
    assert judged(EVIL, None, method="GET", allowed=[]) is None


@pytest.mark.parametrize("host", ["evil.example:8000", "evil.example", "localhost.evil.example", "", "[::1"])
def test_a_name_that_is_not_ours_is_refused(host: str) -> None:
    """DNS rebinding: to the browser the page and the server are one site, so JSON is no proof."""
    assert judged(f"http://{host}", JSON, host, allowed=[]) is PermissionDenied
    assert judged(f"http://{host}", JSON, host, allowed=None) is None


@pytest.mark.parametrize("host", [OURS, "localhost:8000", "app.localhost", "[::1]:8000", "192.168.1.7", "Chat.example"])
def test_our_names_are_served(host: str) -> None:
    """No page has an address or localhost for its name; others are configured."""
    assert judged(f"http://{host}", JSON, host, allowed=["chat.example"]) is None
