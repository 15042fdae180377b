"""The report of one replica's sessions: all for operators, only its own for a tenant, without totals over others."""

from heapq import nsmallest
from typing import Any

from serve_app.errors import LimitReason
from serve_app.sessions.admission import Admission
from serve_app.sessions.sessions import Session, Sessions

MOST_TOLD = 200
"""The maximum number of reported sessions: those in use or used last."""


def session_report(sessions: Sessions, admission: Admission, tenant: str | None, now_s: float) -> dict[str, Any]:
    """Return a replica's part of ``GET /v1/cache/sessions`` (docs: api). ``tenant`` None: for an operator."""
    own, pace = sessions.all(tenant), sessions.pace()
    held = sessions.held()
    live_tokens = held.total() if tenant is None else held[tenant]
    room = {"room_tokens": admission.room_tokens} if tenant is None else {}

    def row(session: Session) -> dict[str, Any]:
        state = sessions.state(session, pace)
        idle_s = 0.0 if session.running else now_s - session.used_s
        told: dict[str, Any] = {
            "session": session.name,
            "tenant": session.tenant,
            "state": state,
            "turns": session.turns,
            "tokens": session.tokens,
            "own_tokens": session.own_tokens,
            "age_s": round(now_s - session.began_s, 1),
            "idle_s": round(idle_s, 1),
        }
        if state == "paused":
            told["live_for_s"] = round(sessions.live_until_s(session, pace) - now_s, 1)
        if state == "waiting":
            told["waited_s"] = round(admission.waited_s(session), 1)
            told["why"] = _why(session.own_tokens, live_tokens, **room)
            reason = LimitReason("session", "num_blocks", held[session.tenant], room.get("room_tokens"))
            told["reason"] = reason.shown()
        return told

    latest = nsmallest(MOST_TOLD, own, key=lambda session: 0.0 if session.running else now_s - session.used_s)
    return {"sessions": len(own), "live_tokens": live_tokens, **room, "rows": [row(session) for session in latest]}


def _why(needed_tokens: int, live_tokens: int, room_tokens: int | None = None) -> str:
    if room_tokens is None:  # the total would reveal other tenants' sessions
        return f"It waits for space: its {needed_tokens:,} tokens do not fit beside live sessions."
    return (
        f"It waits for space: live sessions hold {live_tokens:,} of {room_tokens:,} tokens, and it needs "
        f"{needed_tokens:,}."
    )
