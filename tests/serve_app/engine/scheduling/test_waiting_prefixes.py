"""Prefixes that waiting requests will use are evicted last."""

from tests.serve_app.engine.scheduling.bench import Bench
from tests.serve_app.engine.tiny import prompt


def test_a_start_first_evicts_blocks_that_nobody_waits_for() -> None:
    """Two prompts are cached, and a waiting request continues the older one."""
    bench = Bench(num_blocks=24, max_num_seqs=1, max_num_batched_tokens=256)
    for name, seed in (("old", 1), ("young", 2)):
        bench.add(name, prompt(128, seed), 1)
        bench.step()
    bench.add("cold", prompt(160, 3), 1, arrival_s=-100.0)  # has waited so long that it is no longer overtaken
    again = bench.add("again", prompt(128, 1), 1)
    bench.step()
    assert "cold" in bench.started_s and "again" not in bench.started_s
    while "again" not in bench.started_s:
        bench.step()
    assert again.cached_tokens >= 112
