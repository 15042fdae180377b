"""Chunks come by one way and a call's end by another: which is first changes nothing, and what is lost is asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from serve_app.replica import messages as wire
from tests.serve_app.generation.fake_replicas import Chunks, FakeHandle, FakeResult, answer, ids, run, whole


class LateResult(FakeResult):
    """Its end is heard of before its chunks, of which the first call loses the last ``lose``."""

    lose = 0

    async def get_async(self) -> bytes:
        chunks = [structs.replace(chunk, seq=seq) for seq, chunk in enumerate([each async for each in self._chunks])]
        kept, LateResult.lose = chunks[: len(chunks) - LateResult.lose], 0
        deliver = self._inbox.deliver
        asyncio.get_running_loop().call_later(0.02, deliver, [(self._call_id, chunk) for chunk in kept])
        return wire.encode(wire.GenerateChunk(seq=len(chunks), finish_reason=chunks[-1].finish_reason))


def late(monkeypatch: pytest.MonkeyPatch, chunks: Chunks, lose: int = 0) -> FakeHandle:
    monkeypatch.setattr("tests.serve_app.generation.fake_replicas.FakeResult", LateResult)
    monkeypatch.setattr(LateResult, "lose", lose)
    return FakeHandle(chunks)


def test_an_end_that_is_heard_first_cuts_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = late(monkeypatch, answer)
    assert ids(run(handle)) == whole()
    assert handle.after_first_token == []


def test_an_answer_without_tokens_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only warms the cache: what was cached is in its one chunk, and not in its end."""

    async def empty(call: wire.GenerateCall, route: Any, replica: str) -> Any:
        yield wire.GenerateChunk((), replica, 8, finish_reason="length")

    (tokens,) = run(late(monkeypatch, empty))
    assert (tokens.token_ids, tokens.cached_tokens, tokens.finish_reason) == ((), 8, "length")


@pytest.mark.parametrize("lose", [1, 2, 3])
def test_lost_chunks_are_asked_for_again(monkeypatch: pytest.MonkeyPatch, lose: int) -> None:
    """A channel that was cut: another replica goes on from what came."""
    monkeypatch.setattr("serve_app.generation.call.LATE_S", 0.1)
    handle = late(monkeypatch, answer, lose)
    assert ids(run(handle)) == whole()
    assert handle.after_first_token == [lose < 3]
