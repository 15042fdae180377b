"""Lists of workers: what cannot be read costs itself alone, and nothing waits for it."""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from serve_app.config import workers
from serve_app.config.workers import Worker, listed, worker_of
from serve_app.engine.remote import lists
from serve_app.engine.remote.lists import WorkerLists
from tests.harness.eventually import until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are waited for, however busy the machine is."""
    monkeypatch.setattr(lists, "LIST_S", 60.0)


def urls(found: Sequence[Worker]) -> list[str]:
    return [worker.url for worker in found]


def test_a_line_that_is_no_worker_costs_itself_alone_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, it is an error that names it."""
    file = tmp_path / "workers"
    file.write_text("http://a:1\nhttp://b:x\nftp://c\nhttp://d:4\n")
    with pytest.raises(ValueError, match="http://b:x"):
        listed([f"file:{file}"])

    async def read() -> None:
        known = WorkerLists()
        for _ in range(3):
            assert urls(await known.now([f"file:{file}", "http://e:5"])) == ["http://a:1", "http://d:4", "http://e:5"]

    asyncio.run(read())
    assert (caplog.text.count("'http://b:x' is no worker"), caplog.text.count("'ftp://c' is no worker")) == (1, 1)


def test_an_entry_that_cannot_be_read_keeps_what_it_said_and_the_others_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MAX_LIST_CHARS", 1000)
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("http://a:1")
    second.write_text("http://b:2")
    entries = [f"file:{first}", f"file:{second}"]

    async def read() -> None:
        known = WorkerLists()
        assert urls(await known.now(entries)) == ["http://a:1", "http://b:2"]
        for damage in (lambda: None, lambda: os.mkfifo(first), lambda: first.write_text("#" * 2000)):
            first.unlink(missing_ok=True)
            damage()
            second.write_text("http://c:3")
            assert urls(await known.now(entries)) == ["http://a:1", "http://c:3"]
        first.write_bytes(b"\xff\xfe")
        assert urls(await known.now(entries)) == ["http://a:1", "http://c:3"]
        first.write_text("")
        assert urls(await known.now(entries)) == ["http://c:3"]
        assert urls(await known.now(entries[:1])) == []

    asyncio.run(read())


def test_nothing_waits_for_a_question_to_the_dns_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once, and its answer counts when it comes."""
    monkeypatch.setattr(lists, "LIST_S", 0.02)
    go_on, asked = threading.Event(), list[str]()

    def read(entries: Sequence[str], _: Callable[[str], None]) -> list[Worker]:
        if entries == ["dns+http://slow:1"]:
            asked.append(entries[0])
            assert go_on.wait(60)
        return [worker_of(entry.removeprefix("dns+")) for entry in entries]

    async def look() -> None:
        known, entries = WorkerLists(read), ["dns+http://slow:1", "http://b:2"]
        for _ in range(3):
            assert urls(await known.now(entries)) == ["http://b:2"]
        assert asked == ["dns+http://slow:1"]
        go_on.set()

        async def both() -> bool:
            return len(await known.now(entries)) == 2

        await until(both)
        assert urls(await known.now(entries)) == ["http://slow:1", "http://b:2"]
        known.close()

    asyncio.run(look())
