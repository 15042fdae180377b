"""Runners of batches: kills lose and repeat nothing, another one continues, and a busy server is asked again."""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve_app.batch import lease
from serve_app.batch.batch_run import Said
from serve_app.batch.batches import Batches, LineResult, StoredBatch
from serve_app.batch.files import CONTENT, Files
from serve_app.batch.worker import BatchWorker
from serve_app.errors import NotFound, Overloaded
from tests.harness.eventually import until
from tests.harness.virtual_time import passes
from tests.serve_app.batch import kills
from tests.serve_app.batch.kills import LINES, TENANTS, ended, judged, opened, submitted
from tests.serve_app.batch.plays import MOVED, REPLACED, STEADY, few, of, played
from tests.serve_app.batch.world import World, content_of

KILLS = 40
FEW = 40
"""Lines of a batch, where more would only take longer."""


def test_a_batch_whose_lines_rest_counts_all_that_are_answered(world: World) -> None:
    """Lines end while its row is written, which takes its time."""

    async def run() -> None:
        one = world.ingress()
        batch = await one.submit("acme", 30)
        one.objects.before = lambda number: passes(0.3)
        one.start()
        await world.until(lambda: world.kept.total() >= 12, 100)
        world.quiet = False
        await passes(20 * lease.TICK_S)
        one.objects.before = None
        found = await one.batches.get("acme", batch.id)
        assert found.completed == len(await one.batches.done("acme", found)) == world.kept.total() < 30
        await one.worker.stop()

    world.run(run())


@pytest.mark.parametrize("count", [1, 7, 20])
def test_a_late_batch_keeps_up_with_its_time(count: int, world: World) -> None:
    """While others let nothing start: nothing before its half, then as many lines as of its time are over."""
    world.quiet, most_s = False, 1000.0

    async def run() -> None:
        one = world.ingress()
        await one.submit("acme", count, window_s=most_s)
        begun_s = world.loop.time()
        one.start()
        for over_s in range(40, 1000, 50):
            await passes(begun_s + over_s - world.loop.time())
            wanted = ceil(count * over_s / most_s) if over_s > most_s / 2 else 0
            assert world.asked.total() == wanted, over_s
        assert not any(world.waits)
        await one.worker.stop()

    world.run(run())


def test_a_line_that_the_server_fails_at_is_asked_for_three_times(world: World) -> None:
    async def run() -> None:
        one = world.ingress()

        async def answer(tenant: str, prompt: str) -> Said:
            return Said(500 if prompt == "1" else 200, b"{}")

        world.answer = answer  # type: ignore[method-assign]
        batch = await one.submit("acme", 3)
        one.start()
        await world.until_ended(one, ("acme", batch))
        await one.worker.stop()
        assert [world.asked["acme", str(at)] for at in range(3)] == [1, 3, 1]

    world.run(run())


def test_a_batch_that_makes_room_ends_and_counts_what_it_has_begun(world: World) -> None:
    """Also the tries of a line that the server fails at; nothing of it is asked for again."""

    async def run() -> None:
        one, limited = world.ingress(), True

        async def answer(tenant: str, prompt: str) -> Said:
            await passes(0.1)
            if prompt == "5" and limited:
                return Said(429, b"{}", retry_after_s=86_400.0, own_limit=True)
            return Said(500 if prompt == "0" else 200, b"{}")

        world.answer = answer  # type: ignore[method-assign]
        batch = await one.submit("acme", 6, window_s=80_000.0)
        one.start()
        await world.until(lambda: bool(one.worker.running), 10)
        await world.until(lambda: not one.worker.running, 60)
        found = await one.batches.get("acme", batch.id)
        assert (found.status, found.completed, found.failed) == ("in_progress", 4, 1)
        limited = False
        one.worker.limits_changed()
        await world.until_ended(one, ("acme", batch))
        await one.worker.stop()
        assert [world.asked["acme", str(at)] for at in range(6)] == [3, 1, 1, 1, 1, 2]

    world.run(run())


@pytest.mark.parametrize("back_s", [0.0, 7000.0])
def test_a_batch_of_a_dead_process_goes_on_after_its_lease(back_s: float, world: World) -> None:
    """Not later, if the clock was set back; and nobody else takes one of a living process."""

    async def run() -> None:
        one, two = world.ingress("one"), world.ingress("two")
        batch = await one.submit("acme", 3)
        world.quiet = False
        one.start()
        await world.until(lambda: bool(one.worker.running), 10)
        two.start()
        await passes(3 * lease.LEASE_S)
        assert not two.worker.running
        await one.kill()
        world.shift_s -= back_s
        world.quiet = True
        await world.until_ended(two, ("acme", batch), most_s=lease.LEASE_S + 10)
        await two.worker.stop()

    world.run(run())


