"""FeedPublisher and FeedSubscriber over real, encrypted sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest
import zmq

from router.core import RoutingCore
from router.feed import FeedEndpoint, FeedPublisher, FeedSubscriber
from router.feed.resequencer import ResequencerSettings
from router.protocol.events import BlocksRemoved, BlocksStored, Event, LoadReport

BEAT = LoadReport(3, 1, 1, 8, 64, 1000.0, 0.01)
CHAIN = Random(0).randbytes(16 * 50)
FAST = ResequencerSettings(timeout_s=0.3, first_backoff_s=0.02, last_backoff_s=0.2, silence_s=0.5)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


async def until(true: Callable[[], bool], timeout_s: float = 8.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        await asyncio.sleep(0.01)


def blocks(core: RoutingCore, name: str) -> int:
    return sum(core.directory.blocks_held(name).values())


def started(name: str, **settings: Any) -> FeedPublisher:
    publisher = FeedPublisher(name, **settings)
    publisher.start()
    return publisher


def test_snapshot_then_deltas() -> None:
    """A router that joins late gets what was stored before, then follows; load arrives with it."""

    async def main() -> None:
        feed = started("a", max_blocks_per_message=8)
        feed.put([BlocksStored(CHAIN), BEAT])
        core = RoutingCore("me")
        core.update_replicas(["a"])
        subscriber = FeedSubscriber(core.apply, core.counters.feed, settings=FAST)
        subscriber.connect("a", FeedEndpoint.from_dict(feed.endpoint.to_dict()))
        await until(lambda: blocks(core, "a") == 50)
        assert core.loads.queue_ahead("a") == 3
        feed.put([BlocksRemoved(CHAIN[16 * 20 :])])
        feed.put([BlocksStored(Random(1).randbytes(160))])
        await until(lambda: blocks(core, "a") == 30)
        assert core.directory.match(CHAIN) == {"a": 320}
        assert core.counters.feed.gaps == 0
        feed.stop()
        feed.stop()
        await subscriber.close()

    run(main())


def test_restart_of_a_publisher_is_a_new_epoch() -> None:
    """After a restart under the same id only what the new life stored is known."""

    async def main() -> None:
        core = RoutingCore("me")
        core.update_replicas(["a"])
        subscriber = FeedSubscriber(core.apply, core.counters.feed, settings=FAST)
        first = started("a")
        first.put([BlocksStored(CHAIN)])
        subscriber.connect("a", first.endpoint)
        await until(lambda: blocks(core, "a") == 50)
        first.stop()
        second = started("a")
        assert second.endpoint.epoch != first.endpoint.epoch
        second.put([BlocksStored(CHAIN[:160])])
        subscriber.connect("a", second.endpoint)
        subscriber.connect("a", second.endpoint)
        await until(lambda: blocks(core, "a") == 10 and subscriber.is_live("a"))
        second.stop()
        await subscriber.close()

    run(main())


def test_joining_waits_for_no_timeout() -> None:
    """The first request finds no connection yet; the next one goes out after the backoff, not after the timeout."""

    async def main() -> None:
        feed = started("a")
        feed.put([BlocksStored(CHAIN), BEAT])
        core = RoutingCore("me")
        core.update_replicas(["a"])
        subscriber = FeedSubscriber(core.apply, core.counters.feed, settings=ResequencerSettings(timeout_s=3600.0))
        core.follow(subscriber.is_live)
        subscriber.connect("a", feed.endpoint)
        assert not core.knows_every_cache
        feed.put([BEAT])
        await until(lambda: core.knows_every_cache)
        assert blocks(core, "a") == 50
        core.update_replicas(["a", "b"])
        assert not core.knows_every_cache
        feed.stop()
        await subscriber.close()

    run(main())


def test_dead_endpoint_delays_no_other_and_recovers_by_itself() -> None:
    """One replica nobody answers for leaves the loop and the other feeds alone."""

    async def main() -> None:
        core = RoutingCore("me")
        core.update_replicas(["a", "dead"])
        subscriber = FeedSubscriber(core.apply, core.counters.feed, settings=FAST)
        key = zmq.curve_keypair()[0].decode()
        subscriber.connect("dead", FeedEndpoint("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", key, "e"))
        feed = started("a")
        feed.put([BlocksStored(CHAIN)])
        subscriber.connect("a", feed.endpoint)
        await until(lambda: blocks(core, "a") == 50)
        for _ in range(50):  # a loop that waits for the dead one never gets through these
            await asyncio.sleep(0.005)
        assert not subscriber.is_live("dead")
        subscriber.disconnect("dead")
        assert subscriber.replica_ids == {"a"}
        feed.stop()
        await subscriber.close()

    run(main())


def test_wrong_key_gets_nothing() -> None:
    """Without the publisher's own key a listener hears nothing: the feed is encrypted and authenticated.

    docs/security.md
    """

    async def main() -> None:
        core = RoutingCore("me")
        core.update_replicas(["a"])
        subscriber = FeedSubscriber(core.apply, core.counters.feed, settings=FAST)
        feed = started("a")
        endpoint = feed.endpoint
        wrong = zmq.curve_keypair()[0].decode()
        subscriber.connect("a", FeedEndpoint(endpoint.pub_address, endpoint.snapshot_address, wrong, endpoint.epoch))
        for _ in range(20):
            feed.put([BlocksStored(CHAIN)])
            await asyncio.sleep(0.02)
        assert blocks(core, "a") == 0
        feed.stop()
        await subscriber.close()

    run(main())


@pytest.mark.parametrize(
    "endpoint",
    [FeedEndpoint("nonsense", "tcp://127.0.0.1:9", "x" * 40, "e"), FeedEndpoint("tcp://127.0.0.1:9", "", "short", "e")],
)
def test_unusable_endpoint_is_refused(endpoint: FeedEndpoint) -> None:
    """An endpoint that cannot be dialled raises at once and leaves nothing behind."""

    async def main() -> None:
        core = RoutingCore("me")
        subscriber = FeedSubscriber(core.apply, core.counters.feed)
        with pytest.raises((zmq.ZMQError, ValueError)):
            subscriber.connect("a", endpoint)
        assert subscriber.replica_ids == frozenset()
        await subscriber.close()

    run(main())


def test_large_snapshot_leaves_the_loop_its_turns() -> None:
    """While 200,000 blocks arrive, others in the router's loop get their turn after every few thousand."""

    async def main() -> None:
        core = RoutingCore("me")
        core.update_replicas(["a"])
        since_turn = 0

        def deliver(name: str, epoch: str, events: tuple[Event, ...]) -> None:
            nonlocal since_turn
            since_turn += sum(len(event.hashes) // 16 for event in events if isinstance(event, BlocksStored))
            core.apply(name, epoch, events)

        feed = started("a")
        feed.put([BlocksStored(Random(5).randbytes(16 * 200_000)), BEAT])
        subscriber = FeedSubscriber(deliver, core.counters.feed)
        subscriber.connect("a", feed.endpoint)
        most = 0
        while blocks(core, "a") < 200_000:
            await asyncio.sleep(0)
            most, since_turn = max(most, since_turn), 0
        assert 0 < most <= 3 * 2048
        feed.stop()
        await subscriber.close()

    run(main())


def test_malformed_request_is_ignored() -> None:
    """The publisher answers well-formed requests only and survives the others."""
    publisher = started("a")
    context = zmq.Context()
    asker = context.socket(zmq.DEALER)
    public, secret = zmq.curve_keypair()
    asker.setsockopt(zmq.CURVE_PUBLICKEY, public)
    asker.setsockopt(zmq.CURVE_SECRETKEY, secret)
    asker.setsockopt(zmq.CURVE_SERVERKEY, publisher.endpoint.public_key.encode())
    asker.connect(publisher.endpoint.snapshot_address)
    asker.send(b"what?")
    asker.send_multipart([b"a", b"b", b"c"])
    asker.send(b"12345678")
    assert asker.poll(5000)
    assert b"12345678" in asker.recv(zmq.NOBLOCK)
    assert not asker.poll(50)
    context.destroy(linger=0)
    publisher.stop()
