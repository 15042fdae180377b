"""What a client saw is judged right: a benchmark that takes a broken answer for a whole one shows nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.end_to_end.failures.clients import Clients, Seen
from benchmarks.end_to_end.failures.run import sentences_of, summary

BODY = {"prompt": "p", "seed": 1}


def event(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


@asynccontextmanager
async def serving(*answers: list[bytes]) -> AsyncIterator[str]:
    """Answer one request after the other with these pieces, then close the connection; none at all: close at once."""
    left = list(answers)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        pieces = left.pop(0)
        if pieces:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
        if pieces and b"[DONE]" in pieces[-1]:
            writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("pieces", "outcome"),
    [
        ([event("a"), event("b", "length"), b"data: [DONE]\n\n"], "whole"),
        ([event("a"), event("c", "length"), b"data: [DONE]\n\n"], "altered"),
        ([event("a")], "cut short"),
        ([event("a"), b'data: {"error": {"code": "replicas_lost"}}\n\n'], "cut short"),
        ([], "lost"),
    ],
)
def test_an_answer_is_whole_altered_cut_short_or_lost(pieces: list[bytes], outcome: str) -> None:
    async def run() -> dict[str, int]:
        undisturbed = [event("a"), event("b", "length"), b"data: [DONE]\n\n"]
        async with serving(undisturbed, pieces) as url:
            clients = Clients(url)
            await clients.undisturbed([BODY])
            return clients.outcomes(await clients.at_once([BODY]))

    expected = dict.fromkeys(("whole", "lost", "cut short", "altered"), 0)
    assert asyncio.run(run()) == {**expected, outcome: 1}


def test_the_wait_after_a_strike_begins_with_the_strike() -> None:
    """A gap that was over before does not count, and one that it falls into counts from there."""
    seen = Seen(BODY, token_times_s=[0.0, 5.0, 5.1, 7.0, 7.1])
    assert seen.longest_gap_after(6.0) == pytest.approx(1.0)
    assert seen.longest_gap_after(4.0) == pytest.approx(1.9)
    assert seen.longest_gap_after(8.0) == 0.0
    late = Seen(BODY, began_s=1.0, token_times_s=[9.0, 9.1])
    assert late.longest_gap_after(6.0) == pytest.approx(3.0), "before its first token a client waits, too"


def test_a_pause_ends_with_the_next_token_whatever_comes_later() -> None:
    """Neither with one that was on its way, nor with a longer gap behind it."""
    seen = Seen(BODY, token_times_s=[0.0, 1.0, 1.02, 1.07, 1.09, 9.0])
    assert seen.pause_after(1.01) == pytest.approx(0.06)
    assert seen.pause_after(1.03) == pytest.approx(0.04)
    assert seen.pause_after(0.5) == pytest.approx(0.5)
    assert seen.pause_after(9.5) == 0.0


def test_runs_are_added_up() -> None:
    runs = [
        {"outcomes": {"whole": 2, "lost": 0}, "gap_s": [1.0, 3.0], "as_before": True},
        {"outcomes": {"whole": 1, "lost": 1}, "gap_s": [2.0], "as_before": False, "problems": ["502"]},
    ]
    found = summary(runs)
    assert (found["outcomes"], found["problems"]) == ({"whole": 3, "lost": 1}, ["502"])
    assert (found["gap_s"]["count"], found["gap_s"]["p50"], found["as_before"]["min"]) == (3, 2.0, 0.0)


def test_the_last_sentence_has_what_was_lost_and_how_long_streams_paused() -> None:
    rows = {
        "replica": summary([{"outcomes": {"whole": 2, "lost": 0}, "next_token_over_ttft": [1.0, 3.0]}]),
        "haproxy": summary([{"answers_after_s": 5.0}]),
    }
    said = sentences_of(rows)
    assert said.startswith("Answers through 2 failures (simulated engines): 2 whole, 0 lost.")
    assert "replica: from the SIGKILL to the next token 2 times" in said
    assert "haproxy" not in said
