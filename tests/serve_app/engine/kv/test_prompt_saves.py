"""Explicit saves in the engine: computed first, pinned, reused by everybody in scope, never in a request's way."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from router.protocol.block_hash import PrefixScope
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.lora.peft_files import describe_adapter
from serve_app.engine.protocol import EngineOutput, EngineRequest, RequestTooLong, Save
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.adapters import save_plain
from tests.serve_app.engine.core.test_engine import GatedRunner, sample, simulated
from tests.serve_app.engine.kv.test_tier_loader import settle, tiers
from tests.serve_app.engine.tiny import SCOPE, Collector, prompt, request, run_all

SYSTEM = prompt(100, 1)
"""Six full blocks and four tokens."""


class Outcomes(Collector):
    """Also remembers what became of saves."""

    def __init__(self) -> None:
        super().__init__()
        self.saves: dict[str, str | None] = {}
        self.rooms: dict[str, tuple[int, int, int]] = {}

    def __call__(self, outputs: object) -> None:
        for output in outputs:  # type: ignore[attr-defined]
            assert isinstance(output, EngineOutput)
            if output.cached_tokens is not None:
                save = output.save
                self.saves[output.request_id] = None if save is None else save.outcome
                if save is not None:
                    room = (save.needed_tokens, save.held_tokens, save.budget_tokens)
                    self.rooms[output.request_id] = room
        super().__call__(outputs)  # type: ignore[arg-type]


def saving(
    name: str, question: int, *, tokens: int = 100, key: bytes = b"key", ttl_s: float | None = None, **more: object
) -> EngineRequest:
    """A request over SYSTEM and a question of its own, that saves ``tokens`` tokens."""
    item = request(name, np.append(SYSTEM, prompt(20, question)), 3, **more)  # type: ignore[arg-type]
    return replace(item, save=Save(key, tokens, ttl_s))


def asking(name: str, question: int, **more: object) -> EngineRequest:
    return replace(saving(name, question, **more), save=None)  # type: ignore[arg-type]


def run(engine: TorchEngine, *requests: EngineRequest) -> Outcomes:
    outcomes = Outcomes()
    for item in requests:
        engine.submit(item, outcomes)
    outcomes.wait(item.request_id for item in requests)
    return outcomes


def churn(engine: TorchEngine, turns: int = 12) -> None:
    """Requests of 512 tokens each, more than the pool holds."""
    run_all(engine, [request(f"churn{i}", prompt(512, 1000 + i), 1) for i in range(turns)])


def test_the_saving_request_hits_and_later_ones_do_whatever_came_between(
    make_engine: MakeEngine, reference: Reference
) -> None:
    """Six blocks are computed first and stay through any churn; every answer is as without a cache."""
    engine = make_engine(num_blocks=64, pin_budget_blocks=16)
    first = run(engine, saving("first", 5))
    assert (first.cached["first"], first.saves["first"]) == (96, "saved")
    churn(engine)
    later = run(engine, asking("later", 6))
    assert (later.cached["later"], later.saves["later"]) == (96, None)
    assert first.tokens["first"] == reference("qwen3", np.append(SYSTEM, prompt(20, 5)), 3)
    assert later.tokens["later"] == reference("qwen3", np.append(SYSTEM, prompt(20, 6)), 3)
    assert sample(engine, "warmpath_pinned_blocks") == 6
    assert sample(engine, "warmpath_kv_cache_block_bytes") == engine._runner.block_bytes
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 0
    assert sample(engine, "warmpath_kv_cache_blocks") == 64


def test_without_a_save_the_same_churn_evicts() -> None:
    """The control: what keeps the prompt is the pin."""
    engine = simulated(GatedRunner(), num_blocks=64, max_num_batched_tokens=600, pin_budget_blocks=16)
    engine.start()
    run(engine, asking("first", 5))
    churn(engine)
    assert run(engine, asking("later", 6)).cached["later"] == 0
    run(engine, saving("saver", 7))
    churn(engine)
    assert run(engine, asking("last", 8)).cached["last"] == 96
    engine.stop()


def test_saving_again_is_a_no_op() -> None:
    engine = simulated(GatedRunner(), pin_budget_blocks=16)
    engine.start()
    run(engine, saving("one", 1))
    computed = sample(engine, "warmpath_prompt_tokens_computed_total")
    assert run(engine, saving("two", 2)).saves["two"] == "present"
    assert sample(engine, "warmpath_prompt_tokens_computed_total") == computed + 120 - 96
    assert sample(engine, "warmpath_pinned_prefixes") == 1
    assert sample(engine, "warmpath_prompt_saves_total", outcome="saved") == 1
    assert sample(engine, "warmpath_prompt_saves_total", outcome="present") == 1
    engine.stop()


def test_many_simultaneous_saves_of_one_prompt_compute_it_once() -> None:
    """The second and later ones wait for the first one's save, and hit."""
    engine = simulated(GatedRunner(), pin_budget_blocks=16, num_blocks=256, max_num_seqs=32)
    outcomes = Outcomes()
    for i in range(20):
        engine.submit(saving(f"r{i}", i), outcomes)
    engine.start()
    outcomes.wait(f"r{i}" for i in range(20))
    assert set(outcomes.cached.values()) == {96}
    assert sorted(filter(None, outcomes.saves.values())) == ["present"] * 19 + ["saved"]
    assert sample(engine, "warmpath_prompt_tokens_computed_total") == 96 + 20 * 24
    assert sample(engine, "warmpath_request_prefill_time_seconds_count") == 20, "a save is nobody's first token"
    assert sample(engine, "warmpath_requests_finished_total") == 20
    engine.stop()


