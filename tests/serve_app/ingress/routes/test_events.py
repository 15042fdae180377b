"""GET /v1/cache/events over a real socket: each viewer's events, and the end of a stream. The page's files."""

import asyncio
import json
import posixpath
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message

from serve_app.config.app import AppConfig
from serve_app.config.tenants import TenantConfig
from serve_app.engine.protocol import FirstToken
from serve_app.ingress.drain import Drain
from serve_app.ingress.guard import RouteGuard
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.routes import event_stream as route
from serve_app.ingress.routes.api_page import api_page
from serve_app.ingress.routes.application import make_application
from serve_app.ingress.routes.page import page_files, page_response
from serve_app.tenants import Tenants, make_api_key
from tests.serve_app.ingress.routes.test_application import ACME, get
from tests.serve_app.ingress.scripted import PATIENCE_S, Loopback, partial_address
from tests.serve_app.live.test_live import Ingresses
from tests.serve_app.live.traffic import decision, generation, is_idle

PATH = "/v1/cache/events"
KEYS = {name: make_api_key() for name in ("a", "b", "operator")}


class Stage(Loopback):
    """One ingress on loopback with nothing behind it."""

    def __init__(self, tenants: tuple[str, ...]) -> None:
        configs = [TenantConfig(name=name, key_sha256=[KEYS[name][1]]) for name in tenants]
        operators = [KEYS["operator"][1]] if tenants else []
        self.tenants = Tenants(configs, b"s" * 32, operator_key_sha256=operators)
        self.drain = Drain()
        super().__init__(self._application)

    def _application(self) -> Any:
        self.live = Ingresses().first
        guard = RouteGuard(self.tenants, IngressMetrics(), self.drain)
        return make_application(
            partial_address(
                config=AppConfig(model="demo"), tenants=self.tenants, drain=self.drain, guard=guard, live=self.live
            )
        )


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    for name, seconds in (("CHECK_S", 0.1), ("WAIT_S", 0.05)):
        monkeypatch.setattr(route, name, seconds)
    with Stage(("a", "b")) as made:
        yield made


def auth(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name][0]}"}


@contextmanager
def stream(stage: Stage, name: str) -> Iterator[Iterator[str]]:
    with httpx.stream("GET", stage.url + PATH, headers=auth(name), timeout=PATIENCE_S) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield response.iter_lines()


def following(lines: Iterator[str], kind: str) -> dict[str, Any]:
    for line in lines:
        if line.startswith("data: "):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if event["type"] == kind:
                return event
    raise AssertionError(f"the stream ended without {kind}")


def test_a_stream_has_retry_ids_heartbeats_and_each_viewers_part(stage: Stage) -> None:
    """A browser's EventSource reads it; one tenant's decision goes to it and to operators, not to another tenant."""

    def first_token(tenant: str) -> None:
        stage.live.delivered(generation(tenant, [1, 2]), decision(), FirstToken(0), 0.5)

    with stream(stage, "a") as mine, stream(stage, "operator") as all_of_it:
        assert next(mine) == "retry: 2000"
        assert following(mine, "snapshot")["tenant"] == "a"
        assert following(all_of_it, "snapshot")["viewer"] == "operator"
        assert ":" in (next(mine) for _ in range(100))
        stage.call(lambda: first_token("b"))
        stage.call(lambda: first_token("a"))
        assert following(mine, "decision")["tenant"] == "a"
        assert [following(all_of_it, "decision")["tenant"] for _ in range(2)] == ["b", "a"]
    deadline_s = time.monotonic() + PATIENCE_S
    while not stage.call(lambda: is_idle(stage.live)):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_client_that_is_gone_before_its_stream_begins_leaves_nothing(stage: Stage) -> None:
    """Its departure is told at the same moment as the failure to send."""

    async def gone() -> list[Any]:
        loop, complaints = asyncio.get_running_loop(), list[Any]()
        loop.set_exception_handler(lambda _, context: complaints.append(context))

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            raise OSError("gone")

        answer = route.LiveEventStream(stage.live, "a", await stage.live.watch("a"), lambda: True)
        await answer({"type": "http"}, receive, send)
        for _ in range(3):
            await asyncio.sleep(0)
        loop.set_exception_handler(None)
        return complaints

    assert stage.call(gone) == [] and stage.call(lambda: is_idle(stage.live))


def test_once_is_the_snapshot_alone(stage: Stage) -> None:
    """It is for scripts. Without keys everybody sees everything, because an open deployment has one tenant."""
    for name in ("a", "operator"):
        once = httpx.get(f"{stage.url}{PATH}?once=true", headers=auth(name)).json()
        assert (once["type"], once["viewer"]) == ("snapshot", "operator" if name == "operator" else "tenant")
    assert httpx.get(f"{stage.url}{PATH}?once=maybe", headers=auth("a")).status_code == 400
    assert stage.call(lambda: is_idle(stage.live))
    with Stage(()) as of_everybody:
        assert httpx.get(f"{of_everybody.url}{PATH}?once=true").json()["viewer"] == "operator"


def test_a_stream_ends_with_its_key(stage: Stage) -> None:
    """The stream gives the reason; the other tenant's continues."""
    with stream(stage, "a") as mine, stream(stage, "b") as other:
        following(other, "snapshot")
        left = [TenantConfig(name="b", key_sha256=[KEYS["b"][1]])]
        stage.call(lambda: stage.tenants.configure(left, [KEYS["operator"][1]]))
        assert following(mine, "end")["reason"] == "key"
        stage.call(lambda: stage.live.delivered(generation("b", [1]), decision(), FirstToken(0), 0.5))
        assert following(other, "decision")["tenant"] == "b"


def test_a_stop_waits_for_no_stream(stage: Stage) -> None:
    """This includes a stream with a reader that takes nothing: soon after, no answers are in progress."""
    with stream(stage, "a") as mine, stream(stage, "b") as stuck:
        following(stuck, "snapshot")
        stage.call(stage.live.close)
        assert stage.call(lambda: stage.drain.run(PATIENCE_S)) == 0
        assert following(mine, "end")["reason"] == "stopping"
        assert httpx.get(stage.url + PATH, headers=auth("a")).status_code == 503
    assert stage.call(lambda: is_idle(stage.live))


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
    named |= set(re.findall(r'(?:href|src)="([\w/.-]+\.\w+)"', files["help.html"].decode()))
    named |= set(re.findall(r'"page/([^"]*)"', bytes(api_page(None).body).decode()))
    for path, content in files.items():
        text = content.decode()
        if path.endswith(".js"):
            here = posixpath.dirname(path)
            named |= {posixpath.normpath(posixpath.join(here, *both)) for both in _IMPORT.findall(text)}
        if not path.endswith((".txt", ".svg")):
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
    assert named == set(files)
    for name in ("index.html", "help.html"):
        assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", files[name].decode())
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