def test_a_process_that_was_away_finds_its_batch_taken(world: World) -> None:
    """It lets go of it, and writes nothing more."""

    async def run() -> None:
        one, two, back = world.ingress("one"), world.ingress("two"), asyncio.Event()
        batch = await one.submit("acme", 3)
        world.quiet = False
        one.start()
        await world.until(lambda: bool(one.worker.running), 10)

        async def away(number: int) -> None:
            await back.wait()

        one.objects.before = away
        two.start()
        await world.until(lambda: bool(two.worker.running), 2 * lease.LEASE_S)
        back.set()
        await passes(5 * lease.TICK_S)
        holder = (await two.batches.get("acme", batch.id)).holder
        assert (holder, bool(one.worker.running), bool(two.worker.running)) == (two.worker.name, False, True)
        world.quiet = True
        await world.until_ended(two, ("acme", batch))
        assert {*world.asked.values()} == {1}
        await one.worker.stop()
        await two.worker.stop()

    world.run(run())


def test_a_line_that_ends_where_its_chunk_does_is_asked_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of a file; nothing after it is looked for."""
    monkeypatch.setattr("serve_app.batch.files.CHUNK_BYTES", 64)
    prompts = ["a", "b", "x" * (-len(content_of(["a", "b", ""])) % 64)]
    assert len(content_of(prompts)) % 64 == 0

    async def run() -> None:
        one = world.ingress()
        batch = await one.submit("acme", prompts)
        one.start()
        await world.until_ended(one, ("acme", batch))
        await one.worker.stop()
        assert (await one.batches.get("acme", batch.id)).completed == 3
        assert {*world.asked} == {("acme", prompt) for prompt in prompts}

    world.run(run())


def test_results_that_another_process_has_written_too_are_not_left_behind(world: World) -> None:
    """A batch is taken by another one while its results are written."""

    async def run() -> None:
        one = world.ingress()
        batch = await one.submit("acme", 3)
        taken = asyncio.Event()

        def take(row: StoredBatch) -> bool:
            row.holder, row.held_until_s = "other", one.objects.now_s() + lease.LEASE_S
            return True

        class Slow(Files):
            async def write(
                self, tenant: str, parts: AsyncIterator[bytes], life_s: float, room: int | None = None
            ) -> tuple[str, int]:
                written = await Files.write(self, tenant, parts, life_s, room)
                await one.batches.change("acme", batch.id, take)
                taken.set()
                return written

        one.worker.batches = Batches(one.objects, Slow(one.objects))
        one.start()
        await taken.wait()
        await world.until(lambda: not one.worker.running, 10)
        assert len(await one.objects.ids("acme", CONTENT)) == 1, "its input's"
        await one.worker.stop()

    world.run(run())


def test_the_first_result_of_a_line_stays(world: World) -> None:
    """Of two processes that both ask for it, one says that its result is new."""

    async def run() -> None:
        one, two = world.ingress("one"), world.ingress("two")
        batch = await one.submit("acme", 2)
        batch.total = 2
        first, second = (LineResult("c1", 200, name, msgspec.Raw(b"{}")) for name in ("first", "second"))
        assert await one.batches.keep("acme", batch, 1, first)
        assert not await two.batches.keep("acme", batch, 1, second)
        assert not await one.batches.keep("acme", batch, 1, first)
        assert [found async for found in two.batches.results("acme", batch)] == [(0, None), (1, first)]

    world.run(run())


@few
@of(STEADY)
def test_each_line_is_answered_once(events: Any) -> None:
    """Whatever the tenants' limits and other work do; one that the server fails at is asked for three times."""
    played(events)


@few
@of(STEADY, REPLACED)
def test_a_line_with_a_result_is_asked_for_no_more(events: Any) -> None:
    """Whoever dies or stops; what was in progress is continued by others."""
    played(events)


@few
@of(STEADY, REPLACED, MOVED)
def test_each_line_has_one_result_with_any_clocks(events: Any) -> None:
    """Though two processes may run a batch for a moment; and nothing of it stays behind."""
    played(events)


