"""What stays in vLLM's pool is what the pins say, whatever ends, fails or comes at once; without vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import PrefixScope, extend_chain
from serve_app.cache.prefix.hot_prefixes import HashedTokens, SavedPrefix
from serve_app.engine.metrics import EngineMeters
from serve_app.engine.protocol import EngineError, EngineRequest, KeptPrefix, Save, SaveResult
from serve_app.engine.vllm.saves import VllmSaves, block_number
from serve_app.engine.vllm.transfer.job import Job
from tests.serve_app.engine.tiny import prompt, request, root_of

SIZE, BUDGET = 4, 10
SCOPE = PrefixScope("m")


class Vllm:
    """vLLM and its connector: which names keep how many blocks. ``fails``: jobs that it fails."""

    def __init__(self) -> None:
        self.kept: dict[str, list[int]] = {}
        self.jobs: list[Job] = []
        self.fails: set[int] = set()

    async def run(self, job: Job, token_ids: Sequence[int], root: bytes, lora: str) -> int:
        self.jobs.append(job)
        if job.kind == "unpin":  # as the request arrives
            self.kept.pop(job.file, None)
        await asyncio.sleep(0)
        if job.kind == "pin":
            if len(self.jobs) - 1 in self.fails:
                raise EngineError("it failed")
            assert len(token_ids) == job.end * SIZE + 1
            assert job.file not in self.kept
            chain = extend_chain(root, 0, np.array(token_ids, np.int32), SIZE)
            self.kept[job.file] = [block_number(chain[i * 16 : i * 16 + 16]) for i in range(job.end)]
        await asyncio.sleep(0)
        return 0


class Made:
    def __init__(self, budget: int = BUDGET, **weights: float) -> None:
        self.now_s = 0.0
        self.vllm, self.meters = Vllm(), EngineMeters()
        self.saves = VllmSaves(budget, SIZE, weights, self.vllm.run, self.meters, lambda: self.now_s)

    async def settle(self) -> None:
        while tasks := [*self.saves._under_way.values(), *self.saves._unpinning]:
            await asyncio.wait(tasks)

    def kept(self) -> list[list[int]]:
        return sorted(self.vllm.kept.values())

    def pinned(self) -> list[list[int]]:
        return sorted(list(pin.blocks) for pin in self.saves.pins.soonest_first())


def asked(tokens: int, seed: int = 0, tenant: str = "default", **fields: object) -> EngineRequest:
    ids = prompt(tokens, seed)
    made = request("r", ids, scope=SCOPE, tenant=tenant)
    return replace(made, block_hashes=extend_chain(root_of(SCOPE), 0, ids, SIZE), **fields)  # type: ignore[arg-type]


def saving(key: int, blocks: int, ttl_s: float | None = None, **fields: object) -> EngineRequest:
    return asked(blocks * SIZE + 2, key, save=Save(bytes([key]), blocks * SIZE, ttl_s), **fields)  # type: ignore[arg-type]


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def inside() -> None:
        await asyncio.wait_for(work(), 60)

    asyncio.run(inside())


Steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("save"), st.integers(0, 4), st.integers(0, 6), st.sampled_from("ab"), st.sampled_from([None, 5.0])
        ),
        st.tuples(st.just("keep"), st.integers(0, 4), st.integers(0, 6), st.sampled_from("ab"), st.just(5.0)),
        st.tuples(st.sampled_from(["later", "clear", "shares", "wait"])),
    ),
    max_size=20,
)


@given(steps=Steps, fails=st.sets(st.integers(0, 20)), shared=st.booleans())
def test_vllm_keeps_what_is_pinned_and_no_more(
    steps: list[tuple[str, int, int, str, float | None]], fails: set[int], *, shared: bool
) -> None:
    """Saves of two tenants at once, as they end, fail, are recalled and forgotten: inside the budget at any time."""

    async def work() -> None:
        made = Made(**({"a": 1.0, "b": 1.0} if shared else {}))
        saves = made.saves
        made.vllm.fails = fails
        begun: list[asyncio.Task[object]] = []
        for kind, *values in steps:
            if kind == "save":
                key, blocks, tenant, ttl_s = values
                wanted = saving(key, blocks, ttl_s, tenant=tenant)  # type: ignore[arg-type]
                begun.append(asyncio.ensure_future(saves.keep(wanted)))
            elif kind == "keep":
                key, blocks, tenant, ttl_s = values
                wanted = asked(blocks * SIZE + 1, key, tenant, keep=(KeptPrefix(blocks * SIZE, ttl_s),))  # type: ignore[arg-type]
                begun.append(asyncio.ensure_future(saves.keep(wanted)))
            elif kind == "later":
                made.now_s += 4
            elif kind == "clear":
                begun.append(asyncio.ensure_future(saves.clear()))
            elif kind == "shares":
                begun.append(asyncio.ensure_future(saves.set_shares({"a": 1.0, "c": 1.0})))
            else:
                await asyncio.sleep(0)
            assert saves.pins.blocks <= BUDGET
        await asyncio.gather(*begun)
        await made.settle()
        assert made.kept() == made.pinned()
        assert len({block for blocks in made.kept() for block in blocks}) <= BUDGET
        await saves.clear()
        assert not made.vllm.kept

    run(work)


def test_what_a_client_is_told() -> None:
    """Of each way in which a save may end, as the built-in engine tells it."""

    async def work() -> None:
        made = Made()
        save = made.saves.keep
        assert await save(asked(9)) is None
        assert await save(saving(1, 0)) == SaveResult("too_short")
        one, two = await asyncio.gather(save(saving(1, 6)), save(saving(1, 6)))
        assert (one, two) == (SaveResult("saved"), SaveResult("present"))
        assert await save(saving(1, 6)) == SaveResult("present")
        assert await save(saving(2, 11)) == SaveResult("too_large", 44, 0, 40)
        assert await save(saving(2, 5)) == SaveResult("over_budget", 20, 24, 40)
        made.vllm.fails = {len(made.vllm.jobs)}
        assert await save(saving(3, 4)) == SaveResult("failed")
        assert await save(saving(3, 4)) == SaveResult("saved")
        kept = asked(18, 1, keep=(KeptPrefix(8, 9.0), KeptPrefix(16, 9.0)))
        assert await made.saves.keep(kept) == SaveResult("saved"), "their blocks are kept already"
        assert await made.saves.keep(kept) == SaveResult("present")
        assert made.meters.saves["saved"] == 3
        assert made.meters.saves["failed"] == 1

    run(work)


def test_tenants_that_share_a_prefix_each_keep_it() -> None:
    """Neither ends with the other's pin: nobody's request renews another tenant's, nor is told that it is there."""

    async def work() -> None:
        made = Made()
        for tenant in ("a", "b"):
            kept = await made.saves.keep(asked(9, 1, tenant, keep=(KeptPrefix(8, 9.0),)))
            assert kept == SaveResult("saved")
        assert made.saves.pins.holdings() == {"a": 2, "b": 2}

    run(work)


