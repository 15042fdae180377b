"""Prefixes that a request computes itself and asks to keep: pinned after it, for their time, within the budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from serve_app.engine.protocol import EngineRequest, KeptPrefix
from tests.serve_app.engine.core.test_engine import GatedRunner, sample, simulated
from tests.serve_app.engine.kv.test_prompt_saves import SYSTEM, asking, churn, run
from tests.serve_app.engine.tiny import prompt, request


def keeping(name: str, question: int, *tokens: int, ttl_s: float = 300.0) -> EngineRequest:
    """A request over SYSTEM and a question of its own, that keeps its first tokens."""
    item = request(name, np.append(SYSTEM, prompt(20, question)), 3)
    return replace(item, keep=tuple(KeptPrefix(each, ttl_s) for each in tokens))


def test_what_is_kept_survives_churn_and_was_not_read() -> None:
    """The request computes it and reads nothing; the next one reads all of its full blocks. (docs/caching.md)"""
    engine = simulated(GatedRunner(), num_blocks=64, max_num_batched_tokens=600, pin_budget_blocks=16)
    engine.start()
    first = run(engine, keeping("first", 5, 40, 100))
    assert (first.cached["first"], first.saves["first"]) == (0, "saved")
    assert sample(engine, "warmpath_pinned_blocks") == 6
    churn(engine)
    later = run(engine, keeping("later", 6, 40, 100))
    assert (later.cached["later"], later.saves["later"]) == (96, "present")
    engine.stop()


def test_tenants_that_share_a_prefix_each_keep_it() -> None:
    """Neither ends with the other's pin: nobody's request renews another tenant's, nor is told that it is there."""
    engine = simulated(GatedRunner(), pin_budget_blocks=16)
    engine.start()
    for tenant in ("a", "b"):
        done = run(engine, replace(keeping(tenant, 5, 40), tenant=tenant))
        assert done.saves[tenant] == "saved"
    assert engine._cache.pins.holdings() == {"a": 2, "b": 2}
    engine.stop()


def test_what_does_not_fit_is_cached_and_told() -> None:
    """Shorter prefixes are kept as far as the budget goes; the answer comes anyway."""
    engine = simulated(GatedRunner(), pin_budget_blocks=4)
    engine.start()
    first = run(engine, keeping("first", 5, 40, 100))
    assert (first.saves["first"], first.rooms["first"][0]) == ("too_large", 96)
    assert sample(engine, "warmpath_pinned_blocks") == 2
    assert run(engine, asking("later", 6)).cached["later"] == 96
    engine.stop()


def test_nothing_is_kept_of_less_than_a_block() -> None:
    engine = simulated(GatedRunner(), pin_budget_blocks=4)
    engine.start()
    assert run(engine, keeping("first", 5, 15)).saves["first"] is None
    assert sample(engine, "warmpath_pinned_blocks") == 0
    engine.stop()


def test_a_prompt_is_computed_and_kept_without_an_answer() -> None:
    """max_tokens 0: no token, and the KV is there for whoever comes next."""
    engine = simulated(GatedRunner(), pin_budget_blocks=16)
    engine.start()
    item = keeping("warm", 5, 100)
    warm = run(engine, replace(item, sampling=replace(item.sampling, max_tokens=0)))
    assert (warm.tokens.get("warm", []), warm.saves["warm"]) == ([], "saved")
    assert run(engine, asking("later", 6)).cached["later"] == 96
    engine.stop()
