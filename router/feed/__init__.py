"""The feed from replicas to routers: a snapshot on joining, then numbered messages, over encrypted ZeroMQ.

Write path: cache events -> FeedSource (numbers, mirror) -> FeedPublisher (sockets). Read path: FeedSubscriber
(sockets) -> FeedReplay (order, gaps) -> ``RoutingCore.apply``. The two halves without sockets are the seam on which
lossy transports are tested.
"""

from router.feed.messages import FeedEndpoint
from router.feed.publisher import FeedPublisher, FeedPublisherThread
from router.feed.resequencer import FeedReplay, ReplaySettings
from router.feed.sequencer import BlockMirror, FeedSource
from router.feed.subscriber import FeedSubscriber

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
