"""A stop refuses what comes, waits for what runs, and ends what takes longer."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.errors import Overloaded
from serve_app.ingress.drain import CountAnswers, Drain


def test_nothing_is_refused_before_a_stop() -> None:
    """And everything after it."""

    async def run() -> None:
        drain = Drain()
        drain.refuse()
        assert await drain.run(600) == 0
        with pytest.raises(Overloaded) as error:
            drain.refuse()
        assert error.value.code == "server_stopping"
        assert error.value.retry_after_s

    asyncio.run(run())


def test_answers_that_end_in_time_are_waited_for() -> None:
    """All of them, and none is ended."""

    async def run() -> None:
        drain, release = Drain(), [asyncio.Event(), asyncio.Event()]

        async def answer(event: asyncio.Event) -> None:
            with drain.answering():
                async with drain.limit(600):
                    await event.wait()

        answers = [asyncio.create_task(answer(event)) for event in release]
        await asyncio.sleep(0)
        stop = asyncio.create_task(drain.run(600))
        for event in release:
            await asyncio.sleep(0.01)
            assert not stop.done()
            event.set()
        assert await stop == 0
        await asyncio.gather(*answers)
        assert drain.begun
        assert not drain.over

    asyncio.run(run())


def test_answers_that_take_longer_end_with_an_error() -> None:
    """What they wait for now, and what they would wait for next."""

    async def run() -> None:
        drain, ended = Drain(), []

        async def answer() -> None:
            with drain.answering():
                for _ in range(2):
                    try:
                        async with drain.limit(600):
                            await asyncio.Event().wait()
                    except TimeoutError:
                        ended.append(drain.broken_off().code)

        task = asyncio.create_task(answer())
        await asyncio.sleep(0)
        assert await drain.run(0) == 1
        await task
        assert ended == ["server_stopping"] * 2
        assert drain.over

    asyncio.run(run())


def test_a_limit_is_a_timeout_without_a_stop() -> None:
    """Its own time ends it; other errors pass."""

    async def run() -> None:
        drain = Drain()
        with pytest.raises(TimeoutError):
            async with drain.limit(0):
                await asyncio.Event().wait()
        with pytest.raises(StopAsyncIteration):
            async with drain.limit(600):
                raise StopAsyncIteration
        assert not drain.over

    asyncio.run(run())


def test_an_answer_counts_until_its_last_byte() -> None:
    """Also one that ends with an exception."""

    async def run() -> None:
        drain, sending = Drain(), asyncio.Event()

        async def app(scope: object, receive: object, send: object) -> None:
            await sending.wait()
            raise OSError("the client is gone")

        async def unused(*_: object) -> dict[str, object]:
            return {}

        answer = asyncio.create_task(CountAnswers(app, drain)({"type": "http"}, unused, unused))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        stop = asyncio.create_task(drain.run(600))
        await asyncio.sleep(0.01)
        assert not stop.done()
        sending.set()
        assert await stop == 0
        with pytest.raises(OSError, match="gone"):
            await answer

    asyncio.run(run())
