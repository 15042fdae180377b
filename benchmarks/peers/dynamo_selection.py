"""Dynamo's SelectionService: whole decisions, from a prompt's block hashes to a worker with the load booked there.

Needs an environment of its own: `pip install ai-dynamo-runtime pyzmq`, given as `--dynamo-python`. It takes KV events
only from live endpoints of its workers, so this process plays the workers: a ZeroMQ publisher each, vLLM's messages.
Events a second and memory therefore count their encoding here and the sockets too. It hashes tokens: a block's are made
of its name. `cached_share` counts decisions for a worker that holds something.
"""

from __future__ import annotations

import asyncio
import os
import resource
import struct
import tempfile
import time
from array import array
from typing import Any

from benchmarks.routing.workload import (
    BLOCK_SIZE,
    PROMPT_BLOCKS,
    PROMPT_TOKENS,
    RoutingWorkload,
    figures,
    messages_of,
    resident_bytes,
    serve,
)

OPEN_RESERVATIONS = 32
TOKENS = bytes(number & 0x7F for number in range(256))
"""Token ids below 128 are one byte each in MessagePack."""


def measure(workload: RoutingWorkload) -> dict[str, float]:
    """Publish every prompt's stored events for its holders, then select and reserve for every query."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ.setdefault("DYN_LOG", "error")
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(workload, folder))


async def _measure(workload: RoutingWorkload, folder: str) -> dict[str, float]:
    import zmq
    from dynamo._core import SelectionService, compute_block_hash_for_seq

    before = resident_bytes()
    service = SelectionService(indexer_threads=1)
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * workload.replicas + 64)
    number = {name: index for index, name in enumerate(workload.names())}
    sockets, sent = [], [0] * workload.replicas
    for worker in number.values():
        socket = context.socket(zmq.PUB)
        socket.set_hwm(0)
        socket.bind(f"ipc://{folder}/{worker}")
        sockets.append(socket)
        await service.upsert_worker(
            {
                "worker_id": worker,
                "endpoint": f"http://127.0.0.1:{1024 + worker}",
                "kv_events_endpoint": f"ipc://{folder}/{worker}",
                "block_size": BLOCK_SIZE,
                "max_num_batched_tokens": 8192,
                "total_kv_blocks": workload.blocks,
            }
        )
    await asyncio.sleep(2.0)  # a publisher drops what is sent before the subscriber has joined
    last: dict[int, bytes] = {}
    started = time.perf_counter()
    for chain, holders in workload.prompts():
        messages = stored(chain)
        for name in holders:
            worker = number[name]
            last[worker] = chain
            for message in messages:
                sockets[worker].send_multipart([b"", struct.pack(">Q", sent[worker]), message])
                sent[worker] += 1
    for worker, chain in last.items():
        while not await _holds(service, worker, chain):  # noqa: ASYNC110 (nothing tells when)
            await asyncio.sleep(0.01)
    spent_s = time.perf_counter() - started
    grown = resident_bytes() - before
    # Both hashes of a block are known when the clock starts, as ours are; only the service says what the second one is.
    known = []
    for chain, _ in workload.queries():
        token_ids = list(chain.translate(TOKENS))
        asked = await service.select_and_reserve({"token_ids": token_ids, "selection_id": "asked"})
        await service.free_reservation("asked")
        blocks = array("Q", compute_block_hash_for_seq(token_ids, BLOCK_SIZE)).tobytes()
        known.append((blocks, array("q", asked["sequence_hashes"]).tobytes()))
    taken_s, open_ones, found = [], list[str](), 0
    for count, (blocks, sequences) in enumerate(known):
        request = {
            "block_hashes": array("q", blocks).tolist(),
            "sequence_hashes": array("q", sequences).tolist(),
            "isl_tokens": PROMPT_TOKENS,
            "selection_id": str(count),
        }
        began = time.perf_counter()
        selected = await service.select_and_reserve(request)
        taken_s.append(time.perf_counter() - began)
        found += selected["overlap"]["longest_matched"] > 0
        open_ones.append(str(count))
        if len(open_ones) > OPEN_RESERVATIONS:
            await service.free_reservation(open_ones.pop(0))
    service.shutdown()
    context.destroy(linger=0)
    return {**figures(workload, taken_s, spent_s, grown), "cached_share": found / len(taken_s)}


async def _holds(service: Any, worker: int, chain: bytes) -> bool:
    scores = await service.overlap_scores({"token_ids": list(chain.translate(TOKENS))})
    return any(row["worker_id"] == worker and row["device_blocks"] >= PROMPT_BLOCKS for row in scores["workers"])


def stored(chain: bytes) -> list[bytes]:
    """Return the chain's stored events as vLLM publishes them: MessagePack of (time, events, rank)."""
    messages, parent = [], b"\xc0"
    for piece in messages_of(chain):
        words = array("Q", piece)[::2]
        words.byteswap()
        names = words.tobytes()
        hashes = b"".join(b"\xcf" + names[at : at + 8] for at in range(0, len(names), 8))
        head = b"\x93\xcb" + struct.pack(">d", 0.0) + b"\x91\x96\xabBlockStored\xdc" + struct.pack(">H", len(words))
        tokens = b"\xdc" + struct.pack(">H", len(piece)) + piece.translate(TOKENS)
        messages.append(head + hashes + parent + tokens + bytes([BLOCK_SIZE]) + b"\xc0" + b"\x00")
        parent = b"\xcf" + names[-8:]
    return messages


if __name__ == "__main__":
    serve(measure)
