"""A feed that is cut off while its replica goes on: real sockets through a relay that stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import pytest

from router.core import RoutingCore
from router.feed import FeedEndpoint, FeedPublisher, FeedSubscriber
from router.feed.resequencer import ResequencerSettings
from router.load import silent_feeds
from router.protocol.events import BlocksRemoved, BlocksStored, LoadReport
from router.protocol.request import Decision, RoutedRequest
from tests.router.feed.test_feed_sockets import until

FAST = ResequencerSettings(timeout_s=0.2, first_backoff_s=0.02, last_backoff_s=0.1, silence_s=0.3)
CHAIN, OTHER, THIRD = (Random(seed).randbytes(16 * 40) for seed in range(3))
IDLE = LoadReport(0, 0, 0, 8, 8, 10_000.0, 0.01)
SWAMPED = LoadReport(500_000, 8, 8, 8, 8, 10_000.0, 0.01)


class Relay:
    """Carries bytes between a subscriber and a feed, and keeps them back while it is cut."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()

    @asynccontextmanager
    async def to(self, address: str) -> AsyncIterator[str]:
        """Listen for one address; yields the address to use in its place."""
        host, port = address.removeprefix("tcp://").split(":")
        tasks: set[asyncio.Task[None]] = set()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                await self.open.wait()
                writer.write(data)
                await writer.drain()
            writer.close()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            tasks.update(
                (
                    asyncio.create_task(carry(reader, far_writer)),
                    asyncio.create_task(carry(far_reader, writer)),
                )
            )

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        try:
            yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def request_of(chain: bytes) -> RoutedRequest:
    return RoutedRequest("r", chain, len(chain) + 1, chain[:16])


def test_a_feed_that_is_cut_off_is_noticed_its_rows_are_not_believed_and_a_snapshot_heals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meanwhile the replica gets its share by load, and what it answers is believed. (docs/failures.md)"""
    monkeypatch.setattr(silent_feeds, "SILENT_S", 1.0)

    async def main() -> None:
        async with AsyncExitStack() as ending:
            relay = Relay()
            core = RoutingCore("me")
            subscriber = FeedSubscriber(core.apply, core.counters.feed, settings=FAST)
            ending.push_async_callback(subscriber.close)
            core.follow(subscriber.is_live)
            core.update_replicas(["a", "b"])
            feeds = {}
            for name in "ab":
                feeds[name] = FeedPublisher(name)
                feeds[name].start()
                ending.callback(feeds[name].stop)
                endpoint = feeds[name].endpoint
                if name == "a":
                    endpoint = FeedEndpoint(
                        await ending.enter_async_context(relay.to(endpoint.pub_address)),
                        await ending.enter_async_context(relay.to(endpoint.snapshot_address)),
                        endpoint.public_key,
                        endpoint.epoch,
                    )
                subscriber.connect(name, endpoint)

            async def beat() -> None:
                while True:
                    feeds["b"].put([IDLE])
                    await asyncio.sleep(0.05)

            def decide(chain: bytes, blocked: tuple[str, ...] = ()) -> Decision:
                decision = core.decide(request_of(chain), blocked)
                assert decision is not None
                core.release(decision)
                return decision

            beating = asyncio.create_task(beat())
            ending.callback(beating.cancel)
            feeds["a"].put([BlocksStored(CHAIN), BlocksStored(OTHER), SWAMPED])
            await until(lambda: core.directory.match(CHAIN) == {"a": 640} and core.loads.is_full("a"))

            relay.open.clear()
            feeds["a"].put([BlocksRemoved(CHAIN[16 * 10 :]), BlocksStored(THIRD), IDLE])
            # Only decisions make a router look at the time.
            await until(lambda: decide(OTHER).selected_cached_tokens == 0 and not core.directory.match(OTHER))
            assert not core.loads.is_full("a")
            assert {decide(Random(seed).randbytes(640)).replica_id for seed in range(40)} == {"a", "b"}

            core.record_delivered(decide(OTHER, blocked=("b",)), 640, 0.1, OTHER)
            assert decide(OTHER).replica_id == "a"
            assert (core.directory.match(OTHER), core.directory.match(CHAIN)) == ({"a": 640}, {})

            relay.open.set()
            await until(lambda: core.directory.match(CHAIN) == {"a": 160})
            assert core.directory.match(THIRD) == core.directory.match(OTHER) == {"a": 640}
            feeds["a"].put([SWAMPED])
            await until(lambda: core.loads.is_full("a"))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_replica_that_reports_and_one_that_never_had_a_feed_are_not_silent() -> None:
    """What is told without a feed (in simulations) is believed as long as nothing else is told."""
    now_s = 0.0
    core = RoutingCore("me", clock=lambda: now_s)
    core.update_replicas(["a"])
    core.apply("a", "1", [BlocksStored(CHAIN), IDLE])
    now_s = 1000.0
    assert core.decide(request_of(CHAIN)) is not None
    assert core.directory.match(CHAIN) == {"a": 640}
    core.follow(lambda replica_id: True)
    now_s = 2000.0
    assert core.decide(request_of(CHAIN)) is not None
    assert core.directory.match(CHAIN) == {"a": 640}
