"""FeedPublisher and FeedSubscriber over real, encrypted sockets."""

import socket
from random import Random
from unittest.mock import patch

import pytest
import zmq

from router.feed import FeedEndpoint, FeedPublisher, FeedSubscriber
from router.feed.sequencing import FeedCounters
from router.protocol.events import BlocksRemoved, BlocksStored, Event
from tests.harness.eventually import let_others_run, until
from tests.router.feed.sockets import BEAT, CHAIN, blocks, following

pytestmark = pytest.mark.anyio


async def test_snapshot_then_deltas_then_a_new_feed() -> None:
    """A late router gets earlier blocks, then later ones; of a restarted replica it gets only the new life's blocks."""
    async with following("a") as (core, subscriber, feeds):
        feed = feeds["a"]
        feed.put([BlocksStored(CHAIN), BEAT])
        subscriber.connect("a", feed.endpoint)
        await until(lambda: blocks(core, "a") == 50)
        assert core.loads.queue_ahead("a") == 3
        feed.put([BlocksRemoved(CHAIN[16 * 20 :])])
        feed.put([BlocksStored(Random(1).randbytes(160))])
        await until(lambda: blocks(core, "a") == 30)
        assert core.directory.match(CHAIN) == {"a": 320}
        assert core.counters.feed.gaps == 0
        core.apply("a", [BlocksStored(Random(9).randbytes(160))])  # invented
        assert blocks(core, "a") == 40
        subscriber.resync("a")
        await until(lambda: blocks(core, "a") == 30 and subscriber.is_live("a"))
        feed.stop()
        second = feeds["a"] = FeedPublisher("a")
        second.start()
        second.put([BlocksStored(CHAIN[:160])])
        subscriber.connect("a", second.endpoint)
        subscriber.connect("a", second.endpoint)
        await until(lambda: blocks(core, "a") == 10 and subscriber.is_live("a"))


@patch("router.feed.sequencing.TIMEOUT_S", 3600.0)
async def test_joining_waits_for_no_timeout() -> None:
    """The first request finds no connection yet; the next one is sent after the backoff, not after the timeout."""
    async with following("a") as (core, subscriber, feeds):
        feeds["a"].put([BlocksStored(CHAIN), BEAT])
        subscriber.connect("a", feeds["a"].endpoint)
        assert not core.knows_every_cache
        feeds["a"].put([BEAT])
        await until(lambda: core.knows_every_cache)
        assert blocks(core, "a") == 50
        core.update_replicas(["a", "b"])
        assert not core.knows_every_cache


async def test_endpoints_that_do_not_answer_delay_nobody() -> None:
    """One refuses connections, one accepts them and stays silent: neither is live, and the other feed is."""
    silent = socket.create_server(("127.0.0.1", 0), backlog=64)
    key = zmq.curve_keypair()[0].decode()
    async with following("a", "dead", "silent") as (core, subscriber, feeds):
        for name, port in (("dead", 9), ("silent", silent.getsockname()[1])):
            address = f"tcp://127.0.0.1:{port}"
            subscriber.connect(name, FeedEndpoint(address, address, key))
        feeds["a"].put([BlocksStored(CHAIN)])
        subscriber.connect("a", feeds["a"].endpoint)
        await until(lambda: subscriber.is_live("a"))
        assert blocks(core, "a") == 50
        assert not subscriber.is_live("dead") and not subscriber.is_live("silent")
        assert not core.knows_every_cache
        subscriber.disconnect("dead")
        assert subscriber.replica_ids == {"a", "silent"}
    silent.close()


async def test_wrong_key_gets_nothing() -> None:
    """The feed is encrypted and authenticated by the publisher's own key. (docs: isolation)"""
    async with following("a") as (core, subscriber, feeds):
        endpoint, wrong = feeds["a"].endpoint, zmq.curve_keypair()[0].decode()
        subscriber.connect("a", FeedEndpoint(endpoint.pub_address, endpoint.snapshot_address, wrong))
        heard: list[Event] = []
        right = FeedSubscriber(lambda _, events: heard.extend(events), FeedCounters())
        right.connect("a", endpoint)
        await until(lambda: right.is_live("a"))
        feeds["a"].put([BlocksStored(CHAIN)])
        await until(lambda: BlocksStored(CHAIN) in heard)
        assert (blocks(core, "a"), subscriber.is_live("a")) == (0, False)
        await right.close()


async def test_an_unusable_endpoint_is_refused() -> None:
    async with following() as (_, subscriber, _):
        for addresses in (("nonsense", "tcp://127.0.0.1:9", "x" * 40), ("tcp://127.0.0.1:9", "", "short")):
            with pytest.raises((zmq.ZMQError, ValueError)):
                subscriber.connect("a", FeedEndpoint(*addresses))
        assert subscriber.replica_ids == frozenset()


async def test_large_snapshot_leaves_the_loop_its_turns() -> None:
    """While 200,000 blocks arrive, others in the router's loop get their turn after every few thousand."""
    arrived = since_turn = most = 0

    def deliver(name: str, events: tuple[Event, ...]) -> None:
        nonlocal arrived, since_turn
        stored = sum(len(event.hashes) // 16 for event in events if isinstance(event, BlocksStored))
        arrived, since_turn = arrived + stored, since_turn + stored

    async with following("a") as (_, _, feeds):
        feeds["a"].put([BlocksStored(Random(5).randbytes(16 * 200_000)), BEAT])
        subscriber = FeedSubscriber(deliver, FeedCounters())
        subscriber.connect("a", feeds["a"].endpoint)
        while arrived < 200_000:
            await let_others_run()
            most, since_turn = max(most, since_turn), 0
        assert 0 < most <= 3 * 2048
        await subscriber.close()


async def test_a_malformed_request_is_ignored() -> None:
    async with following("a") as (_, _, feeds):
        endpoint = feeds["a"].endpoint
        context = zmq.Context()
        asker = context.socket(zmq.DEALER)
        asker.curve_publickey, asker.curve_secretkey = zmq.curve_keypair()
        asker.curve_serverkey = endpoint.public_key.encode()
        asker.connect(endpoint.snapshot_address)
        for nonce in (b"12345678", b"87654321"):
            asker.send(b"junk")
            asker.send_multipart([b"a", b"b", b"c"])
            asker.send(nonce)
            assert nonce in asker.recv(), "the first answer is for this request"
        context.destroy(linger=0)
