"""Churn through one real engine, to find leftovers.

Tenants, salts and prefixes change, adapters are loaded and unloaded, prompts are saved with and without an expiry,
requests are cancelled at any moment, KV moves through host memory and disk, prefixes are exported and imported, and
caches are reset. A check lets everything end, then examines every block and table (``audit``). No Ray, no HTTP.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from msgspec import structs
from transformers import AutoConfig

from benchmarks.common.random_adapters import make_adapters
from router.protocol.block_hash import PrefixScope, TokenArray, hash_blocks, split_chain
from router.protocol.events import BlocksRemoved, BlocksStored, CacheCleared, Event
from router.protocol.request import Decision
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import (
    EngineOutput,
    EngineRequest,
    QueueFull,
    RequestTooLong,
    SamplingParams,
    Save,
    UnknownAdapter,
)
from serve_app.engine.runner.kv_size import kv_bytes_per_block
from serve_app.engine.runner.model_runner import load_runner
from serve_app.engine.settings import EngineSettings
from tests.harness.churn.audit import Imbalance, audit, settled, tables, tier_hashes
from tests.harness.eventually import eventually
from tests.harness.tiers import tier_settings

TENANTS, PREFIXES, ADAPTERS = 12, 3, 6
CONCURRENCY = 12
CLOCK_SPEED = 20.0
"""The engine's clock runs this much faster, so that TTLs and shares expire."""
NUM_BLOCKS, HOST_BLOCKS, DISK_BLOCKS = 128, 32, 64
SECRET = b"churn"
CANARY = "canary"
"""The id of the request that is repeated at every check."""