@pytest.mark.parametrize(
    ("budget", "tokens", "caching", "outcome", "room"),
    [
        (5, 100, True, "too_large", (96, 0, 80)),
        (0, 100, True, "too_large", (96, 0, 0)),
        (16, 15, True, "too_short", (0, 0, 0)),
        (16, 100, False, "off", (0, 0, 0)),
    ],
)
def test_a_save_that_cannot_be_had_is_a_warning(
    budget: int,
    tokens: int,
    caching: bool,
    outcome: str,
    room: tuple[int, int, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The request is answered as if it had not asked, and told how much did not fit; a counter and the log say so."""
    engine = simulated(GatedRunner(), pin_budget_blocks=budget, enable_prefix_caching=caching)
    engine.start()
    got = run(engine, saving("r", 1, tokens=tokens))
    assert (got.finish["r"], got.saves["r"], len(got.tokens["r"])) == ("length", outcome, 3)
    assert got.rooms["r"] == room
    assert sample(engine, "warmpath_prompt_saves_total", outcome=outcome) == 1
    assert sample(engine, "warmpath_pinned_blocks") == 0
    assert outcome in caplog.text
    engine.stop()


def test_a_failed_save_is_a_warning_too() -> None:
    """Its prefill raises once; the request computes its prompt itself."""

    class FailsFirst(GatedRunner):
        def execute(self, segments: object) -> object:  # type: ignore[override]
            if not self.steps:
                self.steps.append([])
                raise RuntimeError("once")
            return super().execute(segments)  # type: ignore[arg-type]

    engine = simulated(FailsFirst(), pin_budget_blocks=16, max_num_batched_tokens=128)
    engine.start()
    got = run(engine, saving("r", 1))
    assert (got.finish["r"], got.saves["r"], got.cached["r"]) == ("length", "failed", 0)
    assert run(engine, saving("again", 2)).saves["again"] == "saved"
    engine.stop()


def test_another_scope_is_another_save(tmp_path: Path) -> None:
    """The key is the caller's, over its scope's root; here two tenants' keys differ, and nothing is shared."""
    engine = simulated(GatedRunner(), pin_budget_blocks=16)
    engine.start()
    other = PrefixScope("tiny", salt=b"other")
    run(engine, saving("mine", 1))
    theirs = run(engine, saving("theirs", 1, scope=other, key=b"their key", tenant="other"))
    assert (theirs.saves["theirs"], theirs.cached["theirs"]) == ("saved", 96)
    assert sample(engine, "warmpath_pinned_blocks") == 12
    assert sample(engine, "warmpath_tenant_kv_cache_blocks", tenant="other") >= 6
    spec = describe_adapter("adapter", save_plain(tmp_path))
    engine.load_adapter(spec)
    lora = PrefixScope(SCOPE.model, lora=spec.key, salt=SCOPE.salt)
    assert run(engine, asking("lora", 1, scope=lora)).cached["lora"] == 0
    engine.stop()


def test_one_tenant_cannot_keep_the_whole_budget() -> None:
    """It pins twice its share while nobody else saves; another's save within theirs takes the second one back.

    docs/caching.md
    """
    shares = {"greedy": 1.0, "other": 1.0}
    engine = simulated(GatedRunner(), num_blocks=128, pin_budget_blocks=12, tenant_shares=shares)
    engine.start()

    rooms: list[tuple[int, int, int]] = []

    def saved(tenant: str, salt: str) -> str | None:
        scope = PrefixScope("tiny", salt=salt.encode())
        outcomes = run(engine, saving(salt, 1, key=salt.encode(), scope=scope, tenant=tenant))
        rooms.append(outcomes.rooms[salt])
        return outcomes.saves[salt]

    assert [saved("greedy", salt) for salt in ("1", "2", "3")] == ["saved", "saved", "over_budget"]
    assert rooms[-1] == (96, 192, 96), "its own, and its share; nothing of other tenants'"
    assert saved("other", "4") == "saved"
    assert [saved("greedy", "3"), saved("other", "5")] == ["over_budget", "over_budget"]
    assert rooms[-2:] == [(96, 96, 96), (96, 96, 96)]
    for tenant in shares:
        assert sample(engine, "warmpath_tenant_pinned_blocks", tenant=tenant) == 6
    assert sample(engine, "warmpath_pins_recalled_total") == 1
    engine.stop()


def test_other_tenants_take_effect_in_a_running_engine() -> None:
    """Who is gone keeps no save, and who is new has a share of the budget, of the pool and of the line.

    docs/cluster.md
    """
    engine = simulated(
        GatedRunner(), num_blocks=128, pin_budget_blocks=12, max_waiting_requests=16,
        tenant_shares={"gone": 1.0, "stays": 1.0},
    )  # fmt: skip
    engine.start()
    for tenant in ("gone", "stays"):
        scope = PrefixScope("tiny", salt=tenant.encode())
        assert run(engine, saving(tenant, 1, key=tenant.encode(), scope=scope, tenant=tenant)).saves[tenant] == "saved"
    engine.set_tenant_shares({"stays": 1.0, "new": 3.0})
    assert sample(engine, "warmpath_tenant_pinned_blocks", tenant="stays") == 6
    assert sample(engine, "warmpath_pinned_blocks") == 6
    assert engine._cache.quota.fraction("new") == 0.6  # 3 of itself, of "stays" and of "gone", seen just now
    with pytest.raises(ValueError, match="finite"):
        engine.set_tenant_shares({"stays": math.inf})
    assert run(engine, asking("after", 2, scope=PrefixScope("tiny", salt=b"stays"))).cached["after"] == 96
    engine.stop()


def test_only_the_common_tokens_are_reused() -> None:
    """Another request has the saved prompt's text but not all its ids: the last ones merged with what follows."""
    engine = simulated(GatedRunner(), pin_budget_blocks=16)
    engine.start()
    run(engine, saving("saver", 1))
    merged = SYSTEM.copy()
    merged[95] = (merged[95] + 1) % 200
    assert run(engine, request("merged", np.append(merged, prompt(20, 2)), 1)).cached["merged"] == 80
    engine.stop()


def test_a_save_ends_with_its_ttl_and_reads_renew_it() -> None:
    now = [0.0]
    settings = EngineSettings(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=600, pin_budget_blocks=16)
    runner = SimulatedRunner(CostModel(prefill_tokens_per_s=1e9, decode_base_s=0.0), sleep=lambda _: None)
    engine = TorchEngine(runner, settings, lambda _: None, clock=lambda: now[0])
    engine.start()
    run(engine, saving("saver", 1, ttl_s=300.0))
    for i in range(3):
        now[0] += 299
        assert run(engine, asking(f"r{i}", 10 + i)).cached[f"r{i}"] == 96
    churn(engine)
    assert sample(engine, "warmpath_pinned_blocks") == 6
    now[0] += 301
    churn(engine)
    assert sample(engine, "warmpath_pinned_blocks") == 0
    assert run(engine, asking("late", 20)).cached["late"] == 0
    engine.stop()


def test_an_idle_engine_releases_a_pin_whose_time_is_over() -> None:
    """Nobody has to send a request for it."""
    engine = simulated(GatedRunner(), pin_budget_blocks=16)
    engine.start()
    run(engine, saving("saver", 1, ttl_s=0.1))
    assert sample(engine, "warmpath_pinned_blocks") == 6
    gone = threading.Event()
    for _ in range(100):
        if sample(engine, "warmpath_pinned_blocks") == 0:
            gone.set()
            break
        gone.wait(0.05)
    assert gone.is_set()
    engine.stop()


def test_a_reset_releases_saves() -> None:
    engine = simulated(GatedRunner(), pin_budget_blocks=16)
    engine.start()
    run(engine, saving("saver", 1))
    assert engine.reset_prefix_cache()
    assert sample(engine, "warmpath_pinned_blocks") == 0
    assert sample(engine, "warmpath_kv_cache_blocks", state="free") == 64
    assert run(engine, saving("again", 1)).saves["again"] == "saved"
    engine.stop()


def test_a_cancelled_request_takes_its_save_along_unless_another_waits_for_it() -> None:
    """Cancelled while its save is computed: the save ends too; with a second request waiting, it goes on."""
    for others, pinned in ((0, 0), (1, 6)):
        runner = GatedRunner(gated=True)
        engine = simulated(runner, pin_budget_blocks=16)
        engine.start()
        outcomes = Outcomes()
        engine.submit(saving("gone", 1), outcomes)
        for i in range(others):
            engine.submit(saving(f"other{i}", 2), outcomes)
        assert runner.entered.wait(10)
        engine.cancel("gone")
        runner.gate.set()
        outcomes.wait(["gone", *(f"other{i}" for i in range(others))])
        run_all(engine, [request("after", prompt(5), 1)])
        assert outcomes.finish["gone"] == "cancelled"
        assert sample(engine, "warmpath_pinned_blocks") == pinned
        assert sample(engine, "warmpath_num_requests_waiting") == 0
        assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 0
        engine.stop()


def test_a_request_has_to_fit_beside_the_pin_budget() -> None:
    """So that pins never keep a request waiting for ever: what fits is answered although the budget is used up.

    docs/caching.md
    """
    engine = simulated(GatedRunner(), num_blocks=20, pin_budget_blocks=6, max_num_batched_tokens=600)
    with pytest.raises(RequestTooLong, match="pool of 224"):
        engine.submit(request("long", prompt(220), 5), Collector())
    engine.start()
    run(engine, saving("saver", 1))
    assert run(engine, request("fits", prompt(219), 5)).finish["fits"] == "length"
    engine.stop()


def test_a_save_without_an_end_outlives_the_engine_on_its_disk(
    tmp_path: Path, make_engine: MakeEngine, reference: Reference
) -> None:
    """It is filed as saved at once, not when the engine stops; one with a TTL until then. The next one finds both."""
    settings = {"tiers": tiers("disk", tmp_path), "num_blocks": 64, "pin_budget_blocks": 16}
    first = make_engine(**settings)
    run(first, saving("forever", 1))
    settle(first)
    other = PrefixScope("tiny", salt=b"other")
    run(first, saving("a while", 1, key=b"while", ttl_s=300.0, scope=other))
    settle(first)
    assert first._tier_loader is not None
    assert first._tier_loader.tiers.disk is not None
    ends = [filed.saved_until_s for filed in first._tier_loader.tiers.disk.tier.index]
    assert ends.count(math.inf) == 6
    assert sum(1 for end_s in ends if end_s is not None and end_s <= time.time() + 300.0) == 6
    first.stop()
    second = make_engine(**settings)
    later = run(second, asking("later", 6), asking("other", 6, scope=other))
    assert later.cached == {"later": 96, "other": 96}
    assert later.tokens["later"] == reference("qwen3", np.append(SYSTEM, prompt(20, 6)), 3)


def test_blocks_from_below_are_on_the_account_of_who_asked(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(tiers=tiers("host", tmp_path), num_blocks=32, max_num_batched_tokens=600)
    run(engine, asking("first", 1, tenant="acme"))
    run_all(engine, [request("churn", prompt(500, 9), 1, tenant="churn")])
    assert sample(engine, "warmpath_tenant_kv_cache_blocks", tenant="acme") == 0
    assert run(engine, asking("again", 2, tenant="acme")).cached["again"] == 96
    assert sample(engine, "warmpath_tenant_kv_cache_blocks", tenant="acme") >= 7
    assert sample(engine, "warmpath_tenant_kv_cache_blocks", tenant="default") == 0
