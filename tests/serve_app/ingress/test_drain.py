"""A stop refuses new requests, waits for running ones, and ends those that take longer."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from serve_app.errors import Overloaded, WarmpathError
from serve_app.ingress.drain import Deadline, Drain
from serve_app.ingress.routes.application import make_application
from tests.serve_app.ingress.scripted import partial_services


def deadline(drain: Drain) -> Deadline:
    return Deadline(drain, time.perf_counter() + 600, 600)


async def settled() -> None:
    """Run all tasks that are ready."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.anyio
@pytest.mark.parametrize("in_time", [True, False])
async def test_answers_that_end_in_time_are_waited_for_and_others_end_with_an_error(in_time: bool) -> None:
    """At the deadline an answer's current wait and its next one end with the error; new requests are refused."""
    drain, release, errors = Drain(), [asyncio.Event(), asyncio.Event()], []
    async with deadline(drain).limit():  # an answer that has ended before is not waited for
        pass

    async def answer(event: asyncio.Event) -> None:
        with drain.answering():
            for _ in range(2):
                try:
                    async with deadline(drain).limit():
                        await event.wait()
                except WarmpathError as error:
                    errors.append(error.code)

    answers = [asyncio.create_task(answer(event)) for event in release]
    await asyncio.sleep(0)
    drain.refuse()
    stop = asyncio.create_task(drain.run(600 if in_time else 0))
    for event in release:
        await settled()
        if in_time:
            assert not stop.done()
            event.set()
    assert await stop == (0 if in_time else 2)
    await asyncio.gather(*answers)
    assert (drain.stopping, drain.over) == (True, not in_time)
    assert errors == ([] if in_time else ["server_stopping"] * 4)
    with pytest.raises(Overloaded) as refused:
        drain.refuse()
    assert (refused.value.code, refused.value.retry_after_s) == ("server_stopping", 5)


@pytest.mark.anyio
async def test_an_answer_counts_until_its_last_byte() -> None:
    """An answer that ends with an exception counts too."""
    drain, begun, sending = Drain(), asyncio.Event(), asyncio.Event()
    application = make_application(partial_services(drain=drain, guard=SimpleNamespace(allowed_hosts=None)))

    async def send(_: object) -> None:
        begun.set()
        await sending.wait()
        raise OSError("the client is gone")

    async def receive() -> dict[str, object]:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "GET", "path": "/version", "headers": [], "query_string": b""}
    answer = asyncio.create_task(application(scope, receive, send))  # type: ignore[arg-type]
    await begun.wait()
    stop = asyncio.create_task(drain.run(600))
    await settled()
    assert not stop.done()
    sending.set()
    assert await stop == 0
    with pytest.raises(OSError, match="gone"):
        await answer
