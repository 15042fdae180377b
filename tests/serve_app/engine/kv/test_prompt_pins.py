"""Prefixes that requests save are pinned once computed, reused by all in scope, and never block a request."""

import math
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from router.protocol.block_hash import PrefixScope
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.pin_keeper import MAX_BREAKPOINTS
from serve_app.engine.protocol import EngineOutput, EngineRequest, RequestTooLong, Save
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.simulated import GatedRunner, MakeSimulated
from tests.serve_app.engine.tiny import Collector, prompt, request, run_all, sample

SYSTEM = prompt(100, 1)
"""Six full blocks and four tokens."""


class Outcomes(Collector):
    def __init__(self) -> None:
        super().__init__()
        self.saves: dict[str, str | None] = {}
        self.rooms: dict[str, tuple[int, int, int]] = {}

    def __call__(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            if output.first is not None:
                save = output.first.save
                self.saves[output.request_id] = None if save is None else save.outcome
                if save is not None:
                    self.rooms[output.request_id] = (save.needed_tokens, save.held_tokens, save.budget_tokens)
        super().__call__(outputs)


def asking(name: str, question: int, **more: object) -> EngineRequest:
    return request(name, np.append(SYSTEM, prompt(20, question)), 3, **more)  # type: ignore[arg-type]


def saving(
    name: str, question: int, *, tokens: int = 100, key: bytes = b"key", ttl_s: float | None = None, **more: object
) -> EngineRequest:
    return structs.replace(asking(name, question, **more), saves=(Save(key, tokens, ttl_s),))


def keeping(name: str, question: int, *tokens: int, **more: object) -> EngineRequest:
    return structs.replace(asking(name, question, **more), saves=tuple(Save(b"", count, 300.0) for count in tokens))


def run(engine: TorchEngine, *requests: EngineRequest) -> Outcomes:
    outcomes = Outcomes()
    for item in requests:
        engine.submit(item, outcomes)
    outcomes.wait(item.request_id for item in requests)
    return outcomes


def churn(engine: TorchEngine) -> None:
    """Requests of 512 tokens each, more than the pool holds."""
    run_all(engine, [request(f"churn{i}", prompt(512, 1000 + i), 1) for i in range(12)])


def test_a_saved_prefix_survives_other_requests(make_engine: MakeEngine, reference: Reference) -> None:
    """Six blocks stay through a churn that evicts all others; answers equal uncached ones. (docs: caching)"""
    engine = make_engine(num_blocks=64, pin_budget_blocks=16)
    run(engine, asking("unsaved", 5))
    churn(engine)
    first = run(engine, saving("first", 5))
    assert (first.cached["first"], first.saves["first"]) == (0, "saved")
    churn(engine)
    later = run(engine, asking("later", 6))
    assert (later.cached["later"], later.saves["later"]) == (96, None)
    for got, name, question in ((first, "first", 5), (later, "later", 6)):
        assert got.tokens[name] == reference("qwen3", np.append(SYSTEM, prompt(20, question)), 3)
    assert sample(engine, "warmpath_pinned_blocks") == 6
    assert sample(engine, "warmpath_kv_cache_block_bytes") == engine.runner.block_bytes
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 0
    assert sample(engine, "warmpath_kv_cache_blocks") == 64


@pytest.mark.parametrize("make", [saving, lambda name, question: keeping(name, question, 40, 100)])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_many_that_keep_one_prompt_compute_and_keep_it_once(
    make_simulated: MakeSimulated, make: object, max_tokens: int
) -> None:
    """At once, later, and without an answer, each request computes only the question's own block and its rest."""
    engine = make_simulated(GatedRunner(), pin_budget_blocks=16, num_blocks=256, max_num_seqs=32, start=False)
    wanted = [make(f"r{i}", i) for i in range(20)]  # type: ignore[operator]
    wanted = [structs.replace(item, sampling=replace(item.sampling, max_tokens=max_tokens)) for item in wanted]
    outcomes = Outcomes()
    for item in wanted:
        engine.submit(item, outcomes)
    engine.start()
    outcomes.wait(item.request_id for item in wanted)
    assert sorted(outcomes.cached.values()) == [0] + [96] * 19
    assert sorted(filter(None, outcomes.saves.values())) == ["present"] * 19 + ["saved"]
    assert sample(engine, "warmpath_prompt_tokens_computed_total") == 96 + 20 * 24
    assert run(engine, wanted[0]).saves["r0"] == "present"
    assert sample(engine, "warmpath_pinned_blocks") == 6
    for outcome, count in (("saved", 1), ("present", 20)):
        assert sample(engine, "warmpath_prompt_saves_total", outcome=outcome) == count


@pytest.mark.parametrize(
    ("budget", "caching", "wanted", "outcome", "room", "pinned"),
    [
        (5, True, saving("r", 1), "too_large", (96, 0, 80), 0),
        (0, True, saving("r", 1), "too_large", (96, 0, 0), 0),
        (16, True, saving("r", 1, tokens=15), "too_short", (0, 0, 0), 0),
        (16, False, saving("r", 1), "off", (0, 0, 0), 0),
        (16, False, keeping("r", 1, 40), "off", (0, 0, 0), 0),
        (4, True, keeping("r", 1, 40, 100), "too_large", (96, 0, 64), 2),
        (4, True, keeping("r", 1, 15), None, None, 0),
    ],
)
def test_a_prefix_that_cannot_be_kept_is_a_warning(
    make_simulated: MakeSimulated,
    budget: int,
    caching: bool,
    wanted: EngineRequest,
    outcome: str | None,
    room: tuple[int, int, int] | None,
    pinned: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The request is answered as without a save, and learns the missing space; shorter prefixes are kept."""
    engine = make_simulated(GatedRunner(), pin_budget_blocks=budget, enable_prefix_caching=caching)
    got = run(engine, wanted)
    assert (got.finish["r"], got.saves["r"], len(got.tokens["r"])) == ("length", outcome, 3)
    assert got.rooms.get("r") == room
    assert sample(engine, "warmpath_pinned_blocks") == pinned
    if outcome is not None:
        assert sample(engine, "warmpath_prompt_saves_total", outcome=outcome) == 1
        assert outcome in caplog.text


def test_tenants_that_share_a_prefix_each_keep_it(make_simulated: MakeSimulated) -> None:
    """Neither ends with the other's pin: no request renews another tenant's, or learns that it exists."""
    engine = make_simulated(GatedRunner(), pin_budget_blocks=16)
    for tenant in ("a", "b"):
        assert run(engine, keeping(tenant, 5, 40, tenant=tenant)).saves[tenant] == "saved"
    assert engine.cache.pins.holdings() == {"a": 2, "b": 2}


def test_a_tenants_breakpoints_are_bounded_and_its_saves_are_not(make_simulated: MakeSimulated) -> None:
    """Each pin remembers all of its blocks, including those that earlier pins paid for."""
    engine = make_simulated(GatedRunner(), pin_budget_blocks=16)
    run(engine, saving("first", 1))
    for number in range(MAX_BREAKPOINTS - 1):
        assert engine.cache.pin(b"%d" % number, engine.cache.pins.soonest_first()[0].blocks) == "pinned"
    assert run(engine, keeping("mark", 2, 40)).saves["mark"] == "over_budget"
    assert run(engine, saving("save", 2, key=b"other")).saves["save"] == "saved"


@pytest.mark.parametrize("marked", [True, False])
def test_a_marked_prefix_survives_a_flood_of_its_own_tenant(make_simulated: MakeSimulated, marked: bool) -> None:
    """Between two reads come three times the pool of unmarked prompts; without the mark nothing is left."""
    engine = make_simulated(GatedRunner(), num_blocks=64, max_num_batched_tokens=600, pin_budget_blocks=16)
    reads = []
    for number in range(20):
        read = keeping(f"r{number}", number, 96) if marked else asking(f"r{number}", number)
        reads.append(run(engine, read).cached[read.request_id])
        run(engine, *(request(f"f{number}.{i}", prompt(200, 1000 + 20 * number + i), 1) for i in range(16)))
    assert reads[0] == 0 and set(reads[1:]) == {96 if marked else 0}


def test_other_tenants_take_effect_in_a_running_engine(make_simulated: MakeSimulated) -> None:
    """A removed tenant keeps no save, and a new one has a share of budget, pool and queue. (docs: cluster)"""
    engine = make_simulated(
        GatedRunner(), num_blocks=128, pin_budget_blocks=12, tenant_shares={"gone": 1.0, "stays": 1.0}
    )
    for tenant in ("gone", "stays"):
        scope = PrefixScope("tiny", salt=tenant.encode())
        assert run(engine, saving(tenant, 1, key=tenant.encode(), scope=scope, tenant=tenant)).saves[tenant] == "saved"
    engine.set_tenant_shares({"stays": 1.0, "new": 3.0})
    assert sample(engine, "warmpath_tenant_pinned_blocks", tenant="stays") == 6
    assert sample(engine, "warmpath_pinned_blocks") == 6
    assert engine.cache.quota.shares.fraction("new") == 0.6  # 3 of itself, of "stays" and of "gone", seen just now
    assert engine._live.waiting.shares.fraction("new") == 0.6
    with pytest.raises(ValueError, match="finite"):
        engine.set_tenant_shares({"stays": math.inf})
    assert run(engine, asking("after", 2, scope=PrefixScope("tiny", salt=b"stays"))).cached["after"] == 96


def test_a_pin_ends_with_its_ttl_or_a_reset_and_reads_renew_it(make_simulated: MakeSimulated) -> None:
    now = [0.0]
    engine = make_simulated(
        GatedRunner(), num_blocks=64, max_num_batched_tokens=600, pin_budget_blocks=16, clock=lambda: now[0]
    )
    run(engine, saving("saver", 1, ttl_s=300.0))
    for i in range(3):
        now[0] += 299
        assert run(engine, asking(f"r{i}", 10 + i)).cached[f"r{i}"] == 96
    churn(engine)
    assert sample(engine, "warmpath_pinned_blocks") == 6
    now[0] += 301
    churn(engine)
    assert sample(engine, "warmpath_pinned_blocks") == 0
    assert run(engine, saving("late", 20)).cached["late"] == 0
    assert engine.reset_prefix_cache()
    assert sample(engine, "warmpath_pinned_blocks") == 0
    assert sample(engine, "warmpath_kv_cache_blocks", state="free") == 64


def test_an_idle_engine_releases_an_expired_pin(make_simulated: MakeSimulated) -> None:
    """This needs no request."""
    engine = make_simulated(GatedRunner(), pin_budget_blocks=16)
    run(engine, saving("saver", 1, ttl_s=0.1))
    nap = threading.Event()
    for _ in range(100):
        if sample(engine, "warmpath_pinned_blocks") == 0:
            return
        nap.wait(0.05)
    pytest.fail("the pin stays")


def test_a_request_has_to_fit_beside_the_pin_budget(make_simulated: MakeSimulated) -> None:
    """Otherwise pins could keep a request waiting forever. (docs: caching)"""
    engine = make_simulated(GatedRunner(), num_blocks=20, pin_budget_blocks=6, max_num_batched_tokens=600)
    with pytest.raises(RequestTooLong, match="pool of 224"):
        engine.submit(request("long", prompt(220), 5), Collector())
    run(engine, saving("saver", 1))
    assert run(engine, request("fits", prompt(219), 5)).finish["fits"] == "length"
