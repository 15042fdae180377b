"""Outputs wait together for their consumer; the first and the last ones do not wait."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.engine.protocol import EngineOutput, FinishReason
from serve_app.replica.token_streams import TokenStream


def output(token: int, finish_reason: FinishReason | None = None) -> EngineOutput:
    return EngineOutput("r", (token,), finish_reason=finish_reason)


def test_between_first_and_last_outputs_leave_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of 30 ms: without an interval ten chunks, with one of 100 ms four; no token is lost or moved."""

    async def chunks_of(interval_s: float) -> list[list[int]]:
        now_s = 50.0
        monkeypatch.setattr("serve_app.replica.token_streams.time.monotonic", lambda: now_s)
        stream = TokenStream(interval_s)
        taken: list[list[int]] = []

        async def consume() -> None:
            while not taken or taken[-1][-1] != 9:
                taken.append([token for part in await stream.take() for token in part.token_ids])

        consumer = asyncio.create_task(consume())
        for token in range(10):
            stream.push(output(token, "length" if token == 9 else None))
            for _ in range(3):
                await asyncio.sleep(0)
            now_s += 0.03
        await consumer
        return taken

    assert asyncio.run(chunks_of(0.0)) == [[token] for token in range(10)]
    assert asyncio.run(chunks_of(0.1)) == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]
