"""Dynamo's RadixTree, the index of its KV router. Needs an environment of its own: `pip install ai-dynamo-runtime`.

Give that environment's Python to the benchmark: `python -m benchmarks routing --dynamo-python /path/to/env/bin/python`.
Measured is the match alone, without scores or reservations; blocks are named by 64 bits, as the tree takes them.
"""

from __future__ import annotations

import json
import time
from array import array

from benchmarks.routing.workload import RoutingWorkload, figures, messages_of, resident_bytes, serve


def measure(workload: RoutingWorkload) -> dict[str, float]:
    """Apply every prompt's stored events for its holders, then find the matches of every query."""
    from dynamo._core import RadixTree

    before = resident_bytes()
    tree = RadixTree()
    number = {name: index for index, name in enumerate(workload.names())}
    spent_s, events = 0.0, 0
    for chain, holders in workload.prompts():
        messages = stored(chain, events)
        events += len(messages)
        started = time.perf_counter()
        for name in holders:
            for message in messages:
                tree.apply_event(number[name], message)
        spent_s += time.perf_counter() - started
    started = time.perf_counter()
    tree.find_matches([0])  # events are applied by a thread of the tree's own: this waits for them
    spent_s += time.perf_counter() - started
    grown = resident_bytes() - before
    taken_s, found = [], 0
    for chain, _ in workload.queries():
        words = names_of(chain)
        started = time.perf_counter()
        scores = tree.find_matches(words).scores
        taken_s.append(time.perf_counter() - started)
        found += bool(scores)
    return {**figures(workload, taken_s, spent_s, grown), "found_share": found / len(taken_s)}


def names_of(chain: bytes) -> list[int]:
    """Return the first 8 bytes of each hash as an integer."""
    return array("Q", chain).tolist()[::2]


def stored(chain: bytes, event_id: int) -> list[bytes]:
    """Return the chain's stored events in Dynamo's JSON."""
    messages, parent = [], None
    for number, piece in enumerate(messages_of(chain)):
        words = names_of(piece)
        blocks = [{"block_hash": word, "tokens_hash": word} for word in words]
        data = {"stored": {"parent_hash": parent, "blocks": blocks}}
        messages.append(json.dumps({"event_id": event_id + number, "data": data, "dp_rank": 0}).encode())
        parent = words[-1]
    return messages


if __name__ == "__main__":
    serve(measure)