def test_killed_runners_lose_and_repeat_no_line(tmp_path: Path) -> None:
    """Two runners of one database, as two ingresses have, die at random moments. docs: batch"""
    command = [sys.executable, "-m", "tests.serve_app.batch.kills", str(tmp_path / "f"), str(KILLS)]
    counts = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=250).stdout)
    assert counts["kills"] >= KILLS and counts["results"] == counts["batches"] * LINES > 0
    assert [counts[name] for name in ("lost", "repeated", "wrong", "left", "unended")] == [0] * 5


@pytest.mark.parametrize("steps", range(3))
def test_a_runner_that_died_while_it_tidied_is_continued(steps: int, tmp_path: Path) -> None:
    async def run() -> None:
        (batch_id,) = await submitted(tmp_path / "f", None, TENANTS[:1])
        batches = opened(tmp_path / "f", None)
        remove, left = batches.objects.remove, steps

        def end(batch: StoredBatch) -> bool:
            batch.status, batch.total, batch.owns_content = "completed", 1, True
            return True

        async def mortal(tenant: str, kind: str, name: str | None = None) -> bool:
            nonlocal left
            if not left:
                raise InterruptedError
            left -= 1
            return await remove(tenant, kind, name)

        batch = await batches.change(TENANTS[0], batch_id, end)
        assert batch is not None
        assert await batches.keep(TENANTS[0], batch, 0, LineResult("c0", 200, "r", msgspec.Raw(b"null")))
        batches.objects.remove = mortal  # type: ignore[method-assign]
        with pytest.raises(InterruptedError):
            await batches.tidy(TENANTS[0], batch)

        async def ask(*_: object) -> Said:
            raise AssertionError("it has ended")

        last = BatchWorker(opened(tmp_path / "f", None), "last", ask, bool, lambda *_: True, lambda: 1, lambda: 1)
        last.start()
        await until(lambda: ended(tmp_path / "f", None))
        await last.stop()
        assert not await batches.done(TENANTS[0], batch)
        with pytest.raises(NotFound):
            await batches.files.part(TENANTS[0], batch.content, 0, 1)

    asyncio.run(run())


def test_a_line_that_comes_after_another_runner_ended_the_batch_is_tidied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "TICK_S", 3600.0)  # the runner is stopped, and does not look at the row

    async def run() -> None:
        asked, wake = asyncio.Event(), asyncio.Event()
        (batch_id,) = await submitted(tmp_path / "f", None, TENANTS[:1])
        batches = opened(tmp_path / "f", None)

        async def ask(*_: object) -> Said:
            asked.set()
            await wake.wait()
            return Said(200, b"{}")

        def end(batch: StoredBatch) -> bool:
            batch.holder, batch.status = "other", "completed"
            return True

        late = BatchWorker(opened(tmp_path / "f", None), "late", ask, bool, lambda *_: True, lambda: 1, lambda: 1)
        late.start()
        await asyncio.wait_for(asked.wait(), 60)
        batch = await batches.change(TENANTS[0], batch_id, end)
        assert batch is not None
        await batches.tidy(TENANTS[0], batch)
        remove, tidying = late.batches.objects.remove, asyncio.Event()

        async def slow(tenant: str, kind: str, name: str | None = None) -> bool:
            tidying.set()
            await asyncio.sleep(0.1)
            return await remove(tenant, kind, name)

        monkeypatch.setattr(late.batches.objects, "remove", slow)
        wake.set()
        await asyncio.wait_for(tidying.wait(), 60)
        await late.stop()  # waits for what has begun
        assert not late.running
        assert not await batches.done(TENANTS[0], batch)

    asyncio.run(run())


