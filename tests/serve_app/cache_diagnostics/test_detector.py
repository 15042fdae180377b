"""An ingress' misses: explained beside the answer, counted, logged once a pattern, each tenant's by its own alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.protocol.block_hash import PrefixScope
from serve_app.cache_diagnostics.detector import MAX_AT_ONCE, MissDetector
from serve_app.cache_diagnostics.explain import Miss, is_miss
from serve_app.engine.protocol import SamplingParams
from serve_app.fairness.shares import Shares
from serve_app.fairness.workers import FairWorkers
from serve_app.generation.generation import Generation

REST = "and these are the rules that all of the answers have to follow, whoever asks: " * 4


def generation(text: str, tenant: str = "a", lora: str = "", salt: str = "", *, store_kv: bool = True) -> Generation:
    """A token is a character."""
    return Generation(
        request_id="r",
        token_ids=np.array([ord(char) for char in text], dtype=np.int32),
        block_hashes=b"",
        scope=PrefixScope("m", lora, f"{tenant}/{salt}".encode()),
        root=b"",
        placement_key=text.encode()[:200],
        tenant=tenant,
        sampling=SamplingParams(max_tokens=1),
        store_kv=store_kv,
        system_chars=len(text),
    )


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


class Bench:
    """A detector, what it counted, and a clock that goes on with each request."""

    def __init__(self) -> None:
        self.counted: list[tuple[str, str, int]] = []
        self.elsewhere: list[str] = []
        self.now_s = 0.0
        workers = FairWorkers(Shares({}), threads=2)
        self.detector = MissDetector(
            decode, workers, lambda: 3, lambda *miss: self.counted.append(miss), self.elsewhere.append
        )

    async def ask(self, wanted: Generation, cached_tokens: int = 0) -> Miss | None:
        self.now_s += 1
        task = self.detector.observe(wanted, cached_tokens, self.now_s, self.now_s + 0.5)
        return None if task is None else await task


def test_a_hit_costs_nothing_but_being_remembered() -> None:
    """No task, nothing counted; few computed tokens, or a small part of a prompt, are no miss."""

    async def run() -> None:
        bench = Bench()
        assert await bench.ask(generation(REST), len(REST) - 16) is None
        assert bench.counted == []
        again = await bench.ask(generation(REST), 0)
        assert again is not None and again.reason == "evicted" and again.lost_tokens == len(REST)

    asyncio.run(run())
    assert not is_miss(63, 0) and is_miss(64, 0)
    assert not is_miss(10_000, 9_000) and is_miss(10_000, 8_000)


def test_reasons_of_a_day(caplog: pytest.LogCaptureFixture) -> None:
    """Each reason with what it cost; one line for a pattern, which does not hold what the prompt says."""

    async def run() -> list[Miss | None]:
        bench = Bench()
        found = [
            await bench.ask(generation("Today is 2026-11-21. " + REST)),
            await bench.ask(generation("Today is 2026-11-22. " + REST), 16),
            await bench.ask(generation("Today is 2026-11-23. " + REST), 16),
            await bench.ask(generation("Today is 2026-11-23. " + REST, lora="clerk")),
            await bench.ask(generation("Today is 2026-11-23. " + REST, salt="x")),
        ]
        assert [reason for _, reason, _ in bench.counted] == ["never_seen", "date", "date", "adapter", "salt"]
        return found

    with caplog.at_level(logging.WARNING):
        _, second, third, adapter, _ = asyncio.run(run())
    assert second is not None and third is not None and adapter is not None
    shown = second.shown()
    assert shown["first_difference"] == {"part": "system", "token": 18, "char": 18, "line": 1, "found": "2026-11-22"}
    assert shown["lost_tokens"] == second.lost_tokens == len(REST) + 2
    assert adapter.lost_tokens == len(REST) + 21
    assert [record.message.count("date at character 18") for record in caplog.records].count(1) == 1
    assert not any("2026" in record.message or "rules" in record.message for record in caplog.records)


def test_a_request_that_leaves_nothing_is_not_remembered() -> None:
    """With store_kv false: neither told of, nor compared with."""

    async def run() -> None:
        bench = Bench()
        assert await bench.ask(generation(REST, store_kv=False)) is None
        seen = await bench.ask(generation(REST))
        assert seen is not None and seen.reason == "never_seen"

    asyncio.run(run())


def test_what_was_answered_later_explains_nothing() -> None:
    """Two requests of one prompt at one moment: neither could have read the other's KV."""

    async def run() -> None:
        bench = Bench()
        first = bench.detector.observe(generation(REST), 0, 1.0, 2.0)
        second = bench.detector.observe(generation(REST), 0, 1.0, 2.1)
        assert first is not None and second is not None
        assert (await first).reason == (await second).reason == "never_seen"
        tasks = [bench.detector.observe(generation(REST), 0, 3.0, 3.0) for _ in range(MAX_AT_ONCE + 3)]
        assert sum(task is None for task in tasks) == 3
        await asyncio.gather(*filter(None, tasks))
        assert [reason for _, reason, _ in bench.counted].count("not_compared") == 3

    asyncio.run(run())


requests = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from(("Today is 2026-11-21. ", "Today is 2026-11-22. ", "Turn 1. ", "Turn 2. ")),
        st.sampled_from(("", "x")),
    ),
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(requests)
def test_a_tenant_is_told_what_its_own_requests_say_and_nothing_else(asked: list[tuple[str, str, str]]) -> None:
    """Whatever another tenant sends between them, the answers and the counts are the same. (docs/caching.md)"""

    async def told(only: str) -> tuple[list[Miss | None], list[tuple[str, str, int]]]:
        bench = Bench()
        found = [
            (tenant, await bench.ask(generation(start + REST, tenant, salt=salt)))
            for tenant, start, salt in asked
            if tenant in only
        ]
        return [miss for tenant, miss in found if tenant == "a"], [each for each in bench.counted if each[0] == "a"]

    assert asyncio.run(told("ab")) == asyncio.run(told("a"))


def test_operators_hear_that_two_tenants_have_one_prompt() -> None:
    """Not the tenants: to each of them it is new. The same tenant again, or another prompt, is no such thing."""

    async def run() -> None:
        bench = Bench()
        for tenant in ("a", "b"):
            miss = await bench.ask(generation(REST, tenant))
            assert miss is not None and miss.reason == "never_seen"
        assert bench.elsewhere == ["b"]
        await bench.ask(generation("An entirely different prompt. " * 12, "b"))
        assert bench.elsewhere == ["b"]

    asyncio.run(run())
