"""vLLM's pool keeps exactly the pinned blocks, through any ends, failures and concurrent saves; without vLLM."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.protocol.block_hash import PrefixScope, extend_chain, split_chain
from router.vllm_events.pool import FollowedPool
from serve_app.cache.prefix.hot_prefixes import HashedTokens, SavedPrefix
from serve_app.engine.protocol import EngineError, EngineRequest, Save, SaveResult
from serve_app.engine.reports import EngineMeters
from serve_app.engine.vllm.frontend import ModelFacts
from serve_app.engine.vllm.saves import VllmSaves, block_number
from serve_app.engine.vllm.settings import VllmSettings
from serve_app.engine.vllm.transfer.job import TransferJob
from tests.harness.eventually import let_others_run
from tests.router.vllm_events.pool_model import hold
from tests.serve_app.engine.tiny import prompt, request, root_of

pytestmark = pytest.mark.anyio

SIZE, BUDGET = 4, 10
SCOPE = PrefixScope("m")


class Vllm:
    """vLLM and its connector: the blocks kept by name. ``fails``: the jobs that fail."""

    def __init__(self) -> None:
        self.kept: dict[str, list[int]] = {}
        self.jobs: list[TransferJob] = []
        self.fails: set[int] = set()

    async def run(self, job: TransferJob, token_ids: Sequence[int], root: bytes, lora: str) -> int:
        self.jobs.append(job)
        number = len(self.jobs) - 1
        if job.kind == "unpin":  # on the request's arrival
            self.kept.pop(job.file, None)
        await let_others_run()
        if job.kind == "pin":
            if number in self.fails:
                raise EngineError("it failed")
            assert len(token_ids) == job.end * SIZE + 1
            assert job.file not in self.kept
            chain = extend_chain(root, 0, np.array(token_ids, np.int32), SIZE)
            self.kept[job.file] = list(map(block_number, split_chain(chain)))
        await let_others_run()
        return 0


class Made:
    def __init__(self, budget: float = BUDGET, groups: int = 1, **weights: float) -> None:
        self.now_s = 0.0
        self.vllm, self.meters, self.pool = Vllm(), EngineMeters(), FollowedPool(SIZE, 100)
        settings = VllmSettings("m", block_size=SIZE, pin_budget=budget, tenant_shares=weights)
        self.saves = VllmSaves(
            settings,
            ModelFacts(9, 100, 100, SIZE, ((SIZE, 100),) * groups),
            self.pool,
            self.vllm.run,
            self.meters,
            lambda: self.now_s,
        )

    async def settle(self) -> None:
        while self.saves._tasks:
            await asyncio.wait(self.saves._tasks)

    def kept(self) -> list[list[int]]:
        return sorted(self.vllm.kept.values())

    def pinned(self) -> list[list[int]]:
        return sorted(list(pin.blocks) for pin in self.saves.pins.soonest_first())


def asked(tokens: int, seed: int = 0, tenant: str = "default", **fields: Any) -> EngineRequest:
    ids = prompt(tokens, seed)
    made = request("r", ids, scope=SCOPE, tenant=tenant)
    return structs.replace(made, block_hashes=extend_chain(root_of(SCOPE), 0, ids, SIZE), **fields)


def saving(key: int, blocks: int, ttl_s: float | None = None, tenant: str = "default") -> EngineRequest:
    return asked(blocks * SIZE + 2, key, tenant, saves=(Save(bytes([key]), blocks * SIZE, ttl_s),))


OfTenant = (st.integers(0, 4), st.integers(0, 6), st.sampled_from("ab"))
Steps = st.lists(
    st.one_of(
        st.tuples(st.just("save"), *OfTenant, st.sampled_from([None, 5.0])),
        st.tuples(st.just("keep"), *OfTenant, st.just(5.0)),
        st.tuples(st.sampled_from(["later", "clear", "shares", "wait", "leave"])),
    ),
    max_size=20,
)


@given(steps=Steps, fails=st.sets(st.integers(0, 20)), shared=st.booleans())
async def test_vllm_keeps_exactly_the_pinned_blocks(steps: list[Any], fails: set[int], shared: bool) -> None:
    """Saves of two tenants at once end, fail, are recalled and forgotten: they are within the budget at any time."""
    made = Made(**({"a": 1.0, "b": 1.0} if shared else {}))
    saves = made.saves
    made.vllm.fails = fails
    begun: list[asyncio.Future[Any]] = []
    for kind, *values in steps:
        if kind == "save":
            key, blocks, tenant, ttl_s = values
            begun.append(asyncio.ensure_future(saves.keep(saving(key, blocks, ttl_s, tenant))))
        elif kind == "keep":
            key, blocks, tenant, ttl_s = values
            wanted = asked(blocks * SIZE + 1, key, tenant, saves=(Save(b"", blocks * SIZE, ttl_s),))
            begun.append(asyncio.ensure_future(saves.keep(wanted)))
        elif kind == "later":
            made.now_s += 4
            saves.renew(asked(4, 9))
        elif kind == "clear":
            begun.append(asyncio.ensure_future(saves.clear()))
        elif kind == "shares":
            begun.append(asyncio.ensure_future(saves.set_shares({"a": 1.0, "c": 1.0})))
        elif kind == "leave" and begun:
            begun[-1].cancel()
        else:
            await let_others_run()
        assert saves.pins.blocks <= BUDGET
    for result in await asyncio.gather(*begun, return_exceptions=True):
        assert result is None or isinstance(result, SaveResult | asyncio.CancelledError)
    await made.settle()
    assert made.kept() == made.pinned()
    assert len({block for blocks in made.kept() for block in blocks}) <= BUDGET
    await saves.clear()
    assert not made.vllm.kept


async def test_a_client_learns_the_outcome() -> None:
    """Each outcome of a save is reported as by the built-in engine."""
    made = Made()
    keep = made.saves.keep
    assert await keep(asked(9)) is None
    assert await keep(saving(1, 0)) == SaveResult("too_short")
    assert await asyncio.gather(keep(saving(1, 6)), keep(saving(1, 6))) == [SaveResult("saved"), SaveResult("present")]
    assert await keep(saving(1, 6)) == SaveResult("present")
    assert await keep(saving(2, 11)) == SaveResult("too_large", 44, 0, 40)
    assert await keep(saving(2, 5)) == SaveResult("over_budget", 20, 24, 40)
    made.vllm.fails = {len(made.vllm.jobs)}
    assert await keep(saving(3, 4)) == SaveResult("failed")
    assert await keep(saving(3, 4)) == SaveResult("saved")
    kept = asked(18, 1, saves=(Save(b"", 3, 9.0), Save(b"", 8, 9.0), Save(b"", 16, 9.0)))
    assert await keep(kept) == SaveResult("saved"), "their blocks are kept already"
    assert await keep(kept) == SaveResult("present")
    assert await keep(structs.replace(kept, saves=kept.saves[:1])) is None
    assert (made.meters.saves["saved"], made.meters.saves["failed"]) == (3, 1)
    off = Made(budget=0).saves
    assert (await off.keep(saving(1, 1)), await off.keep(kept)) == (SaveResult("off"), SaveResult("off"))
    assert await off.keep(asked(9)) is None


async def test_tenants_that_share_a_prefix_each_keep_it() -> None:
    """Neither ends with the other's pin: no request renews another tenant's, or learns that it exists."""
    made = Made()
    for tenant in ("a", "b"):
        kept = await made.saves.keep(asked(9, 1, tenant, saves=(Save(b"", 8, 9.0),)))
        assert kept == SaveResult("saved")
    assert made.saves.pins.holdings() == {"a": 2, "b": 2}


async def test_time_runs_from_the_last_read() -> None:
    """The next request releases a prefix without reads; a partial read does not count."""
    made = Made()
    for key, held in ((1, 3), (2, 2)):
        await made.saves.keep(saving(key, 3, 10.0))
        hold(made.pool, root_of(SCOPE), prompt(14, key), SIZE, held)
    made.now_s = 8
    for key in (1, 2):
        made.saves.renew(asked(14, key))
    for now_s, left in ((12, 1), (19, 0)):
        made.now_s = now_s
        made.saves.renew(asked(4, 9))
        await made.settle()
        assert made.kept() == made.pinned()
        assert len(made.kept()) == left


async def test_a_leaving_client_does_not_end_a_shared_save() -> None:
    """The first client disconnects; the save continues, and the second client gets its outcome."""
    made = Made()
    first, second = (asyncio.ensure_future(made.saves.keep(saving(1, 3))) for _ in range(2))
    await let_others_run()
    await let_others_run()  # its job has begun, and nothing is held yet
    first.cancel()
    assert await second == SaveResult("present")
    assert made.kept() == made.pinned() != []


async def test_a_save_of_another_replica_is_kept_with_its_remaining_time() -> None:
    """It is kept unchanged and once; an expired save, or one not fully held here, is ignored."""
    made = Made()
    saved = SavedPrefix(b"k", "default", 10.0, 4.0, 0)

    async def take_over(saved: SavedPrefix, blocks: int, seed: int, held: int | None = None) -> str | None:
        wanted = asked(blocks * SIZE, seed)
        hold(made.pool, wanted.root, wanted.token_ids, SIZE, held)
        return await made.saves.take_over(saved, HashedTokens(SCOPE, wanted.token_ids, wanted.block_hashes))

    assert await take_over(replace(saved, unread_s=10.0), 1, 5) is None
    assert await take_over(saved, 3, 6, held=2) is None
    assert await take_over(saved, 0, 7) is None
    assert await take_over(saved, 3, 1) == "pinned"
    assert await take_over(saved, 3, 1, held=0) == "present"
    assert await take_over(replace(saved, key=b"l"), 11, 3) == "over_budget"
    made.vllm.fails = {len(made.vllm.jobs)}
    assert await take_over(replace(saved, key=b"m"), 2, 4) is None
    for now_s, left in ((5, 1), (7, 0)):
        made.now_s = now_s
        made.saves.renew(asked(4, 9))
        await made.settle()
        assert len(made.kept()) == left


def test_a_budget_holds_saves_in_every_group_of_layers() -> None:
    """The pool has 100 blocks, and each block of a prefix may take one in each group."""
    for budget, groups, blocks in ((0.5, 1, 50), (0.5, 3, 16), (30, 3, 10)):
        assert Made(budget, groups).saves.pins.budget_blocks == blocks
