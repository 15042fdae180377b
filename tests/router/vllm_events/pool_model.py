"""A model of vLLM's block pool and of its published events, after ``block_pool.py`` and ``kv_events.py``.

Free blocks are taken from the head of a queue and returned at its tail, a request's last block first; a block keeps
its content until it is taken. Equal blocks are not merged. The last block of a prompt is never a hit. No vllm needed.
"""

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile
from typing import Any

import msgspec
import numpy as np
import zmq

from router.feed.sequencing import BlockMirror
from router.protocol.block_hash import HASH_BYTES, TokenArray, extend_chain, hash_blocks, split_chain
from router.protocol.events import Event
from router.vllm_events.batches import (
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
)
from router.vllm_events.pool import FollowedPool


def encode(events: Sequence[KvEvent], *, rank: int = 0) -> bytes:
    """Return the payload of a batch."""
    return msgspec.msgpack.encode([1.0, events, rank])


def hold(pool: FollowedPool, root: bytes, ids: TokenArray, size: int, blocks: int | None = None) -> bytes:
    """Report to a pool that a prompt's first blocks are stored, by default all; return the chain of all."""
    chain = hash_blocks(root, ids, size)
    hashes: list[bytes | int] = list(split_chain(chain))[:blocks]
    keys: list[tuple[str] | None] = [(root.hex(),), *[None] * len(hashes)][: len(hashes)]
    event = BlockStored(hashes, None, ids[: len(hashes) * size].tolist(), size, extra_keys=keys)  # type: ignore[arg-type]
    pool.translate(KvEventBatch(1.0, [event] if hashes else []))
    return chain


@dataclass
class Request:
    """A running request: its tokens so far, and its blocks in the pool. The first ``hashed`` are announced.

    The first ``public`` are all tenants', under the first of two roots; the first ``hits`` were held before.
    """

    root: bytes
    lora: str | None
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    hashed: int = 0
    public: int = 0
    hits: int = 0


