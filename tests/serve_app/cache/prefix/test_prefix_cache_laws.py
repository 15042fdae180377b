"""Laws of the prefix cache under any sequence of operations, with a naive cache as oracle."""

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from router.protocol.block_hash import HASH_BYTES, PrefixScope, extend_chain, split_chain, xor_of_words
from router.protocol.events import BlocksStored, CacheCleared
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.cache.prefix.quota import CACHE_ACTIVE_S, PUBLIC
from tests.serve_app.cache.prefix.naive_cache import NaiveCache, NaivePins

BLOCKS, SIZE, PIN_BUDGET = 12, 2, 5
SCOPES = (PrefixScope("m", salt=b"a"), PrefixScope("m", salt=b"b"))
PUBLIC_PROMPT = [0, 1, 0, 1, 0]
"""Two whole blocks that both tenants share, and a token of a third."""
TENANTS = {b"a": "a", b"b": "b"}
SHARES = {"a": 1.0, "b": 2.0}
USUAL = ([0, 0, 1, 1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 1, 1, 0, 0, 1, 0, 0], [1, 1, 1, 0, 1])
IDS = st.one_of(st.sampled_from(USUAL), st.lists(st.integers(0, 1), min_size=1, max_size=11))
"""Prompts: earlier ones are repeated, because otherwise there would be few hits."""


def pin_shares(weights: dict[str, float]) -> dict[str, int]:
    return {name: int(PIN_BUDGET * weight / sum(weights.values())) for name, weight in weights.items()}


