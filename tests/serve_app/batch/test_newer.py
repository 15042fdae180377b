"""Rows that a newer release has stored, or that are damaged: each costs itself, with a warning, and nothing is lost."""

from typing import Any

import msgspec
import pytest

from router.background import FAILURES, LOOPS
from serve_app.batch.batches import ABANDONED_S, BATCH, QUEUE, QueuedBatch, new_id
from serve_app.batch.files import CONTENT, FILE
from serve_app.batch.worker import POLL_S
from serve_app.errors import NotFound, StoredByNewerRelease
from tests.harness.virtual_time import passes
from tests.serve_app.batch.world import Ingress, World

OTHERS = (b"[1]", b"\xff", b'{"v": 9}', b"null")
"""What this release cannot read."""


def failures() -> float:
    """Return how often the workers' loop has failed in this process, in earlier tests too."""
    watch = ("loop", "BatchWorker._watch")
    return sum(value for name, labels, value in LOOPS.samples() if name == FAILURES and watch in labels)


async def beside(one: Ingress, kind: str, name: str, value: bytes, tenant: str = "acme") -> None:
    await one.objects.insert(tenant, kind, name, value, one.objects.now_s() + 1e6)


@pytest.mark.parametrize("value", OTHERS)
def test_a_row_of_another_release_costs_itself(value: bytes, world: World, caplog: pytest.LogCaptureFixture) -> None:
    """In the queue, among batches, files and contents: all others run, are listed and kept; it is told once."""

    async def run() -> None:
        one = world.ingress()
        kept = await one.upload("acme", b"x" * 3000)
        held = b"y" * 2000
        name, _ = await one.files.write("acme", parts(held), 80_000.0)  # of a batch that only the newer release knows
        await beside(one, QUEUE, "batch_q", value, "")
        for kind in (BATCH, FILE, CONTENT):
            await beside(one, kind, f"{kind}-x", value)
        queued = QueuedBatch("acme", "batch_n", world.now_s())
        await beside(one, QUEUE, "batch_n", msgspec.json.encode(queued), "")
        await beside(one, BATCH, "batch_n", value)
        before = failures()
        one.start()
        sent = [await one.submit(tenant) for tenant in ("acme", "globex", "acme")]
        await world.until_ended(one, *zip(("acme", "globex", "acme"), sent, strict=True), most_s=60)
        assert {batch.id for batch in await one.batches.listed("acme", list)} == {sent[0].id, sent[2].id}
        assert kept.id in {file.id for file in await one.files.listed("acme", list)}
        for asked in (one.batches.get("acme", f"{BATCH}-x"), one.files.get("acme", f"{FILE}-x")):
            with pytest.raises(StoredByNewerRelease, match="another release"):
                await asked
        world.shift_s += ABANDONED_S + 1
        await one.batches.sweep("acme")
        assert await one.files.part("acme", name, 0, len(held)) == held
        await passes(20 * POLL_S)
        await one.worker.stop()
        assert failures() == before
        told = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
        assert len(told) == len({*told}) + 1 == 5, "once each; two are batches"
        # Without what hid them, abandoned contents are found.
        for kind in (BATCH, FILE):
            await one.objects.remove("acme", kind, f"{kind}-x")
        await one.objects.remove("acme", BATCH, "batch_n")
        await one.batches.sweep("acme")
        with pytest.raises(NotFound):
            await one.files.part("acme", name, 0, 1)
        assert await one.read("acme", kept.id) == b"x" * 3000

    world.run(run())


async def parts(content: bytes) -> Any:
    yield content


def test_what_a_newer_release_knows_of_a_batch_stays(world: World) -> None:
    """It runs here, too: its row keeps the fields that this release does not know."""

    async def run() -> None:
        one = world.ingress()
        batch = await one.submit("acme")

        def add(data: bytes) -> bytes:
            return msgspec.json.encode({**msgspec.json.decode(data), "priority": {"of": [1, 2]}})

        assert await one.objects.change("acme", BATCH, batch.id, add)
        one.start()
        await world.until_ended(one, ("acme", batch))
        await one.worker.stop()
        row = msgspec.json.decode(await one.objects.get("acme", BATCH, batch.id) or b"")
        assert (row["priority"], row["status"], row["completed"]) == ({"of": [1, 2]}, "completed", 3)

    world.run(run())


def test_a_file_that_a_batch_of_a_newer_release_reads_is_known_to_be_read(world: World) -> None:
    """Its status may have a new name, and other fields a new form."""

    async def run() -> None:
        one = world.ingress()
        name = new_id("batch_", world.now_s())
        row = {"id": name, "content": "held", "status": "paused", "errors": {"more": 1}}
        await beside(one, BATCH, name, msgspec.json.encode(row))
        await beside(one, QUEUE, name, msgspec.json.encode(QueuedBatch("acme", name, 0.0)), "")
        assert [batch.content for batch in await one.batches.open("acme")] == ["held"]
        assert await one.batches.open("globex") == []

    world.run(run())


def test_a_result_that_cannot_be_read_is_told_in_its_line(world: World) -> None:
    async def run() -> None:
        one = world.ingress()
        world.quiet = False
        batch = await one.submit("acme", 4)
        await beside(one, f"lines {batch.id}", "2", b'{"v": 9}')
        world.quiet = True
        one.start()
        await world.until_ended(one, ("acme", batch))
        await one.worker.stop()
        batch = await one.batches.get("acme", batch.id)
        assert (batch.completed, batch.failed) == (3, 1)
        (line,) = (await one.results("acme", batch))["error"]
        assert line["custom_id"] == "c2" and "damaged" in line["response"]["body"]["error"]["message"]
        assert {prompt for _, prompt in world.asked} == {"0", "1", "3"}

    world.run(run())
