"""RoutingCore: one step decides and reserves; every count and every state is JSON-able and right."""

from __future__ import annotations

from random import Random
from threading import Thread

import pytest
from msgspec import structs

from router.core import RoutingCore
from router.load.load_table import RESERVATION_TTL_S
from router.protocol.events import BlocksRemoved, BlocksStored, LoadReport, StatsReport
from router.protocol.request import Decision, RoutedRequest
from router.serve.core_registry import core_for
from router.settings import PolicySettings, RouterSettings

CHAIN = Random(0).randbytes(16 * 10)
IDLE = LoadReport(0, 0, 0, 8, 16, 1000.0)


class Clock:
    """Time that moves when told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def core_of(*names: str, clock: Clock | None = None, **settings: object) -> RoutingCore:
    made = RoutingCore("me", RouterSettings.from_json(settings), clock=clock or Clock(), rng=Random(0))
    made.update_replicas(names)
    for name in names:
        made.apply(name, [IDLE])
    return made


def ask(number: int = 0, chain: bytes = CHAIN, tokens: int = 165, key: bytes = b"k" * 16) -> RoutedRequest:
    return RoutedRequest(f"q{number}", chain, tokens, key)


def decided(core: RoutingCore, request: RoutedRequest) -> Decision:
    decision = core.decide(request)
    assert decision is not None
    return decision


def test_decision_predicts_and_counts() -> None:
    """The holder is chosen; best-available, selected and delivered tokens are counted under the reason."""
    core = core_of("a", "b", "c")
    core.apply("b", [BlocksStored(CHAIN)])
    decision = decided(core, ask())
    assert (decision.replica_id, decision.reason) == ("b", "cached")
    assert (decision.best_cached_tokens, decision.selected_cached_tokens) == (160, 160)
    assert decision.estimated_ttft_s == pytest.approx(0.005)
    core.record_delivered(decision, 144, 0.02)
    tokens = core.counters.by_policy["estimated_ttft"].by_reason["cached"]
    assert (tokens.decisions, tokens.prompt_tokens, tokens.best_cached_tokens) == (1, 165, 160)
    assert (tokens.selected_cached_tokens, tokens.delivered_cached_tokens) == (160, 144)
    assert core.counters.decisions_by_replica == {"b": 1}
    assert core.counters.decision_s.count == 1


def test_who_gets_a_request() -> None:
    """The last prompt token is never cached; a full or blocked replica gets nothing, an avoided one if all else is."""
    core = core_of("a", "b")
    core.apply("a", [BlocksStored(CHAIN)])
    for tokens, cached in ((160, 144), (161, 160), (0, 0)):
        core.release(decision := decided(core, ask(tokens=tokens)))
        assert decision.best_cached_tokens == cached
    failed = RoutedRequest("q", CHAIN, 165, b"k", avoid=("a",))
    core.release(decision := decided(core, failed))
    assert decision.replica_id == "b"
    core.release(decision := decided(core, structs.replace(failed, avoid=("a", "b"))))
    assert decision.replica_id == "a"
    core.apply("a", [LoadReport(0, 8, 16, 8, 16, 0.0)])
    assert core.decide(ask(), blocked=["b"]) is None
    assert (core.counters.all_full, core.state()["open_reservations"]) == (1, 0)
    assert core.decide_unkeyed(["b"]) is None
    assert core.decide_unkeyed() == "b"
    assert RoutingCore("x").decide(ask()) is None


def test_reservation_spreads_simultaneous_unrelated_prompts() -> None:
    """Without any report in between, eight different cold prompts go to eight replicas."""
    core = core_of(*"abcdefgh")
    chosen = {
        decided(core, ask(n, Random(n + 1).randbytes(160), 165, Random(n).randbytes(16))).replica_id for n in range(8)
    }
    assert len(chosen) == 8


def test_simultaneous_users_of_one_cold_prompt_follow_the_first() -> None:
    """A herd on one cold prompt stays together until its own suffixes outweigh the prefix. (docs/routing.md)"""
    core = core_of(*"abcdefgh")
    decisions = [decided(core, ask(n, CHAIN * 1 + Random(n).randbytes(16), 181)) for n in range(5)]
    assert len({decision.replica_id for decision in decisions}) == 1
    assert [decision.reason for decision in decisions] == ["cold"] + ["in_flight"] * 4
    for decision in decisions:
        core.release(decision)
    assert len(core._known.pending) == 0
    assert core.state()["open_reservations"] == 0


def test_release_is_idempotent_and_ttl_is_the_backstop() -> None:
    """Released twice or never, a reservation ends once."""
    clock = Clock()
    core = core_of("a", clock=clock)
    decision = decided(core, ask(1))
    core.release(decision)
    core.release(decision)
    decided(core, ask(2))
    assert core.loads.queue_ahead("a") > 0
    clock.now_s = RESERVATION_TTL_S + 1.0
    core.release(decided(core, ask(3)))
    assert core.loads.queue_ahead("a") == core.loads.open_reservations == 0
    assert len(core._known.pending) == 0


def test_update_replicas_reports_differences() -> None:
    """The same set again changes nothing; a replica that left is forgotten everywhere."""
    core = core_of("a", "b")
    core.apply("a", [BlocksStored(CHAIN), StatsReport((("x", (), 1.0),))])
    decision = decided(core, ask())
    assert core.update_replicas(["b", "a"]) == ((), ())
    assert core.update_replicas(["b", "c"]) == (("c",), ("a",))
    assert core.loads.open_reservations == 0
    assert core.stats() == {}
    core.release(decision)
    core.apply("a", [BlocksStored(CHAIN), IDLE])
    assert decided(core, ask()).best_cached_tokens == 0
    core.drop_replica("b")
    assert core.replica_ids == ("c",)


def test_settings_from_json_and_reconfiguration() -> None:
    """Settings come from JSON; unknown policies are refused; another block size empties the directory."""
    settings = RouterSettings.from_json({"policy": "lmetric", "scoring": {"max_holders": 7}})
    assert settings.scoring == PolicySettings(max_holders=7)
    with pytest.raises(ValueError, match="unknown routing policy"):
        RouterSettings(policy="best")
    with pytest.raises(TypeError):
        RouterSettings.from_json({"polcy": "lmetric"})
    core = core_of("a")
    core.apply("a", [BlocksStored(CHAIN)])
    decided(core, ask(1))
    core.configure(RouterSettings(policy="round_robin"))
    decided(core, ask(2))
    assert [shown["decisions"] for shown in core.state()["regret"].values()] == [1, 1], "each under its own policy"
    assert core.directory.num_blocks == 10
    core.configure(RouterSettings(block_size=32))
    assert core.directory.num_blocks == 0
    core.apply("a", [BlocksStored(CHAIN)])
    assert decided(core, ask(tokens=325)).selected_cached_tokens == 320


def test_core_for_is_one_per_key_and_takes_settings() -> None:
    """Threads that ask at once get one core; a Serve router's settings reach the core its ingress made first."""
    found: list[RoutingCore] = []
    threads = [Thread(target=lambda: found.append(core_for("test#one"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(core) for core in found}) == 1
    core = core_for("test#one", RouterSettings(policy="lmetric"))
    assert core is found[0]
    assert core.settings.policy == "lmetric"
    assert core_for("test#one").settings.policy == "lmetric"
    core.configure(RouterSettings(policy="sglang"))
    core_for("test#one", RouterSettings(policy="lmetric"))  # a router that comes to life late
    assert core.settings.policy == "sglang"
    core_for("test#one", RouterSettings(policy="round_robin"))
    assert core.settings.policy == "round_robin"
    assert core_for("test#two").router_id != core.router_id


def test_threads_may_share_a_core() -> None:
    """Decisions, releases and events from several threads leave no reservation behind."""
    core = core_of("a", "b", "c")
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in range(300):
                decision = decided(core, ask(seed * 1000 + number))
                core.apply("a", [BlocksStored(Random(number).randbytes(160)), IDLE])
                core.release(decision)
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert core.state()["open_reservations"] == 0
    assert core.counters.decision_s.count == 1200


def test_regret_says_what_was_not_selected_and_why_less_was_delivered() -> None:
    """Tokens not selected, gone by then, not used although held, and beyond the prediction are told apart.

    docs/routing.md
    """
    core = core_of("a", "b")
    core.apply("b", [BlocksStored(CHAIN)])
    busy = LoadReport(90_000, 0, 1, 8, 16, 1000.0, committed_prefill_tokens=90_000)
    for number, delivered in enumerate((160, 100, 170)):
        decision = decided(core, ask(number))
        core.release(decision)
        core.record_delivered(decision, delivered, 0.01, CHAIN)
    decision = decided(core, ask(3))
    core.apply("b", [BlocksRemoved(CHAIN[16 * 6 :])])
    core.record_delivered(decision, 90, 0.01, CHAIN)
    core.release(decision)
    tokens = core.counters.by_policy["estimated_ttft"].by_reason["cached"]
    assert (tokens.evicted_tokens, tokens.unused_tokens, tokens.unpredicted_tokens) == (64, 60 + 6, 10)
    assert tokens.not_selected_tokens == 0
    core.apply("b", [BlocksStored(CHAIN), busy])
    assert decided(core, ask(4)).reason == "load_spill"
    spilled = core.state()["regret"]["estimated_ttft"]["by_reason"]["load_spill"]
    assert (spilled["best_cached_tokens"], spilled["selected_cached_tokens"]) == (160, 0)
    assert spilled["not_selected_tokens"] == 160


@pytest.mark.parametrize("policy", ["estimated_ttft", "round_robin"])
def test_estimates_are_compared_with_what_came(policy: str) -> None:
    """Under every policy estimated and actual time to first token stand side by side, lateness and earliness apart.

    docs/routing.md
    """
    core = core_of("a", policy=policy)
    for number, ttft_s in enumerate((0.33, 0.065)):
        decision = decided(core, ask(number))
        core.release(decision)
        assert decision.estimated_ttft_s == pytest.approx(0.165)
        core.record_delivered(decision, 0, ttft_s, CHAIN)
    shown = core.state()["regret"][policy]["ttft"]
    assert shown == {"requests": 2, "estimated_s": 0.33, "actual_s": 0.395, "late_s": 0.165, "early_s": 0.1}
    ratio = core.counters.by_policy[policy].estimates.ratio
    assert ratio.total == pytest.approx(0.395 / 0.165)
