"""Rules of the scheduler, on its own: order, ageing, budget, admission."""

import numpy as np
import pytest

from tests.serve_app.engine.scheduling.bench import Bench
from tests.serve_app.engine.tiny import prompt


def test_decodes_come_first_then_the_least_uncached_work() -> None:
    bench = Bench()
    bench.add("old", prompt(20, 1))
    assert bench.step() == [("old", 20)]
    bench.add("long", prompt(100, 2))
    bench.add("short", prompt(30, 3))
    assert bench.step() == [("old", 1), ("short", 30), ("long", 33)]


@pytest.mark.parametrize(("rate", "tokens"), [(0.0, 2048), (50.0, 512), (8000.0, 800), (1e6, 2048)])
def test_a_step_prefills_for_a_tenth_of_a_second(rate: float, tokens: int) -> None:
    """A newcomer waits for the step in progress, so a slow engine's steps are short. (docs: routing)"""
    bench = Bench(num_blocks=512, max_num_batched_tokens=2048)
    bench.add("old", prompt(20, 1))
    bench.step()
    bench.add("long", prompt(6000, 2))
    assert bench.step(rate) == [("old", 1), ("long", min(tokens, 2047))]


def test_cached_tokens_are_no_work() -> None:
    """A long prompt with a cached prefix goes before a shorter cold one."""
    bench = Bench(max_num_batched_tokens=20)
    bench.add("warm", prompt(16), 1)
    bench.step()
    bench.add("cold", prompt(15, 5))
    bench.add("hit", np.append(prompt(16), prompt(4, 6)))
    assert bench.step() == [("hit", 4), ("cold", 15)]


@pytest.mark.parametrize("tenants", ["aaa", "abc"])
def test_nobody_overtakes_a_request_waiting_for_blocks(tenants: str) -> None:
    """Nine blocks: 5 + 5 do not fit together; a small later request of any tenant does not take the freed blocks."""
    bench = Bench(*sorted(set(tenants)), num_blocks=9)
    first = bench.add("a", prompt(16, 1), 81, tenant=tenants[0])
    assert bench.step() == [("a", 16)]
    bench.add("b", prompt(16, 2), 65, tenant=tenants[1], arrival_s=0.0)
    bench.add("late", prompt(16, 3), 1, tenant=tenants[2], arrival_s=1.0)
    assert bench.step() == [("a", 1)]
    bench.scheduler.remove(first)
    assert bench.step() == [("b", 16), ("late", 16)]


def test_blocks_that_a_request_would_hit_are_not_counted_as_space_for_it() -> None:
    """Eight cached blocks, one free, one reserved: a hit on the eight that needs one more must wait."""
    bench = Bench(num_blocks=10, max_num_batched_tokens=256)
    bench.add("warm", prompt(128), 1)
    bench.step()
    first = bench.add("a", prompt(16, 1), 17)
    assert bench.step() == [("a", 16)]
    bench.add("hit", np.append(prompt(128), [1, 2]), 4)
    assert bench.step() == [("a", 1)]
    bench.scheduler.remove(first)
    assert bench.step() == [("hit", 2)]


def test_nobody_waits_for_unstored_blocks() -> None:
    """A request that stores computes the same prompt beside it."""
    bench = Bench()
    bench.add("passing", np.append(prompt(160), 1), store_kv=False)
    assert bench.step() == [("passing", 64)]
    bench.add("storing", np.append(prompt(160), 1))
    assert bench.step() == [("passing", 64)]
    assert bench.step() == [("passing", 33), ("storing", 31)]
