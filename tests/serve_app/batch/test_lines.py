"""The lines of a file: the same in any chunks, and no number of them holds the event loop up."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.batch.batches import BATCH, StoredBatch, new_id
from serve_app.batch.files import FILE, File
from serve_app.batch.lines import MAX_LINE_BYTES, PART_LINES, RawLine, checked, lines_of, request_of
from serve_app.batch.wire import PageQuery, openai_batch, page
from serve_app.errors import RequestTooLarge
from tests.harness.virtual_time import passes
from tests.serve_app.batch.world import URL, World, content_of

MOST_CALLS = 5000
"""Of functions, in one round of the loop: some milliseconds."""
PIECES = st.sampled_from(
    [b"\n", b"\n\n\n", b"\r\n", b" ", b"\t", b"{}", b"x", b'{"a": "b c"}', b"\xef\xbb\xbf", b"\x0b"]
)


async def chunked(text: bytes, cuts: Sequence[int]) -> AsyncIterator[bytes]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for begin, end in pairwise(bounds):
        yield text[begin:end]


def found_in(text: bytes, cuts: Sequence[int]) -> list[RawLine]:
    async def found() -> list[RawLine]:
        return [line async for part in lines_of(chunked(text, cuts)) for line in part]

    return asyncio.run(found())


@given(st.lists(PIECES, max_size=40).map(b"".join), st.lists(st.integers(0, 1 << 16), max_size=12))
def test_lines_are_those_of_the_whole_text_in_any_chunks(text: bytes, cuts: list[int]) -> None:
    """With their numbers, and their places; blank ones are counted and left out."""
    wanted = [(number, one.strip()) for number, one in enumerate(text.split(b"\n"), 1) if one.strip()]
    found = found_in(text, cuts)
    assert [(line.number, line.raw.strip()) for line in found] == wanted
    assert all(text[line.start :].startswith(line.raw) and not line.raw[:1].isspace() for line in found)


def test_a_line_has_a_bound() -> None:
    most = MAX_LINE_BYTES
    assert len(found_in(b"x" * most + b"\n" + b"y" * most, [most - 100, most + most // 2])) == 2
    with pytest.raises(RequestTooLarge):
        found_in(b"x" * (most + 1), [most - 100])


def test_a_line_is_asked_for_as_it_is_written_but_for_its_stream() -> None:
    raw = json.dumps({"custom_id": "a", "url": URL, "body": {"prompt": "p", "stream": True, "seed": 3}}).encode()
    request, body = request_of(raw)
    assert (request.custom_id, json.loads(body)) == ("a", {"prompt": "p", "seed": 3})
    ((number, custom_id, line),) = checked([RawLine(7, 40, raw)], URL)
    assert (number, custom_id) == (7, "a") and (getattr(line, "start", None), getattr(line, "length", 0)) == (
        40,
        len(raw),
    )
    ((_, custom_id, wrong),) = checked([RawLine(7, 40, raw)], "/v1/chat/completions")
    assert custom_id == "" and getattr(wrong, "code", "") == "mismatched_url"


@pytest.mark.parametrize(
    "content",
    [b"\n" * (4 << 20), b" \r\n" * (1 << 20), b"\t" * (4 << 20), b"\n" * (1 << 20) + b"x" + b"\n" * (1 << 20)],
    ids=["ends", "spaces", "one blank line", "a word between"],
)  # fmt: skip
def test_a_file_of_blank_lines_costs_the_loop_nothing(content: bytes, world: World) -> None:
    """What the loop does for a file grows with its chunks, and not with its lines."""

    async def run() -> None:
        world.max_bytes = 1 << 30
        one = world.ingress()
        batch = await one.batch("acme", await one.upload("acme", content, part=1 << 20))
        with world.meter.counting() as meter:
            one.start()
            await world.until_ended(one, ("acme", batch))
        assert meter.most < MOST_CALLS and meter.all < 60_000, (meter.most, meter.all)
        batch = await one.batches.get("acme", batch.id)
        code = "invalid_json_line" if b"x" in content else "empty_file"
        assert (batch.status, [error.code for error in batch.errors]) == ("failed", [code])
        assert batch.errors[0].line in (None, (1 << 20) + 1)
        await one.worker.stop()

    world.run(run())


def test_a_batch_of_many_lines_begins_without_holding_the_loop_up(world: World) -> None:
    """It is read and ordered in parts, and continued so."""

    async def run() -> None:
        world.max_bytes = 1 << 30
        one, two = world.ingress("one"), world.ingress("two")
        ordered = {one: asyncio.Event(), two: asyncio.Event()}
        for each, event in ordered.items():
            each.worker.quiet = lambda *_, event=event: event.set()  # and it never is
        batch = await one.submit("acme", 6 * PART_LINES)
        with world.meter.counting() as meter:
            one.start()
            await ordered[one].wait()
            await passes(1)
            await one.worker.stop()
            two.start()
            await ordered[two].wait()
            await passes(1)
        assert meter.most < 20 * PART_LINES, meter.most
        await two.batches.cancel("acme", batch.id)
        await world.until_ended(two, ("acme", batch))
        assert (await one.batches.get("acme", batch.id)).total == 6 * PART_LINES
        await two.worker.stop()

    world.run(run())


def test_a_list_of_many_is_read_beside_the_loop(world: World) -> None:
    async def run() -> None:
        one = world.ingress()
        now_s = one.objects.now_s()
        batches = [
            StoredBatch(
                id=new_id("batch_", now_s), endpoint=URL, content="", size=1, created_at=now_s, expires_at=now_s
            )
            for _ in range(1000)
        ]
        for batch in batches:
            batch.become("completed", now_s)
            await one.objects.insert("acme", BATCH, batch.id, msgspec.json.encode(batch), now_s + 1e6)
        with world.meter.counting() as meter:
            shown = await one.batches.listed("acme", lambda found: page(found, PageQuery(), "batch_", openai_batch))
            await one.batches.create("acme", batches[0])
            await one.upload("acme", content_of(["a"]))
        assert meter.all < MOST_CALLS, meter.all
        assert len(shown["data"]) == 20 and shown["has_more"]
        await one.objects.insert(
            "acme", FILE, "file-x", msgspec.json.encode(File("file-x", "", "", "", 1, 0.0, 0.0)), now_s + 1
        )
        assert len(await one.files.listed("acme", list)) == 2

    world.run(run())
