"""The feed from replicas to routers over encrypted ZeroMQ: a snapshot on joining, then numbered messages.

Write path: cache events -> FeedSequencer (numbers, mirror) -> FeedPublisher (sockets). Read path: FeedSubscriber
(sockets) -> FeedResequencer (order, gaps) -> ``RoutingCore.apply``. The two halves without sockets allow tests with
lossy transports. The feed does not interpret events: it uses no directory, loads or policy.
"""

from router.feed.publisher import FeedPublisher
from router.feed.sequencing import FeedEndpoint
from router.feed.subscriber import FeedSubscriber

__all__ = ["FeedEndpoint", "FeedPublisher", "FeedSubscriber"]