def test_a_runner_that_stops_hands_over_and_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    """Each line is refused once with a time to wait, and one fails; a batch waits for a tenant that is unknown now."""
    file, asked, known, some = tmp_path / "f", Counter[str](), {TENANTS[0]}, asyncio.Event()

    async def ask(tenant: str, path: str, body: bytes, request_id: str, waits: bool) -> Said:
        prompt = json.loads(body)["prompt"]
        asked[prompt] += 1
        if len(asked) > LINES // 4:
            some.set()
        if asked[prompt] == 1:
            return Said(429, b"{}", retry_after_s=0.001)
        if asked[prompt] == 2 and prompt.endswith("100"):
            return Said(500, b"{}")
        await asyncio.sleep(0.002)
        status = 400 if prompt.endswith("7") else 200
        return Said(status, json.dumps({"prompt": prompt}).encode())

    def runner(name: str) -> BatchWorker:
        batches = opened(file, None)
        return BatchWorker(batches, name, ask, known.__contains__, lambda *_: True, lambda: 16, lambda: 2)

    async def run() -> Counter[str]:
        made = await submitted(file, None)
        first, second = runner("first"), runner("second")
        first.start()
        await asyncio.wait_for(some.wait(), 60)
        await first.stop()
        second.start()
        known.add(TENANTS[1])
        second.wake()
        await until(lambda: ended(file, None))
        await second.stop()
        counts = Counter[str]()
        await judged(file, None, made, counts)
        return counts

    counts = asyncio.run(run())
    assert counts == Counter(results=LINES * len(TENANTS))
    assert len(asked) == LINES * len(TENANTS)
    assert sum(number > 3 for number in asked.values()) == 0


@pytest.mark.parametrize("gone", ["before", "while"])
def test_what_was_answered_stays_if_the_input_is_gone(gone: str, tmp_path: Path) -> None:
    """A file may expire while its batch waits for a runner, or while its lines are asked for."""

    async def run() -> None:
        (batch_id,) = await submitted(tmp_path / "f", None, TENANTS[:1])
        batches, asked = opened(tmp_path / "f", None), 0
        some, never = asyncio.Event(), asyncio.Event()

        async def ask(*_: object) -> Said:
            nonlocal asked
            asked += 1
            if asked > 3:
                some.set()
                await never.wait()
            return Said(200, b"{}")

        def runner() -> BatchWorker:
            made = BatchWorker(opened(tmp_path / "f", None), "one", ask, bool, lambda *_: True, lambda: 2, lambda: 2)
            made.start()
            return made

        async def three_kept() -> bool:
            return len(await batches.done(TENANTS[0], await batches.get(TENANTS[0], batch_id))) >= 3

        first = runner()
        await asyncio.wait_for(some.wait(), 60)
        await until(three_kept)  # an answer that is not stored yet may be asked for again
        if gone == "before":
            await first.stop()
        await batches.files.forget(TENANTS[0], (await batches.get(TENANTS[0], batch_id)).content)
        never.set()
        second = first if gone == "while" else runner()
        await until(lambda: ended(tmp_path / "f", None))
        await second.stop()
        batch = await batches.get(TENANTS[0], batch_id)
        assert (batch.status, batch.total, batch.unasked) == ("expired", LINES, "expired")
        file = await batches.files.get(TENANTS[0], batch.output_file_id or "")
        text = await batches.files.part(TENANTS[0], file.content, 0, file.bytes)
        assert len(text.splitlines()) == batch.completed >= 3

    asyncio.run(run())


def test_a_batch_behind_another_ends_when_it_is_cancelled_or_expires(tmp_path: Path) -> None:
    """A tenant's batches run one after the other, but nothing of such a one is left to run."""

    async def run() -> None:
        file, tenant, begun = tmp_path / "f", TENANTS[0], asyncio.Event()
        batches = opened(file, None)

        async def ask(*_: object) -> Said:
            begun.set()
            return await asyncio.Future()

        await submitted(file, None, [tenant])
        one = BatchWorker(opened(file, None), "one", ask, bool, lambda *_: True, lambda: 2, lambda: 2)
        one.start()
        await asyncio.wait_for(begun.wait(), 60)
        (cancelled,), (expired,) = await submitted(file, None, [tenant]), await submitted(file, None, [tenant])

        def expire(batch: StoredBatch) -> bool:
            batch.expires_at = 0.0
            return True

        await batches.cancel(tenant, cancelled)
        await batches.change(tenant, expired, expire)
        one.wake()

        async def both() -> bool:
            return [(await batches.get(tenant, name)).status for name in (cancelled, expired)] == [
                "cancelled",
                "expired",
            ]

        await until(both)
        await one.stop()
        assert {batch.status for batch in await batches.listed(tenant, list)} == {"cancelled", "expired", "in_progress"}

    asyncio.run(run())


