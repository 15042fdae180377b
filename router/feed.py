"""The feed from replicas to routers: a snapshot on joining, then numbered messages, over encrypted ZeroMQ.

Write path: cache events -> FeedSource (numbers, mirror) -> FeedPublisher (sockets). Read path: FeedSubscriber
(sockets) -> FeedReplay (order, gaps) -> ``RoutingCore.apply``. The two halves without sockets are the seam on which
lossy transports are tested.
"""

from router.feed_publisher import FeedPublisher, FeedPublisherThread
from router.feed_replay import FeedReplay, ReplaySettings
from router.feed_source import BlockMirror, FeedSource
from router.feed_subscriber import FeedSubscriber
from router.feed_wire import FeedEndpoint

__all__ = [
    "BlockMirror",
    "FeedEndpoint",
    "FeedPublisher",
    "FeedPublisherThread",
    "FeedReplay",
    "FeedSource",
    "FeedSubscriber",
    "ReplaySettings",
]