class PoolModel:
    """``num_blocks`` blocks of ``size`` tokens. ``events``: those since the last ``take_events``.

    ``lookahead``: how many tokens after a block its name covers, which it has only once they exist.
    """

    def __init__(self, num_blocks: int, size: int, lookahead: int = 0) -> None:
        self.size = size
        self.lookahead = lookahead
        self.users = [0] * num_blocks
        self.free = list(range(num_blocks))
        self.content: dict[int, bytes] = {}
        self.ours: dict[bytes, bytes] = {}
        self.roots: dict[bytes, bytes] = {}
        self.events: list[KvEvent] = []

    def held(self) -> set[bytes]:
        """Our hashes of all blocks in the pool, each computed from a whole prompt."""
        return {self.ours[theirs] for theirs in self.content.values()}

    def take_events(self) -> list[KvEvent]:
        events, self.events = self.events, []
        return events

    def begin(self, root: bytes, lora: str | None, tokens: list[int], chunk: int, public: int = 0) -> Request | None:
        """Hit existing blocks, then compute up to ``chunk`` tokens. None: no space."""
        request = Request(root, lora, tokens, public=public)
        hits = self.match(request, (len(tokens) - 1) // self.size)
        self.touch(hits)
        request.blocks, request.hashed, request.hits = list(hits), len(hits), len(hits)
        if not self.proceed(request, len(hits) * self.size + chunk):
            self.end(request)
            return None
        return request

    def match(self, request: Request, most: int) -> list[int]:
        """Return the blocks of the longest held prefix."""
        block_of = {theirs: block for block, theirs in self.content.items()}
        return [block_of[theirs] for theirs in takewhile(block_of.__contains__, self._their_hashes(request)[:most])]

    def proceed(self, request: Request, tokens: int) -> bool:
        """Compute the first ``tokens`` of a request; blocks are announced on allocation. False: no space."""
        tokens = min(tokens, len(request.tokens))
        wanted = -(-tokens // self.size) - len(request.blocks)
        if wanted > len(self.free):
            return False
        request.blocks += [self._take() for _ in range(wanted)]
        full = min(tokens, len(request.tokens) - self.lookahead) // self.size
        if full > request.hashed:
            self._store(request, full)
        return True

    def end(self, request: Request) -> None:
        """Return its blocks, as when it finishes, is aborted or preempted."""
        self.release(list(reversed(request.blocks)))
        request.blocks, request.hashed = [], 0

    def touch(self, blocks: Sequence[int]) -> None:
        """Use blocks, as a hit or a pin does."""
        for block in blocks:
            if not self.users[block]:
                self.free.remove(block)
            self.users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """End a use of blocks, in this order."""
        for block in blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    def report(self, request: Request) -> None:
        """Tell again of the blocks that a request hits, as newer versions do if it asks for a full report."""
        hits = self.match(request, (len(request.tokens) - 1) // self.size)
        if hits:
            self.events.append(self._event(request, self._their_hashes(request), 0, len(hits)))

    def reset(self) -> bool:
        """Forget everything; return False and forget nothing while any block is in use."""
        if any(self.users):
            return False
        self.content.clear()
        self.events.append(AllBlocksCleared())
        return True

    def _take(self) -> int:
        block = self.free.pop(0)
        if block in self.content:
            self.events.append(BlockRemoved([self.content.pop(block)], "GPU", 0))
        self.users[block] = 1
        return block

    def _store(self, request: Request, full: int) -> None:
        first, size = request.hashed, self.size
        hashes = self._their_hashes(request)
        for index in range(first, full):
            self.content[request.blocks[index]] = hashes[index]
            tokens = np.array(request.tokens[: (index + 1) * size], dtype=np.int32)
            self.roots[hashes[index]] = request.root
            self.ours[hashes[index]] = extend_chain(request.root, request.public, tokens, size)[-HASH_BYTES:]
        self.events.append(self._event(request, hashes, first, full))
        request.hashed = full

    def _event(self, request: Request, hashes: list[bytes], first: int, full: int) -> BlockStored:
        size = self.size
        return BlockStored(
            list(hashes[first:full]),
            hashes[first - 1] if first else None,
            request.tokens[first * size : full * size],
            size,
            "GPU",
            request.lora,
            [_extra_keys(request, index) for index in range(first, full)],
            0,
            "full_attention",
            lookahead_token_ids=self._lookaheads(request, first, full),
        )

    def _lookaheads(self, request: Request, first: int, full: int) -> list[list[int]] | None:
        ends = [self.size * (index + 1) for index in range(first, full)]
        return [request.tokens[end : end + self.lookahead] for end in ends] if self.lookahead else None

    def _their_hashes(self, request: Request) -> list[bytes]:
        hashes = [b""]
        for index in range((len(request.tokens) - self.lookahead) // self.size):
            tokens = request.tokens[index * self.size : (index + 1) * self.size + self.lookahead]
            hashes.append(sha256(repr((hashes[-1], tokens, _extra_keys(request, index))).encode()).digest())
        return hashes[1:]


def _extra_keys(request: Request, index: int) -> tuple[str, ...] | None:
    roots = {request.public: request.root[HASH_BYTES:], 0: request.root[:HASH_BYTES]}
    return ((request.lora,) if request.lora else ()) + ((roots[index].hex(),) if index in roots else ()) or None


class Routers:
    """The view that routers get of an engine through its events."""

    def __init__(self) -> None:
        self.mirror = BlockMirror()
        self._lock = threading.Lock()

    def __call__(self, events: Sequence[Event]) -> None:
        with self._lock:
            for event in events:
                self.mirror.apply(event)

    def held(self) -> set[bytes]:
        with self._lock:
            return set(split_chain(self.mirror.tiers().get("pool", b"")))


class Publisher:
    """An engine's end of the sockets: publishes payloads under numbers from 0 on, keeps the last ones, replays them.

    ``lose``: keep the payload for a replay, but do not publish it. ``name``: of the process, behind each number.
    """

    def __init__(self, publish: str, replay: str, kept: int = 10_000, name: bytes = b"") -> None:
        self._queue: queue.Queue[tuple[bytes, bool] | tuple[bytes, ...] | None] = queue.Queue()
        self._name = name
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._addresses = publish, replay
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, payload: bytes, *, lose: bool = False) -> None:
        self._queue.put((payload, lose))

    def send_frames(self, *frames: bytes) -> None:
        """Publish these frames as they are, without a number of ours."""
        self._queue.put(frames)

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        live, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        live.bind(self._addresses[0])
        replay.bind(self._addresses[1])
        number = 0
        while True:
            if replay.poll(0):
                client, empty, first = replay.recv_multipart()
                for kept, payload in self._kept:
                    if kept >= int.from_bytes(first, "big"):
                        replay.send_multipart((client, empty, frame_of(kept) + self._name, payload))
                replay.send_multipart((client, empty, frame_of(END_OF_REPLAY) + self._name, b""))
            try:
                item = self._queue.get(timeout=0.02)
            except queue.Empty:
                continue
            if item is None:
                break
            if len(item) != 2 or not isinstance(item[1], bool):
                live.send_multipart(item)
                continue
            payload, lose = item
            if not lose:
                live.send_multipart((b"topic", frame_of(number) + self._name, payload))
            self._kept.append((number, payload))
            number += 1
        context.destroy(linger=0)


def frame_of(number: int) -> bytes:
    """Return the frame of a batch's number."""
    return number.to_bytes(SEQUENCE_BYTES, "big", signed=True)


ROOT, OTHER = b"r" * 16, b"o" * 16
STORED = BlockStored(
    [b"1"], None, [1, 2], 2, extra_keys=[(ROOT.hex(),)], group_idx=0, kv_cache_spec_kind="full_attention"
)


def stored(**changes: Any) -> BlockStored:
    return msgspec.structs.replace(STORED, **changes)


def chain(*tokens: int, root: bytes = ROOT) -> bytes:
    return hash_blocks(root, np.array(tokens, dtype=np.int32), 2)
