"""The page's files: their list, and their responses."""

import posixpath
import re

import pytest
from starlette.exceptions import HTTPException

from serve_app.config.app import AppConfig
from serve_app.ingress.routes.page import page_files, page_response
from tests.serve_app.ingress.routes.test_application import ACME, get

_IMPORT = re.compile(r'^import [^"]* from "([^"]+)";|^import "([^"]+)";', re.M)
_LINK = re.compile(r'(?:src|href)="page/([^"]+)"')


def test_the_page_needs_no_key_and_allows_nothing_from_elsewhere() -> None:
    """The page contains no data; it requests all data with a key."""
    response = get("/", AppConfig(tenants=[ACME]))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) == {"'self'", "'none'"}
    assert policy["frame-ancestors"] == "'none'"
    assert response.headers["x-content-type-options"] == "nosniff"


def test_every_file_that_a_file_names_is_there() -> None:
    """This covers files that the page loads and modules import; nothing is inline, and nothing is of another site."""
    files = page_files()
    named = {"index.html", "sample.txt", *_LINK.findall(files["index.html"].decode())}
    for path, content in files.items():
        text = content.decode()
        if path.endswith(".js"):
            here = posixpath.dirname(path)
            named |= {posixpath.normpath(posixpath.join(here, *both)) for both in _IMPORT.findall(text)}
        if not path.endswith((".txt", ".svg")):
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
    assert named == set(files)
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", files["index.html"].decode())
    assert not any("innerHTML" in content.decode() or "eval(" in content.decode() for content in files.values())


def test_a_browser_that_has_a_file_is_told_so() -> None:
    first = get("/page/main.js", AppConfig())
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    again = get("/page/main.js", AppConfig(), headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["../routes/page.py", "nothing.js", "", "map", "/etc/passwd"])
def test_no_other_file_is_served(path: str) -> None:
    """Only files found in the folder at the first request are served."""
    with pytest.raises(HTTPException):
        page_response(path)
    assert get(f"/page/{path}", AppConfig()).status_code == 404


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``. Source: WCAG 2.2."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [":root {", ':root[data-theme="dark"] {'], ids=["light", "dark"])
def test_text_can_be_read_on_every_ground(theme: str) -> None:
    """Contrast is at least 4.5 (WCAG's AA), light and dark; 3 for lines that identify a control."""
    css = page_files()["css/base.css"].decode()
    block = css.partition(theme)[2].partition("}")[0]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    pairs = [(text, ground, 4.5) for text in ("ink", "soft", "warm", "cold") for ground in ("paper", "sheet", "sunk")]
    pairs += [("bad", "bad-wash", 4.5), ("bad", "sheet", 4.5), ("paper", "ink", 4.5), ("paper", "warm", 4.5)]
    pairs += [("line-strong", ground, 3.0) for ground in ("paper", "sheet")]
    low = {}
    for text, ground, least in pairs:
        light, dark = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
        if (light + 0.05) / (dark + 0.05) < least:
            low[text, ground] = round((light + 0.05) / (dark + 0.05), 2)
    assert low == {}