class Ledger:
    """The sink of all outputs and events: live requests, finish reasons, and announced blocks."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.announced: dict[str, set[bytes]] = {}
        self.canary: list[int] = []
        self._changed = threading.Condition()

    def outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Receive one step's outputs (on the engine's thread)."""
        with self._changed:
            for output in outputs:
                if output.request_id == CANARY:
                    self.canary.extend(output.token_ids)
                if output.finish_reason is not None:
                    self.live.discard(output.request_id)
                    self.ended[output.finish_reason] += 1
            self._changed.notify_all()

    def events(self, events: Sequence[Event]) -> None:
        """Receive cache events (on the engine's thread)."""
        for event in events:
            if isinstance(event, BlocksStored):
                self.announced.setdefault(event.tier, set()).update(split_chain(event.hashes))
            elif isinstance(event, BlocksRemoved):
                self.announced[event.tier].difference_update(split_chain(event.hashes))
            elif isinstance(event, CacheCleared):
                self.announced.clear()

    def wait(self, most_live: int) -> None:
        """Wait until at most this many requests are alive. Raises TimeoutError after two minutes."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.live) <= most_live, 120):
                raise TimeoutError(f"{len(self.live)} requests did not end, {sorted(self.live)[:3]} among them")

    def born(self, name: str) -> None:
        """Count a request as alive."""
        with self._changed:
            self.live.add(name)

    def stillborn(self, name: str) -> None:
        """Forget a refused request."""
        with self._changed:
            self.live.discard(name)


class Churn:
    """One engine, the actions on it, and their outcomes."""

    def __init__(self, model: Path, directory: Path) -> None:
        info = self._info = load_checkpoint_info(model)
        self._random = random.Random(0)
        self._specs = make_adapters(model, directory / "adapters", ADAPTERS, rank=4)
        shares = {f"tenant-{number}": 1.0 + number % 3 for number in range(TENANTS)}
        block_bytes = kv_bytes_per_block(AutoConfig.from_pretrained(model), "float32", 16)
        tiers = tier_settings(
            HOST_BLOCKS * block_bytes, DISK_BLOCKS * block_bytes, directory / "disk", tier_load_ratio=1e9
        )
        self._engine_settings = EngineSettings(
            num_blocks=NUM_BLOCKS,
            max_model_len=2048,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_waiting_requests=32,
            dtype="float32",
            num_threads=1,
            pin_budget_blocks=NUM_BLOCKS // 4,
            tenant_shares=shares,
            max_loras=2,
            max_cpu_loras=3,
            model_fingerprint=info.fingerprint,
            tiers=tiers,
        )
        self.ledger = Ledger()
        self.engine = TorchEngine(
            load_runner(model, self._engine_settings),
            self._engine_settings,
            self.ledger.events,
            clock=lambda: time.monotonic() * CLOCK_SPEED,
        )
        self._families: dict[tuple[str, int], TokenArray] = {}
        self._numbers = 0
        self.engine.start()
        self.done: Counter[str] = Counter()
        self._canary: list[int] | None = None

    def run(self, operations: int) -> None:
        """Do this many actions, each while earlier ones are in progress."""
        actions = {
            self._ask: 60, self._save: 8, self._cancel: 12, self._burst: 2, self._load_adapter: 6,
            self._unload_adapter: 3, self._move: 2, self._refused: 2, self._reset: 0.3,
        }  # fmt: skip
        chosen = self._random.choices(list(actions), list(actions.values()), k=operations)
        for action in chosen:
            self.ledger.wait(CONCURRENCY)
            action()

    def check(self) -> None:
        """Let everything end, then examine every block and every table. Raises Imbalance."""
        self.ledger.wait(0)
        self._ask_canary()
        eventually(lambda: self.engine._loop.call(self._look), 60)  # the disk tier comes to rest

    def close(self) -> None:
        """Stop the engine."""
        self.engine.stop()

    def _ask(self) -> None:
        self._submit(self._request(self._tenant()))

    def _save(self) -> None:
        ttl_s = self._random.choice([None, 30.0, 300.0, 3600.0])
        tenant, family = self._tenant(), self._random.randrange(PREFIXES)
        request = self._request(tenant, family=family)
        tokens = len(self._prefix(tenant, family))
        self._submit(request, Save(f"{tenant} {family}".encode() + request.root, tokens, ttl_s))
        self.done["saved"] += 1

    def _burst(self) -> None:
        tenant, prefix = self._tenant(), self._tokens(self._random.randrange(100, 600))
        for _ in range(6):
            self._submit(self._request(tenant, prefix=prefix))

    def _cancel(self) -> None:
        live = sorted(self.ledger.live.copy())
        if live:
            self.engine.cancel(self._random.choice(live))

    def _load_adapter(self) -> None:
        with suppress(QueueFull):
            self.engine.adapters.load(self._random.choice(self._specs))
            self.done["adapters loaded"] += 1

    def _unload_adapter(self) -> None:
        self.engine.adapters.unload(self._random.choice(self._specs).key)

    def _move(self) -> None:
        tenant, family = self._tenant(), self._random.randrange(PREFIXES)
        scope = self._scope(tenant)
        root = scope.root(SECRET)
        ids = self._prefix(tenant, family)
        hashes = hash_blocks(root, ids, self._engine_settings.block_size)
        chain = self.engine.transfer.export_prefix(HashedTokens(scope, ids, hashes), demote=self._random.random() < 0.5)
        if chain is not None:
            self.engine.reset_prefix_cache(tiers=False)
            self.engine.transfer.import_part(chain, HashedTokens(scope, ids, hashes, tenant), 0)

    def _refused(self) -> None:
        request = self._request(self._tenant(), prefix=self._tokens(3000))
        self._submit(request)
        unknown = replace(request.scope, lora="never@heard")
        self._submit(self._request(request.tenant, scope=unknown))

    def _reset(self) -> None:
        self.engine.reset_prefix_cache(tiers=self._random.random() < 0.5)

    def _submit(self, request: EngineRequest, *saves: Save) -> None:
        self.ledger.born(request.request_id)
        try:
            self.engine.submit(structs.replace(request, saves=saves), self.ledger.outputs)
        except (QueueFull, RequestTooLong, UnknownAdapter) as refusal:
            self.ledger.stillborn(request.request_id)
            self.done[f"refused: {type(refusal).__name__}"] += 1

    def _tenant(self) -> str:
        """Return a configured tenant, or one from an ever-moving window of others."""
        if self._random.random() < 0.7:
            return f"tenant-{self._random.randrange(TENANTS)}"
        return f"visitor-{self._numbers // 200 + self._random.randrange(4)}"

    def _scope(self, tenant: str) -> PrefixScope:
        """Return one of a tenant's scopes: mostly with its own salt, sometimes with a loaded adapter."""
        salt = tenant if self._random.random() < 0.8 else f"{tenant} {self._random.randrange(3)}"
        loaded = self.engine.adapters.loaded
        lora = self._random.choice(loaded) if loaded and self._random.random() < 0.4 else ""
        return PrefixScope(self._info.fingerprint, lora, salt.encode())

    def _prefix(self, tenant: str, family: int) -> TokenArray:
        """Return one of a tenant's prefixes, which is sometimes replaced for good."""
        found = self._families.get((tenant, family))
        if found is None or self._random.random() < 0.03:
            found = self._families[tenant, family] = self._tokens(self._random.randrange(40, 400))
            if len(self._families) > 100:
                del self._families[next(iter(self._families))]
        return found

    def _tokens(self, count: int) -> TokenArray:
        """Return this many new random tokens."""
        generator = np.random.default_rng(self._random.randrange(1 << 60))
        return generator.integers(300, self._info.vocab_size, count, dtype=np.int32)

    def _request(
        self,
        tenant: str,
        *,
        prefix: TokenArray | None = None,
        family: int | None = None,
        scope: PrefixScope | None = None,
    ) -> EngineRequest:
        """Return a request with a tenant's prefix and a question of its own; omitted arguments are drawn at random."""
        if prefix is None:
            prefix = self._prefix(tenant, self._random.randrange(PREFIXES) if family is None else family)
        scope = scope or self._scope(tenant)
        self._numbers += 1
        return EngineRequest(
            f"request-{self._numbers}",
            token_ids=np.append(prefix, self._tokens(self._random.randrange(1, 60))),
            scope=scope,
            root=scope.root(SECRET),
            sampling=SamplingParams(self._random.choice([1, 1, 4, 8, 16, 120]), temperature=0.0),
            tenant=tenant,
            decision=Decision("", f"router-{self._numbers % 3}", self._numbers, 0, 0, "cold"),
        )

    def _look(self) -> bool:
        """Audit on the engine's loop; return False while something is still in transit."""
        if not settled(self.engine):
            return False
        audit(self.engine, tables(self.engine))
        held = {tier: hashes for tier, hashes in tier_hashes(self.engine).items() if hashes}
        announced = {tier: hashes for tier, hashes in self.ledger.announced.items() if hashes}
        if announced != held:
            both = {tier: (len(announced.get(tier, ())), len(held.get(tier, ()))) for tier in announced | held}
            raise Imbalance(f"the announced blocks are not the held ones (announced, held): {both}")
        return True

    def _ask_canary(self) -> None:
        """Repeat the request of all earlier checks: the answer must not change."""
        scope = PrefixScope(self._engine_settings.model_fingerprint, salt=b"canary")
        ids = np.arange(300, 500, dtype=np.int32)
        self.ledger.canary.clear()
        self.ledger.born(CANARY)
        sampling = SamplingParams(16, temperature=0.0)
        canary = EngineRequest(CANARY, token_ids=ids, scope=scope, root=scope.root(SECRET), sampling=sampling)
        self.engine.submit(canary, self.ledger.outputs)
        self.ledger.wait(0)
        answer = list(self.ledger.canary)
        if self._canary is None:
            self._canary = answer
        elif answer != self._canary:
            raise Imbalance(f"the same prompt was answered {self._canary} and now {answer}")
