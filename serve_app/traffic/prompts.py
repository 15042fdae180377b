"""The prompts of a workload with an id for each block, one by one: for what takes traces of ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from serve_app.checkpoints.reuse import TraceRequest
from serve_app.traffic.workload import Workload


def traced_prompts(workload: Workload) -> Iterator[TraceRequest]:
    """Yield all requests in order of arrival. A last partial block has an id that no other prompt has."""
    sizes = workload.sizes.astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    fresh = int(sizes.sum())
    for number in range(len(workload)):
        path = workload.paths[workload.path_start[number] : workload.path_start[number + 1]]
        ids = [each for head, size in zip(starts[path], sizes[path], strict=True) for each in range(head, head + size)]
        tokens = int(workload.prompt_tokens[number])
        lacking = -(-tokens // workload.block_tokens) - len(ids)  # all, where the file does not tell
        ids.extend(range(fresh, fresh + lacking))
        fresh += lacking
        yield TraceRequest(
            float(workload.arrival_s[number]),
            tokens,
            int(workload.output_tokens[number]),
            tuple(map(int, ids)),
            workload.tenants[workload.tenant[number]],
        )
