"""Migration for other replicas: reports vLLM's held and hot prefixes, and exports and imports their KV.

Exported parts are described; imported parts are verified before vLLM sees them. Any thread but the loop's.
"""

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from router.protocol.block_hash import HASH_BYTES, PrefixScope, extend_chain
from router.vllm_events.pool import FollowedPool
from serve_app.cache.kv_chain import KvChain, KvFormat, KvPart, TransferError, WrongChain, make_header, verify_part
from serve_app.cache.prefix.blocks import CachedBlock
from serve_app.cache.prefix.hot_prefixes import HashedTokens, HotPrefixes, SavedPrefix, idle_heats, list_hot
from serve_app.cache.prefix.pins import PinOutcome, Pins
from serve_app.cache.prefix.quota import PUBLIC
from serve_app.engine.protocol import CacheRoom, Clock
from serve_app.engine.vllm.frontend import ModelFacts
from serve_app.engine.vllm.saves import block_number
from serve_app.engine.vllm.settings import VllmSettings
from serve_app.engine.vllm.transfer.job import LAYOUT_FILE, TransferJob, rank_file

RunJob = Callable[[TransferJob, Sequence[int], bytes, str], int]
"""``JobRunner.wait``."""


@dataclass(eq=False)
class VllmMigration:
    """One engine's ``protocol.KvTransfer``. ``directory``: for KV files; ``kv_usage``: part of the pool in use."""

    settings: VllmSettings
    facts: ModelFacts
    pool: FollowedPool
    pins: Pins
    directory: Path
    run_job: RunJob
    kv_usage: Callable[[], float]
    take_over_pin: Callable[[SavedPrefix, HashedTokens], PinOutcome | None]
    clock: Clock = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _owners: OrderedDict[bytes, tuple[PrefixScope, str]] = field(default_factory=OrderedDict)
    _file_numbers: Iterator[int] = field(default_factory=itertools.count)
    _format: KvFormat | None = None
    """None: KV can neither leave nor enter. It has a part for each rank."""

    def __post_init__(self) -> None:
        """Read the format of loadable KV from the workers' descriptions of their blocks in ``directory``."""
        # A job has one token more than its blocks, and generates one.
        self._most_blocks = (self.facts.max_model_len - 2) // self.settings.block_size
        if self.settings.copies:
            files = self._parts(str(self.directory / LAYOUT_FILE))
            parts = tuple(msgspec.json.decode(file.read_bytes(), type=KvPart) for file in files)
            self._format = KvFormat(f"{self.settings.model_fingerprint}/vllm", self.settings.block_size, parts)

    def note_owner(self, root: bytes, scope: PrefixScope, tenant: str) -> None:
        """Remember the scope and tenant of a root (both roots of a public chain), as many as the pool has blocks."""
        owners = {root: (scope, tenant)}
        if scope.public_blocks:
            owners = {root[HASH_BYTES:]: (scope.private, tenant), root[:HASH_BYTES]: (scope.public, PUBLIC)}
        with self._lock:
            for own, owner in owners.items():
                self._owners[own] = owner
                self._owners.move_to_end(own)
                if len(self._owners) > self.facts.num_blocks:
                    self._owners.popitem(last=False)

    @property
    def kv_format(self) -> KvFormat | None:
        """The format of loadable KV; None if none can leave or enter."""
        return self._format

    def owner_of(self, root: bytes) -> tuple[PrefixScope, str] | None:
        """Return the scope and tenant of a root that ``note_owner`` was told; None for others (any thread)."""
        with self._lock:
            return self._owners.get(root)

    def export_prefix(
        self, prefix: HashedTokens, first: int = 0, most_blocks: int | None = None, *, demote: bool = False
    ) -> KvChain | None:
        """Return the blocks from ``first`` on that vLLM holds; ``demote`` does not change its eviction order."""
        kv_format, scope = self._format, prefix.scope
        if kv_format is None:
            return None
        size, ids = kv_format.block_size, np.ascontiguousarray(prefix.token_ids, dtype=np.int32)
        most = self._most_blocks if most_blocks is None else min(first + most_blocks, self._most_blocks)
        end = self.pool.count_held(prefix.chain, min(most, len(ids) // size))
        public, chain = min(scope.public_blocks, end), prefix.chain[: end * HASH_BYTES]
        root = self.pool.roots_of(chain, public) if end > first else b""
        if not root or extend_chain(root, public, ids[: end * size], size) != chain:
            return None
        file = str(self.directory / f"kv-{next(self._file_numbers)}")
        job = TransferJob("export", file, first, end, prefix.tenant, public * size)
        try:
            self.run_job(job, [*ids[: end * size].tolist(), 0], root, scope.lora)
            rows = [
                np.fromfile(part, np.uint8).reshape(-1, width)
                for part, width in zip(self._parts(file), kv_format.part_bytes, strict=True)
            ]
            payload = rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)
        except (FileNotFoundError, LookupError):
            return None
        finally:
            self._remove(file)
        end = first + len(payload)
        header = make_header(kv_format, scope, ids[: end * size], chain[: end * HASH_BYTES], payload, first)
        return KvChain(msgspec.structs.replace(header, root=root), payload)

    def import_part(self, part: KvChain, prefix: HashedTokens, first: int) -> int:
        """Load the blocks of ``part``, which continue ``prefix`` from ``first`` on; return how many leading are held.

        If blocks before ``first`` were evicted meanwhile, vLLM computes the prefix, and the result is below ``first``.
        Raises a TransferError, importing nothing, for any other part, or EngineError.
        """
        if self._format is None:
            raise TransferError("this vLLM takes no KV from other replicas")
        scope, token_ids = prefix.scope, prefix.token_ids
        verify_part(part, self._format, scope, token_ids, prefix.chain, first)
        end, size, root = first + part.header.blocks, self._format.block_size, part.header.root
        if end > self._most_blocks:
            raise TransferError("vLLM cannot hold it")
        public = min(scope.public_blocks, end)
        if not root or extend_chain(root, public, token_ids[: end * size], size) != prefix.chain[: end * HASH_BYTES]:
            raise WrongChain("its root is not that of the requested tokens")
        file = str(self.directory / f"kv-{next(self._file_numbers)}")
        job = TransferJob("import", file, first, end, prefix.tenant, public * size)
        try:
            rows = np.split(part.payload, list(itertools.accumulate(self._format.part_bytes))[:-1], axis=1)
            for path, own in zip(self._parts(file), rows, strict=True):
                np.ascontiguousarray(own).tofile(path)
            cached = self.run_job(job, [*token_ids[: end * size].tolist(), 0], root, scope.lora)
        except LookupError as error:
            raise TransferError(f"adapter {scope.lora} is not loaded") from error
        finally:
            self._remove(file)
        self.note_owner(root, scope, prefix.tenant)
        return cached // size

    def hot_prefixes(self) -> HotPrefixes:
        """Return all prefixes in the pool, saves and the hottest first; none of adapters, which peers may lack."""
        # A whole chain has one adapter, so that omitted entries take their children along.
        base = [entry for entry in self._entries() if not entry.scope.lora]
        blocks = {block_number(entry.block_hash): entry.block for entry in base}
        pins = [
            replace(pin, blocks=tuple(blocks[number] for number in pin.blocks))
            for pin in self.pins.soonest_first()
            if blocks.keys() >= set(pin.blocks)
        ]
        return list_hot(base, pins, self.clock())

    def cache_room(self) -> CacheRoom:
        """Return the free part of the pool without prefixes, and the heats of the coldest prefixes."""
        entries = self._entries()
        room = max(0, self.facts.num_blocks - round(self.facts.num_blocks * self.kv_usage()))
        idle = min(len(entries), room)
        heats = idle_heats(entries, range(len(entries)), self.clock())
        return CacheRoom(room - idle, heats[: 4 * idle])

    def _entries(self) -> list[CachedBlock]:
        """Return all blocks under a root with a known owner, parents first, numbered from 0."""
        with self._lock:
            owners = dict(self._owners)
        numbers: dict[bytes, int] = {}
        entries: list[CachedBlock] = []
        for block_hash, block in self.pool.blocks():
            parent = numbers.get(block.under)
            above = None if parent is None else (entries[parent].scope, entries[parent].tenant)
            owner = owners.get(block.root) if block.root else above
            if owner is not None and (above is not None or block.root == block.under):
                number = numbers[block_hash] = len(entries)
                entry = CachedBlock(block_hash, number, parent, block.token_bytes, *owner)
                entry.used_s, entry.hits = block.used_s, block.hits
                entries.append(entry)
        return entries

    def _parts(self, file: str) -> list[Path]:
        return [Path(rank_file(file, rank)) for rank in range(self.settings.ranks)]

    def _remove(self, file: str) -> None:
        for part in self._parts(file):
            part.unlink(missing_ok=True)