def scope_of(scope: PrefixScope, ids: list[int]) -> PrefixScope:
    pairs = enumerate(zip(ids, PUBLIC_PROMPT, strict=False))
    common = next((i for i, pair in pairs if pair[0] != pair[1]), min(len(ids), len(PUBLIC_PROMPT)))
    return replace(scope, public_blocks=common // SIZE)


def root_of(scope: PrefixScope) -> bytes:
    root = scope.private.root(b"k")
    return scope.public.root(b"k") + root if scope.public_blocks else root


class Running:
    def __init__(self, scope: PrefixScope, ids: list[int], blocks: list[int], published: int) -> None:
        self.scope, self.ids, self.blocks, self.published = scope, ids, blocks, published


class CacheMachine(RuleBasedStateMachine):
    """Requests arrive, grow, are pinned and end, time passes: every law holds. (docs: caching)"""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.cache = PrefixCache(BLOCKS, SIZE, pin_budget_blocks=PIN_BUDGET, shares=SHARES, clock=lambda: self.now_s)
        self.oracle = NaiveCache(SIZE)
        self.pins = NaivePins(PIN_BUDGET, pin_shares(SHARES))
        self.shares: dict[str, float] = {**SHARES, PUBLIC: 1.0}
        self.owner: dict[int, str] = {}
        self.seen_s: dict[str, float] = {}
        self.held: list[Running] = []
        self.announced: set[bytes] = set()

    @rule(target=running, scope=st.sampled_from(SCOPES), ids=IDS)
    def admit(self, scope: PrefixScope, ids: list[int]) -> object:
        scope = scope_of(scope, ids)
        array = np.array(ids, dtype=np.int32)
        chain = self.cache.prompt_chain(scope, root_of(scope), array)
        matched = self.cache.match(scope, array, chain)
        assert len(matched) == self.oracle.match(scope, ids)
        assert len(matched) == self.cache.index.count_held(chain, (len(ids) - 1) // SIZE)
        self.cache.acquire(matched)
        if matched and self.owner[matched[0]] == PUBLIC:
            self.seen_s[PUBLIC] = self.now_s
        self.pins.read(matched, self.now_s)
        missing = -(-len(ids) // SIZE) - len(matched)
        if missing > self.cache.available_blocks:
            self.cache.release(matched)
            return multiple()
        before = {block for one in self.held for block in one.blocks} | self.pins.blocks()
        fresh = self.allocate(missing, TENANTS[scope.salt])
        assert not before & set(fresh), "a block in use or pinned was handed out again"
        assert not set(matched) & set(fresh)
        one = Running(scope, ids, matched + fresh, len(matched))
        self.held.append(one)
        return one

    @rule(scope=st.sampled_from(SCOPES), ids=IDS)
    def serve(self, scope: PrefixScope, ids: list[int]) -> None:
        one = self.admit(scope, ids)
        if isinstance(one, Running):
            self.publish(one, len(ids))
            self.release(one)

    def allocate(self, count: int, tenant: str) -> list[int]:
        """Allocate, and compare the tenants that lost blocks with those over their share."""
        cache = self.cache
        held, free = cache.quota.holdings(), cache.pool.free_blocks
        can_give = self.can_give()
        fresh = cache.allocate(count, tenant)
        lost = Counter(self.owner[block] for block in fresh if block in self.owner)
        assert lost.total() == max(0, count - free)
        active = [name for name, seen_s in self.seen_s.items() if self.now_s - seen_s <= CACHE_ACTIVE_S]
        for name in lost:
            left = held[name] - lost[name]
            share = BLOCKS * self.shares[name] / sum(self.shares[other] for other in active) if name in active else 0.0
            for other in can_give:
                if can_give[other] > lost[other] and other != name:
                    weights = sum(self.shares[n] for n in active)
                    others_share = BLOCKS * self.shares[other] / weights if other in active else 0.0
                    over = held[other] - lost[other] > others_share
                    assert not (over and left + 1 <= share), f"{name} gave a block while {other} was over its share"
        self.seen_s[tenant] = self.now_s
        self.owner.update(dict.fromkeys(fresh, tenant))
        return fresh

    @rule(tenant=st.sampled_from(list(SHARES)))
    def press(self, tenant: str) -> None:
        """Take all available blocks, then release them: used and pinned blocks stay, and stay indexed."""
        in_use = {block for one in self.held for block in one.blocks} | self.pins.blocks()
        indexed = {block for block in in_use if block in self.cache.index}
        fresh = self.allocate(self.cache.available_blocks, tenant)
        assert not in_use & set(fresh), "a block in use or pinned was evicted"
        assert {entry.block for entry in self.cache.index} == indexed
        self.cache.release(fresh)

    def can_give(self) -> Counter[str]:
        """Return by tenant the idle blocks with no others' below: a public block is evicted after its children."""
        entries = {entry.block: entry for entry in self.cache.index}
        held_up: set[int] = set()
        for block, entry in entries.items():
            above = entry.parent
            while above is not None:
                if self.owner[above] != self.owner[block]:
                    held_up.add(above)
                above = entries[above].parent
        idle = (block for block in entries if self.cache.pool.is_idle(block))
        return Counter(self.owner[block] for block in idle if block not in held_up)

    @rule(
        scope=st.sampled_from(SCOPES),
        ids=IDS,
        blocks=st.integers(1, 4),
        key=st.sampled_from([b"v", b"w", b"x", b"y", b"z"]),
        ttl=st.sampled_from([None, 4, 8]),
        tenant=st.sampled_from(list(SHARES)),
    )
    def pin(self, scope: PrefixScope, ids: list[int], blocks: int, key: bytes, ttl: float | None, tenant: str) -> None:
        """Pin the prefix of a request before the request ends."""
        one = self.admit(scope, ids)
        if isinstance(one, Running):
            self.publish(one, len(ids))
            chosen = one.blocks[: min(blocks, one.published)]
            if chosen:
                expected = self.pins.add(key, chosen, ttl, self.now_s, tenant)
                assert self.cache.pin(key, chosen, ttl, tenant=tenant) == expected
            self.release(one)

    @rule(key=st.sampled_from([b"v", b"w"]))
    def unpin(self, key: bytes) -> None:
        assert self.cache.unpin(key) == (self.pins.pins.pop(key, None) is not None)

    @rule(weights=st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=2, max_size=2))
    def reweigh(self, weights: list[float]) -> None:
        """Change the settings: no block is evicted by that, and from now on the shares are others."""
        new = dict(zip(SHARES, weights, strict=True))
        self.shares.update(new)
        self.pins.shares = pin_shares(new)
        self.cache.set_shares(new)

    @rule(seconds=st.sampled_from([2.0, 4.0, 8.0, 4000.0]))
    def nobody_comes(self, seconds: float) -> None:
        """Nothing is asked for meanwhile, so no pin is removed yet."""
        self.now_s += seconds

    @rule(seconds=st.sampled_from([1.0, 3.0, CACHE_ACTIVE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.cache.expire_pins()
        self.pins.expire(self.now_s)

    @rule(one=running, blocks=st.integers(1, 5))
    def publish(self, one: Running, blocks: int) -> None:
        if one not in self.held:
            return
        last = min(one.published + blocks, len(one.ids) // SIZE)
        array = np.array(one.ids, dtype=np.int32)
        chain = self.cache.prompt_chain(one.scope, root_of(one.scope), array)
        known = {entry.block_hash for entry in self.cache.index}
        done = self.cache.publish(one.scope, array, chain, one.blocks, one.published, last)
        assert done == max(last, one.published)
        self.oracle.publish(one.scope, one.ids, one.published, done)
        for i in range(one.published, min(done, one.scope.public_blocks)):
            self.owner[one.blocks[i]] = PUBLIC
            if chain[HASH_BYTES * i : HASH_BYTES * (i + 1)] not in known:
                self.seen_s[PUBLIC] = self.now_s
        one.published = done

    @rule(one=consumes(running))
    def release(self, one: Running) -> None:
        if one in self.held:
            self.held.remove(one)
            self.cache.release(one.blocks)

    @rule(scope=st.sampled_from(SCOPES), ids=st.lists(st.integers(0, 1), min_size=3, max_size=11))
    def export(self, scope: PrefixScope, ids: list[int]) -> None:
        """Export a prefix to another replica: its unshared idle blocks are demoted, but none is evicted."""
        scope = scope_of(scope, ids)
        array = np.array(ids, dtype=np.int32)
        matched = self.cache.match(scope, array, self.cache.prompt_chain(scope, root_of(scope), array))
        self.cache.acquire(matched)
        if matched and self.owner[matched[0]] == PUBLIC:
            self.seen_s[PUBLIC] = self.now_s
        self.pins.read(matched, self.now_s)
        self.cache.release(matched)
        known = {entry.block_hash for entry in self.cache.index}
        demoted = self.cache.demote(matched)
        tail = matched[len(matched) - demoted :]
        assert all(self.cache.pool.is_idle(block) for block in tail)
        assert {entry.block_hash for entry in self.cache.index} == known

    @rule(
        scope=st.sampled_from(SCOPES), ids=st.lists(st.integers(0, 1), min_size=3, max_size=11), over=st.integers(0, 2)
    )
    def touch(self, scope: PrefixScope, ids: list[int], over: int) -> None:
        """Touch a prefix that a request waits for; the hint of its length may be out of date."""
        scope = scope_of(scope, ids)
        array = np.array(ids, dtype=np.int32)
        chain = self.cache.prompt_chain(scope, root_of(scope), array)
        matched = self.cache.match(scope, array, chain)
        known = {entry.block_hash for entry in self.cache.index}
        self.cache.touch(chain, min(len(matched) + over, len(chain) // HASH_BYTES))
        assert {entry.block_hash for entry in self.cache.index} == known

    @rule()
    def reset(self) -> None:
        evicted, complete = self.cache.evicted_blocks, self.cache.reset()
        self.pins.pins.clear()
        assert complete == (not any(one.published for one in self.held))
        assert {entry.block for entry in self.cache.index} <= {block for one in self.held for block in one.blocks}
        assert self.cache.evicted_blocks == evicted, "a reset counts no evictions"

    @invariant()
    def events_replayed_equal_the_index(self) -> None:
        for event in self.cache.take_events():
            if isinstance(event, CacheCleared):
                self.announced.clear()
                continue
            for block_hash in split_chain(event.hashes):
                assert isinstance(event, BlocksStored) == (block_hash not in self.announced)
                self.announced ^= {block_hash}
        assert self.announced == {entry.block_hash for entry in self.cache.index}
        assert xor_of_words(b"".join(self.announced)) == self.cache.index.xor
        # The oracle also forgets evicted blocks, but no others.
        self.oracle.keys = {key for key in self.oracle.keys if self._hash(key) in self.announced}
        assert len(self.oracle.keys) == len(self.announced)

    @invariant()
    def no_child_is_cached_without_its_parent(self) -> None:
        for scope, tokens in self.oracle.keys:
            above = list(tokens[:-SIZE])
            parent = scope_of(scope, list(tokens)).at(len(above) // SIZE - 1), tuple(above)
            assert not above or parent in self.oracle.keys

    @invariant()
    def blocks_are_conserved(self) -> None:
        pool = self.cache.pool
        holders = (*self.held, *self.pins.pins.values())
        used = [block for one in holders for block in one.blocks]
        assert pool.used_blocks == len(set(used))
        assert all(pool.references(block) == used.count(block) for block in range(BLOCKS))
        assert pool.free_blocks + pool.idle_blocks + len(set(used)) == BLOCKS
        assert pool.idle_blocks <= len(self.cache.index) <= pool.idle_blocks + len(set(used))

    @invariant()
    def pins_are_kept_and_counted(self) -> None:
        assert self.cache.pins.blocks == len(self.pins.blocks()) <= PIN_BUDGET
        assert set(self.cache.pins) == set(self.pins.pins)
        holdings = {tenant: len(held) for tenant in SHARES if (held := self.pins.blocks(tenant))}
        assert self.cache.pins.holdings() == holdings
        in_use = {block for one in self.held for block in one.blocks}
        assert self.cache.pinned_idle_blocks() == len(self.pins.blocks() - in_use)

    @invariant()
    def every_taken_block_is_somebodys(self) -> None:
        pool = self.cache.pool
        taken = [block for block in range(BLOCKS) if pool.references(block) or pool.is_idle(block)]
        self.owner = {block: self.owner[block] for block in taken}
        assert self.cache.quota.holdings() == Counter(self.owner.values())
        for tenant in self.shares:
            used = sum(1 for block in taken if self.owner[block] == tenant and not pool.is_idle(block))
            assert self.cache.quota.in_use(tenant) == used

    @staticmethod
    def _hash(key: tuple[PrefixScope, tuple[int, ...]]) -> bytes:
        scope, tokens = key
        scope = scope_of(scope, list(tokens))
        array = np.array(tokens, dtype=np.int32)
        return extend_chain(root_of(scope), scope.public_blocks, array, SIZE)[-HASH_BYTES:]


TestCacheLaws = CacheMachine.TestCase
TestCacheLaws.settings = settings(max_examples=150, stateful_step_count=40)
