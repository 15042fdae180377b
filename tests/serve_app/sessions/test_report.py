"""Reports of a replica's sessions: operators see all, a tenant sees its own."""

import json

from serve_app.replica.session_gate import MOST_TOLD, session_report
from tests.serve_app.sessions.test_admission import POOL, Bench
from tests.serve_app.sessions.test_sessions import chain, turn


def rows(bench: Bench, tenant: str | None = None) -> list[dict[str, object]]:
    told: list[dict[str, object]] = session_report(bench.sessions, bench.admission, tenant, bench.clock())["rows"]
    return told


def test_each_state_is_told_with_its_times() -> None:
    """The one used last comes first; a running one is in use now."""
    bench = Bench(wait_s=1000.0, pinned=1000)
    left = bench.arrive(3_000)
    bench.admission.admitted()
    bench.end(left)
    bench.clock.now_s = 200.0
    paused = bench.arrive(5_000)
    bench.admission.admitted()
    bench.end(paused)
    bench.clock.now_s = 210.0
    running = bench.arrive(50_000)
    assert bench.admission.admitted() == [running]
    bench.arrive(20_000)
    assert bench.admission.admitted() == []
    bench.clock.now_s = 215.0
    told = session_report(bench.sessions, bench.admission, None, 215.0)
    assert {name: told[name] for name in ("sessions", "live_tokens", "room_tokens")} == {
        "sessions": 4, "live_tokens": 55_000, "room_tokens": POOL - 1000,
    }  # fmt: skip
    known = {"session": "", "tenant": "a", "turns": 1}
    assert told["rows"] == [
        {**known, "state": "running", "tokens": 50_000, "own_tokens": 50_000, "age_s": 5.0, "idle_s": 0.0},
        {
            **known, "state": "waiting", "tokens": 20_000, "own_tokens": 20_000, "age_s": 5.0, "idle_s": 0.0,
            "waited_s": 5.0,
            "why": "It waits for space: live sessions hold 55,000 of 63,000 tokens, and it needs 20,000.",
            "reason": {"place": "session", "limit": "num_blocks", "used": 55_000, "most": 63_000},
        },
        {**known, "state": "paused", "tokens": 5_000, "own_tokens": 5_000, "age_s": 15.0, "idle_s": 15.0,
         "live_for_s": 105.0},
        {**known, "state": "left", "tokens": 3_000, "own_tokens": 3_000, "age_s": 215.0, "idle_s": 215.0},
    ]  # fmt: skip


def test_a_tenant_is_told_nothing_that_depends_on_others() -> None:
    """Neither rows nor sums depend on them, only its waiting, which it sees anyway."""
    bench, alone = Bench(wait_s=1000.0), Bench(wait_s=1000.0)
    others = [bench.arrive(30_000, "b"), bench.arrive(34_000, "b")]
    assert bench.admission.admitted() == others
    for one in (bench, alone):
        session = one.sessions.begin("mine", "a", chain(("m", 20)), 40_000, 0, "word")
        one.admission.waits(session, 40_000, int)
    assert bench.admission.admitted() == []
    told = session_report(bench.sessions, bench.admission, "a", 0.0)
    assert told == session_report(alone.sessions, alone.admission, "a", 0.0)
    (row,) = told["rows"]
    assert (row["session"], row["state"]) == ("word", "waiting")
    assert row["why"] == "It waits for space: its 40,000 tokens do not fit beside live sessions."
    assert row["reason"] == {"place": "session", "limit": "num_blocks", "used": 0, "most": None}
    assert set(told) == {"sessions", "live_tokens", "rows"} and told["live_tokens"] == 0
    assert session_report(bench.sessions, bench.admission, "c", 0.0)["rows"] == []
    assert len(rows(bench)) == 3


def test_only_the_latest_are_told() -> None:
    """All are counted, and the report fits JSON."""
    bench, sessions = Bench(), MOST_TOLD + 3
    for number in range(sessions):
        bench.clock.now_s = float(number)
        turn(bench.sessions, str(number), chain((f"{number}-", 20)), name=f"n{number}")
    told = session_report(bench.sessions, bench.admission, None, bench.clock())
    assert told["sessions"] == sessions
    assert [row["session"] for row in json.loads(json.dumps(told))["rows"]] == [
        f"n{number}" for number in range(sessions - 1, 2, -1)
    ]
