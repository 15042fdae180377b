"""Agents' sessions over HTTP: the choice of sessions, their shared prompt prefixes, and the order of their turns."""

import argparse
import asyncio
from pathlib import Path

import pytest

from benchmarks.common.agent_sessions import AgentSession, AgentStream, AgentTurn, job_s, read_sessions
from benchmarks.common.report import BenchmarkError
from benchmarks.common.trace_text import TraceText
from benchmarks.end_to_end.agents import (
    TurnIndex,
    compared,
    drawn,
    make_load,
    play,
    pool_blocks,
    run,
    sentence,
)
from serve_app.checkpoints.sources import resolve_model
from tests.harness.eventually import let_others_run


@pytest.fixture(scope="module")
def trace() -> list[AgentSession]:
    return read_sessions()


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model("demo")


def options(*flags: str) -> argparse.Namespace:
    return run.parse(["--model", "demo", "--sessions", "6", *flags])


def session(pauses_s: list[float], child_after: int = -1, child_pauses_s: tuple[float, ...] = ()) -> AgentSession:
    def turns(seconds: list[float]) -> tuple[AgentTurn, ...]:
        return tuple(AgentTurn(512, 1, pause_s, (number,), 0) for number, pause_s in enumerate(seconds))

    children = (AgentStream(turns(list(child_pauses_s)), child_after, 5.0),) if child_pauses_s else ()
    return AgentSession((AgentStream(turns(pauses_s)), *children), 0)


def test_drawn_sessions_are_cut_and_their_pauses_scaled(trace: list[AgentSession]) -> None:
    chosen = drawn(
        trace, options("--turns", "4", "--speed", "10", "--longest-pause-s", "3", "--longest-prompt", "90000")
    )
    assert len(chosen) == 6
    whole = {found.streams[0].turns[0].hash_ids: found for found in trace}
    for found in chosen:
        turns = whole[found.streams[0].turns[0].hash_ids].streams[0].turns
        assert len(found.streams[0].turns) == 4
        for turn, uncut in zip(found.streams[0].turns, turns, strict=False):
            assert turn.hash_ids == uncut.hash_ids
            assert turn.prompt_tokens <= 90000
            assert turn.pause_s == min(uncut.pause_s / 10, 3)
    assert chosen == drawn(
        trace, options("--turns", "4", "--speed", "10", "--longest-pause-s", "3", "--longest-prompt", "90000")
    )
    assert chosen != drawn(trace, options("--turns", "4", "--seed", "1"))


def test_a_sub_agent_of_a_turn_that_is_cut_off_is_not_drawn(trace: list[AgentSession]) -> None:
    parents = [found for found in trace if len(found.streams) > 1]
    for turns in (2, 16):
        chosen = drawn(parents, options("--sessions", "5", "--turns", str(turns), "--longest-prompt", "2000000"))
        children = [stream for found in chosen for stream in found.streams[1:]]
        assert children
        assert all(stream.after < turns and len(stream.turns) <= turns for stream in children)


def test_too_few_sessions_are_an_error(trace: list[AgentSession]) -> None:
    with pytest.raises(BenchmarkError, match="0 sessions match, but 6 are needed"):
        drawn(trace, options("--longest-prompt", "100"))


def test_a_turn_begins_after_the_answer_before_and_a_sub_agent_beside_its_parent() -> None:
    """The parent's second answer waits for the sub-agent's first: run one after the other, they would never end."""
    began: list[TurnIndex] = []
    ended: list[TurnIndex] = []

    async def run() -> None:
        child_asked = asyncio.Event()

        async def ask(place: TurnIndex) -> None:
            began.append(place)
            if place == (1, 0):
                child_asked.set()
            if place == (0, 1):
                await child_asked.wait()
            await let_others_run()
            assert place[1] == 0 or (place[0], place[1] - 1) in ended
            ended.append(place)

        quick = AgentSession((session([0, 0]).streams[0], AgentStream(session([0, 0]).streams[0].turns, 0)), 0)
        await asyncio.wait_for(play(quick, ask), 60)

    asyncio.run(run())
    assert began[0] == (0, 0)
    assert sorted(ended) == [(0, 0), (0, 1), (1, 0), (1, 1)], "the job ends with its last stream"


def test_a_job_takes_its_pauses_its_answers_and_its_longest_stream() -> None:
    assert job_s(session([0, 3, 4]), lambda at, turn: 10.0) == 37.0
    beside = session([0, 3, 4], child_after=0, child_pauses_s=(99, 20))
    assert job_s(beside, lambda at, turn: 10.0) == 10 + 5 + 10 + 20 + 10


def test_prompts_repeat_as_the_trace_says_and_tenants_have_their_own_keys(
    trace: list[AgentSession], model: Path
) -> None:
    flags = options("--flood", "3", "--tokens-per-id", "8")
    sessions = drawn(trace, flags)
    load = make_load(sessions, TraceText(model, 8), flags)
    for (number, at, turn), shot in load.shots.items():
        traced, words = sessions[number].streams[at].turns[turn], shot.body["prompt"].split()
        assert (len(words) - 1) // 8 == len(traced.hash_ids) - 1
        assert shot.body["ignore_eos"] is True
        if turn and traced.known_tokens:
            shared = traced.known_tokens * 8 // 512
            assert words[:shared] == load.shots[number, at, turn - 1].body["prompt"].split()[:shared]
    keys = {shot.api_key: shot.tenant for shot in [*load.shots.values(), *load.flood]}
    assert sorted(keys.values()) == ["flooder", *(f"tenant-{number}" for number in range(4))]
    assert len({shot.body["prompt"] for shot in load.flood}) == 3
    assert pool_blocks(load, 320_000.0, 16) == 20_000
    for shot in [*load.shots.values(), *load.flood]:
        tokens = len(shot.body["prompt"].split()) + shot.body["max_tokens"]
        assert tokens <= 16 * pool_blocks(load, 0.0, 16), "a smaller pool would refuse it"
    lies = [shot.body["nvext"]["agent_context"] for shot in load.flood]
    assert len({lie["session_id"] for lie in lies}) == 3
    assert lies[0]["parent_session_id"] == lies[1]["session_id"]
    assert all(name in load.flags[0] for name in keys.values())
    assert not any(key in load.flags[0] for key in keys)


def test_rows_are_compared_by_medians_and_by_pairs() -> None:
    runs = {
        "new": [{"job_time_mean": value, "hit_rate": 0.5} for value in (1.0, 2.0, 9.0)],
        "old": [{"job_time_mean": value, "hit_rate": 0.0} for value in (2.0, 4.0, 5.0)],
    }
    found = compared(runs)
    assert found["job_time_mean"] == {"ratio": 0.5, "pairs": [0.5, 0.5, 1.8]}
    assert found["hit_rate"] == {"ratio": None, "pairs": []}
    job = found["rows"]["new"]["job_time_mean"]
    assert (job["min"], job["p50"], job["max"], job["runs"]) == (1.0, 2.0, 9.0, [1.0, 2.0, 9.0])
    assert "new 2.00 (1.00 to 9.00), hit rate 50.0%; old 4.00" in sentence(found, "torch")
