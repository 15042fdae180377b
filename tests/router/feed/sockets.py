"""Feeds over real, encrypted sockets, and a router that may follow them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from router.core import RoutingCore
from router.feed import FeedPublisher, FeedSubscriber
from router.protocol.events import LoadReport
from router.settings import RouterSettings

BEAT = LoadReport(3, 1, 1, 8, 64, 1000.0)
CHAIN = Random(0).randbytes(16 * 50)


def blocks(core: RoutingCore, name: str) -> int:
    return sum(core.directory.blocks_held(name).values())


@asynccontextmanager
async def following(*names: str) -> AsyncIterator[tuple[RoutingCore, FeedSubscriber, dict[str, FeedPublisher]]]:
    """Yield a core that knows the replicas, its subscriber, which is not connected yet, and the feeds."""
    core = RoutingCore("me", RouterSettings(block_size=16))
    core.update_replicas(names)
    subscriber = FeedSubscriber(core.apply, core.counters.feed)
    core.follow(subscriber.is_live, resync=subscriber.resync)
    feeds = {name: FeedPublisher(name) for name in names}
    for feed in feeds.values():
        feed.start()
    try:
        yield core, subscriber, feeds
    finally:
        for feed in feeds.values():
            feed.stop()
        await subscriber.close()