def test_a_store_that_is_busy_for_a_while_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines in progress are not asked for again."""
    monkeypatch.setattr(lease, "TICK_S", 0.01)
    monkeypatch.setattr(kills, "LINES", FEW)

    async def run() -> None:
        file, asked = tmp_path / "f", Counter[bytes]()
        made = await submitted(file, None, TENANTS[:1])
        batches = opened(file, None)
        keep, calls = batches.objects.insert, 0

        async def insert(*arguments: Any) -> bool:
            nonlocal calls
            calls += 1
            if calls % 3:
                raise Overloaded("locked")
            return await keep(*arguments)

        async def ask(tenant: str, path: str, body: bytes, request_id: str, waits: bool) -> Said:
            asked[body] += 1
            prompt = json.loads(body)["prompt"]
            return Said(400 if prompt.endswith("7") else 200, json.dumps({"prompt": prompt}).encode())

        batches.objects.insert = insert  # type: ignore[method-assign]
        one = BatchWorker(batches, "one", ask, bool, lambda *_: True, lambda: 8, lambda: 2)
        one.start()

        async def done() -> bool:
            return (
                len(await opened(file, None).done(TENANTS[0], await batches.get(TENANTS[0], next(iter(made))))) == FEW
            )

        await until(done)
        await one.stop()
        assert set(asked.values()) == {1} and len(asked) == FEW

    asyncio.run(run())


@pytest.mark.parametrize("part", [0.4, 0.6])
def test_a_batch_that_is_late_waits_for_nobody_with_one_line(
    part: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From half of its time on, with more lines than time left; before, it starts nothing beside others. docs: batch"""
    monkeypatch.setattr(kills, "LINES", FEW)

    async def run() -> None:
        (batch_id,) = await submitted(tmp_path / "f", None, TENANTS[:1])
        batches, looks, running, most = opened(tmp_path / "f", None), 0, 0, 0
        waited: list[bool] = []

        def age(batch: StoredBatch) -> bool:
            now_s, most_s = time.time(), 36_000.0
            batch.created_at, batch.expires_at = now_s - part * most_s, now_s + (1 - part) * most_s
            return True

        def quiet(*_: object) -> bool:
            nonlocal looks
            looks += 1
            return False

        async def ask(tenant: str, path: str, body: bytes, request_id: str, waits: bool) -> Said:
            nonlocal running, most
            running += 1
            most = max(most, running)
            waited.append(waits)
            await asyncio.sleep(0.001)
            running -= 1
            return Said(200, b"{}")

        await batches.change(TENANTS[0], batch_id, age)
        one = BatchWorker(opened(tmp_path / "f", None), "one", ask, bool, quiet, lambda: 8, lambda: 2)
        one.start()
        await until(lambda: looks >= 10)
        if part > 0.5:
            # On time again: most of its lines have a result.
            await until(lambda: len(waited) >= FEW * part)
            looks = 0
            await until(lambda: looks >= 20)
            assert (most, {*waited}) == (1, {False}) and len(waited) <= FEW * part + 2
        else:
            assert not waited
        await one.stop()

    asyncio.run(run())


def test_lines_count_from_their_start(tmp_path: Path) -> None:
    """Many of one beginning are free at once, and none of them has been asked for yet: no more start than may."""

    async def run() -> tuple[int, int]:
        await submitted(tmp_path / "f", None, TENANTS[:1])
        running, most = 0, 0

        async def ask(tenant: str, path: str, body: bytes, request_id: str, waits: bool) -> Said:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            return Said(200, b"{}")

        def quiet(*_: object) -> bool:
            return one.asking.total() < 3

        one = BatchWorker(opened(tmp_path / "f", None), "one", ask, bool, quiet, lambda: 64, lambda: 2)
        one.start()
        await until(lambda: ended(tmp_path / "f", None))
        await one.stop()
        return most, one.asking.total()

    assert asyncio.run(run()) == (3, 0)


def test_the_last_try_of_a_line_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have failed because others let it wait for too long."""
    monkeypatch.setattr(kills, "LINES", FEW)

    async def run() -> None:
        await submitted(tmp_path / "f", None, TENANTS[:1])
        tries: dict[bytes, list[bool]] = {}

        async def ask(tenant: str, path: str, body: bytes, request_id: str, waits: bool) -> Said:
            tries.setdefault(body, []).append(waits)
            return Said(500 if b" 30" in body and waits else 200, b"{}")

        one = BatchWorker(opened(tmp_path / "f", None), "one", ask, bool, lambda *_: True, lambda: 8, lambda: 2)
        one.start()
        await until(lambda: ended(tmp_path / "f", None))
        await one.stop()
        assert Counter(map(tuple, tries.values())) == {(True,): FEW - 1, (True, True, False): 1}

    asyncio.run(run())
