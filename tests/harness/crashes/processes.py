"""Replicas of a real instance are killed by SIGKILL, at random, while clients ask over HTTP.

Knows an instance by its URL alone. At least one replica is left at any moment.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.common.client import RequestFailed, StreamCut, stream_events
from tests.harness.crashes.questions import Question, Questions, Reply
from tests.harness.crashes.tally import Broken, Tally

_TIMEOUT_S = 300.0
_LONGEST_PAUSE_S = 0.3
"""Between the choice of a replica and its end: a random point of its streams."""


class ProcessCrashes:
    """Clients of one instance, and who kills its replicas. ``clients``: how many ask at once."""

    def __init__(self, url: str, rng: random.Random, clients: int) -> None:
        self._url = url
        self._random = rng
        self._clients = clients
        self.killed: set[str] = set()
        """Their ids."""

    async def run(self, questions: Questions, distinct: int, kills: int) -> dict[str, Any]:
        """Ask ``distinct`` questions undisturbed, then over and over while replicas are killed; compare the answers."""
        limits, tally, ending = httpx.Limits(max_connections=None), Tally(), asyncio.Event()
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S, limits=limits) as client:
            known = await self._references(client, questions, distinct)

            async def keep_asking() -> None:
                while not ending.is_set():
                    question, expected = self._random.choice(known)
                    tally.add(question, expected, await tried(client, question))

            asking = [asyncio.create_task(keep_asking()) for _ in range(self._clients)]
            try:
                while len(self.killed) < kills:
                    if not await self._kill_one(client):
                        await asyncio.sleep(0.05)
            finally:
                ending.set()
                await asyncio.gather(*asking)
        return tally.results()

    async def _references(
        self, client: httpx.AsyncClient, questions: Questions, distinct: int
    ) -> list[tuple[Question, Reply]]:
        """Return questions with their undisturbed answers, half of them with stop strings of that answer's text."""
        known: list[tuple[Question, Reply]] = []
        while len(known) < distinct:
            question = questions.draw()
            reply = await ask(client, question)
            if len(known) % 2:
                question = questions.with_stops(question, reply)
                reply = await ask(client, question)
            known.append((question, reply))
        return known

    async def _kill_one(self, client: httpx.AsyncClient) -> bool:
        """Kill a replica that has streams under way, where at least one other is there; say whether that was so."""
        state = (await client.get("/v1/cache/state")).json()
        alive = [r for r in state["replicas"] if "pid" in r and r["replica_id"] not in self.killed]
        busy = [replica for replica in alive if replica["running_sequences"]]
        if len(alive) < 2 or not busy:
            return False
        victim = self._random.choice(busy)
        await asyncio.sleep(self._random.random() * _LONGEST_PAUSE_S)
        os.kill(victim["pid"], signal.SIGKILL)
        self.killed.add(victim["replica_id"])
        return True


async def tried(client: httpx.AsyncClient, question: Question) -> Reply | Broken:
    """Return the answer, or how it broke."""
    try:
        return await ask(client, question)
    except Broken as broken:
        return broken


async def ask(client: httpx.AsyncClient, question: Question) -> Reply:
    """Ask over HTTP. Raises Broken, also for a stream that is not in order: each choice begins and ends once."""
    body = dict(question.body)
    try:
        if body["stream"]:
            return _streamed(question, [event async for event in stream_events(client, question.path, body)])
        response = await client.post(question.path, json=body)
    except (httpx.HTTPError, StreamCut) as error:
        raise Broken("cut", repr(error)) from error
    except RequestFailed as error:
        raise Broken("lost", str(error)) from error
    if response.status_code != 200:
        raise Broken("lost", f"{response.status_code} {response.text[:300]}")
    return _whole(response.json())


def _whole(body: dict[str, Any]) -> Reply:
    found = [(c["message"]["content"] if "message" in c else c["text"], c["finish_reason"]) for c in body["choices"]]
    if [choice["index"] for choice in body["choices"]] != list(range(len(found))):
        raise Broken("cut", "the choices are not in order")
    return Reply(tuple(found), body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])


def _streamed(question: Question, events: Sequence[dict[str, Any]]) -> Reply:
    texts = [""] * question.choices
    reasons = [""] * question.choices
    opened: set[int] = set()
    usage = {"prompt_tokens": 0, "completion_tokens": 0}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            index = choice["index"]
            if reasons[index] or (("role" in choice.get("delta", {})) == (index in opened) and "delta" in choice):
                raise Broken("cut", f"choice {index} opens twice, or goes on after its end")
            opened.add(index)
            texts[index] += (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
            reasons[index] = choice["finish_reason"] or ""
    if not all(reasons):
        raise Broken("cut", "a choice has no end")
    return Reply(tuple(zip(texts, reasons, strict=True)), usage["prompt_tokens"], usage["completion_tokens"])
