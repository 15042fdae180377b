"""AgentX in virtual time: what its figures must be where they are known."""

import json

import pytest

from benchmarks.common.agent_sessions import AgentSession, AgentStream, AgentTurn
from benchmarks.common.report import BenchmarkError
from benchmarks.end_to_end import agentx
from benchmarks.simulation.agents import CONTENDERS
from benchmarks.simulation.agentx import AgentX
from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.settings import ClusterSettings, SimulatedRequest

SETTINGS = ClusterSettings(replicas=1, blocks=2000, prefill_tokens_per_s=1000.0, decode_token_s=0.1, decode_weight=0.0)


def stream(blocks: list[int], first: int, after: int = -1) -> AgentStream:
    """Return turns of so many blocks, 5 s apart; each begins as the one before."""
    turns = [AgentTurn(512 * many + 1, 10, 5.0, tuple(range(first, first + many + 1)), 0) for many in blocks]
    return AgentStream(tuple(turns), after, delay_s=1.0)


def test_a_pool_that_holds_all_delivers_what_is_possible_and_plays_share_nothing() -> None:
    """One session at once: 4 turns and 2 of a child, again and again, each play with a cold first turn."""
    session = AgentSession((stream([1, 2, 3, 4], 0), stream([1, 2], 100, after=3)), 0)
    loop = AgentX(Cluster(SETTINGS, CONTENDERS["warmpath"]), [session], at_once=1, duration_s=500.0)
    row = loop.run()
    assert row["of_theoretical"] == 1.0
    assert row["theoretical"] < 7 / 13, "of 13 blocks in a play, 6 and 1 were there before, if it begins at its first"
    assert row["theoretical"] > 0.9 * 7 / 13
    assert row["ttft_ms_p50"] == pytest.approx(513.0), "one block and a token more in each turn"
    assert row["answer_ms_mean"] == pytest.approx(row["ttft_ms_mean"] + 1000.0)


def test_no_more_sessions_run_than_asked_for_and_none_begins_after_the_end() -> None:
    sessions = [AgentSession((stream([3, 4, 5], 10 * first),), 0) for first in range(5)]
    cluster = Cluster(SETTINGS, CONTENDERS["warmpath"])
    send, sent_s, most = cluster.send, [], 0

    def counted(request: SimulatedRequest) -> None:
        nonlocal most
        sent_s.append(cluster.clock.now_s)
        send(request)
        [replica] = cluster.replicas.values()
        most = max(most, sum(bool(one.running) for one in replica.sessions.all("")))

    cluster.send = counted  # type: ignore[method-assign]
    row = AgentX(cluster, sessions, at_once=3, duration_s=60.0).run()
    assert row["requests"] == len(sent_s) > 15 and max(sent_s) < 60.0
    assert 2 <= most <= 3


def test_the_command_tells_each_run_and_our_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--virtual-runs 2 --duration-s 30 --kv-tokens 300000 --systems warmpath,ray_prefix,smg"
    agentx.run(flags.split())
    captured = capsys.readouterr()
    results = json.loads(captured.out)["results"]
    assert [len(results[name]["runs"]) for name in ("warmpath", "ray_prefix")] == [2, 2]
    assert results["smg"] == {"not_measured": "there is no smg in virtual time"}
    assert "Medians of 2 runs in virtual time. Our mean TTFT / ray_prefix's" in captured.err
    with pytest.raises(BenchmarkError, match="leave --engine out"):
        agentx.run([*flags.split(), "--engine", "torch"])
