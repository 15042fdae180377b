"""What those that wait are about to use is not what makes room for others."""

from tests.serve_app.engine.scheduling.bench import Bench
from tests.serve_app.engine.tiny import prompt


def test_a_start_evicts_what_nobody_waits_for_first() -> None:
    """Two prompts are cached, the older of which a waiting request continues."""
    bench = Bench(num_blocks=24, max_num_seqs=1, max_num_batched_tokens=256)
    for name, seed in (("old", 1), ("young", 2)):
        bench.add(name, prompt(128, seed), 1)
        bench.step()
    bench.add("cold", prompt(160, 3), 1, arrival_s=-100.0)  # has waited long: it is overtaken no more
    again = bench.add("again", prompt(128, 1), 1)
    bench.step()
    assert "cold" in bench.started_s and "again" not in bench.started_s
    while "again" not in bench.started_s:
        bench.step()
    assert again.cached_tokens >= 112
