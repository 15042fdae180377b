"""Requests are sent at their times whatever becomes of earlier ones, within bounds; figures count what came of them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from serve_app.replay.client import TimedAnswer
from serve_app.replay.open_loop import Result, Shot, fire, send, summary
from tests.serve_app.ingress.scripted import Loopback


def test_figures_count_answers_refusals_and_failures_apart() -> None:
    """TTFT includes time lost in the client; refused and failed requests have no TTFT."""
    shot = Shot(1.0, "/v1/completions", {})
    quick = TimedAnswer(0.1, 1.1, "x", 100, 80, 11)
    slow = TimedAnswer(2.0, 3.0, "x", 100, 0, 1)
    results = [Result(shot, 0.1, quick), Result(shot, 0.0, slow)]
    results += [Result(shot, 0.0, None, 429, "busy"), Result(shot, 0.0, None, 500, "bad"), Result(shot, 0.0, None, 0)]
    row = summary(results, ttft_slo_s=1.0)
    assert (row["answered"], row["rejected"], row["failed"]) == (2, 1, 2)
    assert row["hit_rate"] == pytest.approx(0.4)
    assert row["ttft_mean_s"] == pytest.approx(1.1)
    assert row["tpot_mean_s"] == pytest.approx(0.1)
    assert row["goodput_rps"] == pytest.approx(1 / 3.0)
    assert "ttft_mean_s" not in summary(results[2:], 1.0)


def test_a_server_that_is_not_there_is_a_failure_of_each_request() -> None:
    """Nothing raises: every shot has its result, in the order of the shots and not of their times."""
    shots = [Shot(0.02 - 0.01 * i, "/v1/completions", {"prompt": str(i)}) for i in range(3)]
    done: list[None] = []
    results = asyncio.run(fire("http://127.0.0.1:9", shots, 5.0, lambda: done.append(None)))
    assert [result.shot for result in results] == shots
    assert all(result.status == 0 and "Connect" in result.reason for result in results)
    assert len(done) == 3


class Held:
    """A server whose answers wait until ``most`` of them are asked for at once; ``open``: now, ``seen``: at most."""

    def __init__(self, most: int) -> None:
        self.most, self.open, self.seen, self.asked = most, 0, 0, 0
        self.full = asyncio.Event()

    async def __call__(self, scope: dict, receive: object, send: object) -> None:  # type: ignore[type-arg]
        if scope["type"] == "lifespan":
            return
        self.open, self.asked = self.open + 1, self.asked + 1
        self.seen = max(self.seen, self.open)
        if self.open == self.most:
            self.full.set()
        await self.full.wait()
        await asyncio.sleep(0)
        body = b'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
        self.open -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": body})  # type: ignore[operator]


def test_no_more_connections_are_open_than_may_be() -> None:
    """All of them are used, none more; requests are asked for only when they can be sent, and none is lost."""
    held, results, made = Held(4), list[Result](), 0

    async def shots() -> AsyncIterator[Shot]:
        nonlocal made
        for number in range(20):
            assert made <= len(results) + 4 + 1
            made += 1
            yield Shot(0.0, "/", {}, number=number)

    with Loopback(lambda: held) as running:
        asyncio.run(send(running.url, shots(), results.append, timeout_s=30.0, most_open=4))
    assert (held.seen, held.asked) == (4, 20)
    assert sorted(result.shot.number for result in results) == list(range(20))
    assert all(result.answer is not None and result.without_texts().answer is not None for result in results)
