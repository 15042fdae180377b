"""The feed from replicas to routers: a snapshot on joining, then numbered messages, over encrypted ZeroMQ.

Write path: cache events -> FeedSequencer (numbers, mirror) -> FeedPublisher (sockets). Read path: FeedSubscriber
(sockets) -> FeedResequencer (order, gaps) -> ``RoutingCore.apply``. The two halves without sockets are the seam on
which lossy transports are tested. Knows nothing of what events mean: no directory, no loads, no policy.
"""

from router.feed.messages import FeedEndpoint
from router.feed.publisher import FeedPublisher
from router.feed.subscriber import FeedSubscriber

__all__ = ["FeedEndpoint", "FeedPublisher", "FeedSubscriber"]
