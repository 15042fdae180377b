"""A replica's place in its group of data-parallel ranks, which Serve starts and ends together as a gang.

Ranks of a model with experts compute each layer's experts together, by vLLM's own connections, on one machine.
"""

import socket
import time

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from serve_app import notices
from serve_app.engine.vllm.settings import DataParallel

_KIND = "data_parallel"
_MEET_S = 120.0
"""How long to wait for the first rank: Serve starts all of a gang at once."""
_POLL_S = 0.2


def gang_rank() -> int | None:
    """Return this replica's rank, or None without a group or outside Serve."""
    try:
        gang = serve.get_replica_context().gang_context
    except RayServeException:
        return None
    return None if gang is None else int(gang.rank)


def join_group() -> DataParallel | None:
    """Return this replica's rank and where its group meets; None as in ``gang_rank``. Waits for the first rank.

    Raises ValueError if they are on different nodes, and TimeoutError.
    """
    if (rank := gang_rank()) is None:
        return None
    context = serve.get_replica_context()
    app, gang, node = context.app_name, context.gang_context, ray.get_runtime_context().get_node_id()
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        notices.post(app, _KIND, gang.gang_id, {"gang": gang.gang_id, "port": port, "node": node})
        return DataParallel(rank, gang.world_size, port)
    end_s = time.monotonic() + _MEET_S
    while time.monotonic() < end_s:
        for first in notices.read(app, _KIND):
            if first["gang"] == gang.gang_id:
                if first["node"] != node:
                    raise ValueError(
                        "data_parallel_size: a group's ranks are on different nodes; lower it to what one node holds"
                    )
                return DataParallel(rank, gang.world_size, int(first["port"]))
        time.sleep(_POLL_S)
    raise TimeoutError("data_parallel_size: the first rank of this replica's group did not start")