def test_time_runs_from_the_last_read() -> None:
    """What nobody reads is let go of with the next request; what is read in part is not read."""

    async def work() -> None:
        made = Made()
        for key in (1, 2):
            await made.saves.keep(saving(key, 3, 10.0))
        made.now_s = 8
        made.saves.read(asked(14, 1).block_hashes, 3)
        made.saves.read(asked(14, 2).block_hashes, 2)
        made.now_s = 12
        made.saves.expire()
        await made.settle()
        assert made.kept() == made.pinned()
        assert len(made.kept()) == 1
        made.now_s = 19
        made.saves.expire()
        await made.settle()
        assert made.kept() == made.pinned() == []

    run(work)


def test_whoever_leaves_does_not_end_what_others_wait_for() -> None:
    """The client who asked first goes away; the save goes on, and the second one is told of it."""

    async def work() -> None:
        made = Made()
        first = asyncio.ensure_future(made.saves.keep(saving(1, 3)))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(made.saves.keep(saving(1, 3)))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == SaveResult("present")
        assert made.kept() == made.pinned() != []

    run(work)


def test_a_save_of_another_replica_is_kept_with_what_is_left_of_its_time() -> None:
    """As it was, and once."""

    async def work() -> None:
        made = Made()
        wanted = asked(12)
        prefix = HashedTokens(SCOPE, wanted.token_ids, wanted.block_hashes)
        saved = SavedPrefix(b"k", "default", 10.0, 4.0, 0)
        assert await made.saves.take_over(saved, prefix, root_of(SCOPE)) == "pinned"
        assert await made.saves.take_over(saved, prefix, root_of(SCOPE)) == "present"
        large = asked(44, 3)
        beyond = HashedTokens(SCOPE, large.token_ids, large.block_hashes)
        assert await made.saves.take_over(replace(saved, key=b"l"), beyond, root_of(SCOPE)) == "over_budget"
        made.vllm.fails = {len(made.vllm.jobs)}
        small = asked(8, 4)
        failing = HashedTokens(SCOPE, small.token_ids, small.block_hashes)
        assert await made.saves.take_over(replace(saved, key=b"m"), failing, root_of(SCOPE)) is None
        assert len(made.kept()) == 1
        made.now_s = 11
        made.saves.expire()
        await made.settle()
        assert made.kept() == []

    run(work)
