"""Agents' sessions: their form in the trace, and their closed loop."""

from dataclasses import replace
from statistics import fmean

import pytest

from benchmarks.common.agent_sessions import AgentSession, AgentStream, AgentTurn, read_sessions, requests_of
from benchmarks.simulation.agents import CONTENDERS, Agents, SimulatedLoad, make_load, make_long_and_short
from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.settings import ClusterSettings, prepare
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS


@pytest.fixture(scope="module")
def sessions() -> list[AgentSession]:
    return read_sessions()


def test_a_turn_begins_as_the_one_that_it_continues(sessions: list[AgentSession]) -> None:
    assert len(sessions) == 200
    turns = 0
    for session in sessions:
        for stream in session.streams:
            for before, turn in zip(stream.turns, stream.turns[1:], strict=False):
                shared = turn.known_tokens // TRACE_BLOCK_TOKENS
                assert len(turn.hash_ids) == -(-turn.prompt_tokens // TRACE_BLOCK_TOKENS)
                assert len(set(turn.hash_ids)) == len(turn.hash_ids)
                turns += turn.hash_ids[:shared] == before.hash_ids[:shared]
    assert turns > 12_000, "nearly all turns continue the previous one"


def test_a_session_alone_takes_the_time_of_an_unlimited_cache(sessions: list[AgentSession]) -> None:
    settings = ClusterSettings(replicas=1, blocks=4000, decode_weight=0.0)
    load = make_load(sessions[:1], settings, running=1.0, tenants=1)
    row = Agents(Cluster(settings, CONTENDERS["warmpath"]), load).run()
    assert row["requests"] == len(load.requests)
    assert row["job_time_mean"] == pytest.approx(1.0, abs=0.01)


def test_sessions_that_do_not_fit_take_longer(sessions: list[AgentSession]) -> None:
    settings = ClusterSettings(replicas=1, blocks=1500)
    load = make_load(sessions[:6], settings, running=4.0, tenants=2)
    ours, first_come = (
        Agents(Cluster(settings, CONTENDERS[name]), load).run()["job_time_mean"] for name in ("warmpath", "first_come")
    )
    assert 1.0 < ours <= first_come


def test_short_sessions_pass_long_ones_of_their_tenant() -> None:
    """In half of the pool that they need, they take half as long as first come, first served, at the most."""
    settings = ClusterSettings(replicas=1)
    load = make_long_and_short(settings, long=4, short=8)
    settings = replace(settings, blocks=load.working_set_blocks // 2)
    short = []
    for name in ("warmpath", "first_come"):
        agents = Agents(Cluster(settings, CONTENDERS[name]), load)
        agents.run()
        short.append(fmean(agents.slowdowns()[4:]))
    assert 1.0 < short[0] < 0.5 * short[1]


def test_an_oracle_evicts_what_returns_last() -> None:
    """Of two prompts of 4 blocks the older one returns soon, the younger one late; a third one takes their space."""

    def session(first: int, *pauses_s: float) -> AgentSession:
        hashes = tuple(range(first, first + 4))
        turns = [AgentTurn(4 * TRACE_BLOCK_TOKENS, 1, pause_s, hashes, 0) for pause_s in (0.0, *pauses_s)]
        return AgentSession((AgentStream(tuple(turns)),), 0)

    chosen = [session(0, 100.0), session(10, 1000.0), session(20)]
    traced = requests_of(chosen, 1)
    requests = dict(zip(traced, prepare(list(traced.values())), strict=True))
    load = SimulatedLoad(chosen, [0.0, 10.0, 50.0], requests, [1.0] * 3, 12)
    settings = ClusterSettings(replicas=1, blocks=10)
    lru, oracle = (
        Agents(Cluster(settings, contender), load).run()["hit_rate"] * 20
        for contender in (CONTENDERS["no_admission"], replace(CONTENDERS["oracle"], admission=False))
    )
    assert (lru, oracle) == (2, 4), "blocks of 20; the last one of a prompt is always computed"
