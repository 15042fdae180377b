"""Files: their parts, their room over all uploads at once, and their ends. What fails leaves nothing."""

import asyncio
import random
import sqlite3
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from serve_app.batch import files
from serve_app.batch.batches import ABANDONED_S
from serve_app.batch.files import File, new_id, place_in_name, place_of
from serve_app.errors import InvalidRequest, NotFound, RequestTooLarge
from tests.harness.virtual_time import passes
from tests.serve_app.batch.world import EPOCH_S, Died, Ingress, World

CHUNK = 512
TENANTS = ("acme", "globex")
MOST_BYTES = 16 << 10
ROW_BYTES = 512
"""More than a file's row and its content's take."""
few = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


def noise(seed: int, size: int) -> bytes:
    """Return bytes that no compression makes fewer."""
    return random.Random(seed).randbytes(size)


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", CHUNK)


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK])
def test_each_part_of_a_file_is_that_of_its_bytes(size: int, world: World) -> None:
    """Also one that ends where a chunk does."""
    content = noise(size, size)

    async def run() -> None:
        one = world.ingress()
        file = await one.upload("acme", content, part=100)
        edges = sorted(
            {at for edge in (0, CHUNK, size // 2, size) for at in (edge - 1, edge, edge + 1) if 0 <= at <= size}
        )
        for start in edges:
            for end in edges:
                if start < end:
                    assert await one.files.part("acme", file.content, start, end - start) == content[start:end]
        assert await one.read("acme", file.id) == content

    world.run(run())


@dataclass
class Room:
    """What happens to the files of some tenants over two processes, and what may be expected to stay."""

    world: World
    here: list[Ingress] = field(default_factory=list)
    uploads: list[tuple[str, int, bytes, "asyncio.Task[File | None]"]] = field(default_factory=list)
    """By tenant, process, bytes."""
    kept: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """By id, of the files that are there."""
    killed = False

    def __post_init__(self) -> None:
        self.here = [self.world.ingress("one"), self.world.ingress("two")]

    async def upload(self, tenant: str, at: int, size: int, wrong: bool) -> None:
        content, one = noise(len(self.uploads), size), self.here[at]

        async def sent() -> File | None:
            try:
                file = await one.upload(
                    tenant, content, part=300, purpose="batch", fails_at=size // 2 if wrong else None
                )
            except RequestTooLarge as error:
                assert error.code == "storage_limit_exceeded"
                return None
            except InvalidRequest:
                assert wrong
                return None
            self.kept[file.id] = (tenant, content)
            return file

        self.uploads.append((tenant, at, content, asyncio.create_task(sent())))

    async def cut(self, number: int) -> None:
        """A client goes."""
        if self.uploads:
            self.uploads[number % len(self.uploads)][3].cancel()

    async def kill(self, at: int) -> None:
        self.killed = True
        await self.here[at].kill()
        for _, where, _, task in self.uploads:
            if where == at:
                await asyncio.wait({task})
        self.uploads = [one for one in self.uploads if one[1] != at or not isinstance(_error(one[3]), Died)]
        self.here[at] = self.world.ingress(("one", "two")[at])

    async def delete(self, number: int, at: int) -> None:
        if self.kept:
            file_id = sorted(self.kept)[number % len(self.kept)]
            tenant, _ = self.kept.pop(file_id)
            await self.here[at].files.delete(tenant, file_id)

    async def is_bounded(self) -> None:
        for tenant in TENANTS:
            own = sum(of == tenant for of, *_ in self.uploads)
            assert await self.here[0].objects.taken(tenant) <= MOST_BYTES + ROW_BYTES * own

    async def judge(self) -> None:
        """Wait for all uploads, and compare the rooms with what is kept."""
        for *_, task in self.uploads:
            if not task.done():
                await asyncio.wait({task})
            error = _error(task)
            assert error is None or isinstance(error, asyncio.CancelledError), error
        await passes(1)
        one = self.world.ingress("judge")
        wanted = sum(2 + -(-len(content) // CHUNK) for _, content in self.kept.values())
        assert self.killed or rows(self.world) == wanted, "at once; only what dies leaves something, for an hour"
        for file_id, (tenant, content) in self.kept.items():
            assert await one.read(tenant, file_id) == content
        self.world.shift_s += ABANDONED_S + 1
        for tenant in TENANTS:
            await one.batches.sweep(tenant)
            assert {file.id for file in await one.files.listed(tenant, list)} == {
                name for name, (of, _) in self.kept.items() if of == tenant
            }
        assert rows(self.world) == wanted
        for file_id, (tenant, _) in self.kept.items():
            await one.files.delete(tenant, file_id)
        assert [await one.objects.taken(tenant) for tenant in TENANTS] == [0, 0]


def _error(task: "asyncio.Task[Any]") -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception() if task.done() else None


def rows(world: World) -> int:
    with sqlite3.connect(world.file) as database:
        (found,) = database.execute("SELECT COUNT(*) FROM sealed_objects").fetchone()
        return int(found)


TENANT, AT = st.sampled_from(TENANTS), st.integers(0, 1)
SIZE = st.one_of(st.sampled_from([0, 1, CHUNK, 4 * CHUNK, MOST_BYTES - 8 * CHUNK]), st.integers(0, MOST_BYTES))
LIFE = st.sampled_from([None, 3600, 7200, 86_400])
UPLOAD = st.tuples(st.just("upload"), TENANT, AT, SIZE, st.booleans())
OTHER = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 9)), st.tuples(st.just("kill"), AT),
    st.tuples(st.just("delete"), st.integers(0, 9), AT),
)  # fmt: skip
EVENT = st.tuples(st.one_of(UPLOAD, UPLOAD, OTHER), st.sampled_from([0.0, 0.0, 0.015, 0.2, 2.0]))


@few
@given(st.lists(EVENT, min_size=3, max_size=16))
def test_room_is_taken_once_and_given_back(events: list[tuple[tuple[Any, ...], float]]) -> None:
    """Uploads of two processes at once, clients that go, forms that are wrong, kills, deletions: never over the limit,
    and in the end exactly the files that are there."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "responses.sqlite", max_bytes=MOST_BYTES)

        async def run() -> None:
            room = Room(world)
            for (name, *values), seconds in events:
                await getattr(room, name)(*values)
                await passes(seconds)
                await room.is_bounded()
            await room.judge()

        try:
            world.run(run())
        finally:
            world.close()


@pytest.mark.parametrize("part", [300, 11 << 10])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 30])
def test_of_uploads_at_once_those_that_fit_arrive(count: int, part: int, world: World) -> None:
    """Each would fit alone: one does, the others are told so, and nothing of them is left."""
    world.max_bytes = MOST_BYTES

    async def run() -> None:
        one, size = world.ingress(), 11 << 10
        found = await asyncio.gather(
            *(one.upload("acme", noise(at, size), part=part) for at in range(count)), return_exceptions=True
        )
        assert Counter(map(type, found)) == Counter({File: 1, RequestTooLarge: count - 1})
        assert {error.code for error in found if isinstance(error, RequestTooLarge)} <= {"storage_limit_exceeded"}
        assert rows(world) == 2 + -(-size // CHUNK)
        with pytest.raises(RequestTooLarge, match="delete some"):
            await one.upload("acme", noise(9, size))
        await one.upload("globex", noise(9, size))
        (file,) = [one for one in found if isinstance(one, File)]
        await one.files.delete("acme", file.id)
        await one.upload("acme", noise(9, size))

    world.run(run())


@few
@given(
    st.lists(st.tuples(TENANT, st.sampled_from([0, 40, 3 * CHUNK]), LIFE), max_size=6),
    st.lists(st.sampled_from([10.0, 3590.0, 3600.0, 40_000.0]), max_size=6),
)  # fmt: skip
def test_a_file_ends_with_all_that_belongs_to_it(sent: list[tuple[str, int, int | None]], steps: list[float]) -> None:
    """At its time, by the clock: it is read until then; then its chunks take no room, and later no disk."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "responses.sqlite", ttl_s=50_000.0)

        async def run() -> None:
            one, made = world.ingress(), []
            for number, (tenant, size, life_s) in enumerate(sent):
                content = noise(number, size)
                made.append((tenant, content, await one.upload(tenant, content, life_s)))
                assert made[-1][2].expires_at == made[-1][2].created_at + min(life_s or 50_000.0, 50_000.0)
            for step in [*steps, 90_000.0]:
                world.shift_s += step
                live = [(tenant, content, file) for tenant, content, file in made if file.expires_at >= world.now_s()]
                for tenant in TENANTS:
                    assert {file.id for file in await one.files.listed(tenant, list)} == {
                        file.id for of, _, file in live if of == tenant
                    }
                    assert bool(await one.objects.taken(tenant)) == any(of == tenant for of, *_ in live)
                for tenant, content, file in made:
                    if any(file is other for *_, other in live):
                        assert await one.read(tenant, file.id) == content
                        continue
                    for asked in (one.files.get(tenant, file.id), one.files.part(tenant, file.content, 0, 1)):
                        with pytest.raises(NotFound):
                            await asked
                await one.objects.insert("other", "kind", str(step), b"", world.now_s() - 1)  # removes what has ended
                assert rows(world) - 1 == sum(2 + -(-len(content) // CHUNK) for _, content, _ in live)
                await one.objects.remove("other", "kind")

        try:
            world.run(run())
        finally:
            world.close()


@given(st.floats(0, 4e9), st.sampled_from(["file-", "batch_", "msgbatch_"]))
def test_an_id_tells_its_place(now_s: float, prefix: str) -> None:
    """Also one of a result's file; an id of an earlier release has the place of its object."""
    name = new_id(prefix, now_s)
    assert name.startswith(prefix) and place_in_name(name) == (int(now_s * 1000), name)
    old = File("file-" + "a" * 32, "", "", "", 0, EPOCH_S, 0.0)
    assert place_in_name(old.id) is None and place_of(old) == (int(EPOCH_S * 1000), old.id)
    output = f"file-output-{name.removeprefix(prefix)}"
    assert place_in_name(output) == (int(now_s * 1000), output)
