"""Events in the form of docs: api: a small instance, and a recording in which it grows, serves, and shrinks."""

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def replica(name: str, at_s: float = 0.0, **more: Any) -> Event:
    """A replica as an operator sees it; also an event about it."""
    blocks = {"blocks_total": 512, "blocks_used": 40, "blocks_reusable": 300, "blocks_free": 172, "blocks_pinned": 8}
    load = {"running": 1, "waiting": 0, "queued_tokens": 0, "full": False, "prefill_tokens_per_s": 780.0}
    told = {"type": "replica", "at_s": at_s, "replica": name, "number": int(name[1:]), "state": "serving"}
    return {
        **told,
        "engine": "simulated",
        "simulated": True,
        **blocks,
        **load,
        "tier_blocks": {},
        "report_age_s": 0.2,
        **more,
    }


def node(name: str, parent: str | None, start: int, tokens: int, holders: dict[str, int], **more: Any) -> Event:
    """A prefix: ``start`` tokens precede it."""
    kind = "public" if parent is None else "system" if parent.startswith("p") else "conversation"
    told: Event = {"id": name, "parent": parent, "kind": kind, "tenant": None if kind == "public" else "acme"}
    counts = {"pinned": False, "requests": 4, "hits": 3, "last_used_at_s": 0.0, "label": ""}
    return {**told, "prefix_tokens": start + tokens, "tokens": tokens, **counts, "holders": holders, **more}


def decision(request: str, at_s: float = 0.0, **more: Any) -> Event:
    """A prompt of 1,200 tokens, read from the cache of ``r1``."""
    where = {"tenant": "acme", "ingress": "i1", "replica": "r1", "reason": "cached", "node": "s-acme"}
    tokens = {"prompt_tokens": 1200, "best_cached_tokens": 1184, "selected_cached_tokens": 1184, "cached_tokens": 1184}
    rest = {"pull_from": None, "pull_tokens": 0, "queued_tokens": None}
    times = {"estimated_ttft_s": 0.021, "ttft_s": 0.024, "cold_ttft_s": 1.54}
    return {"type": "decision", "at_s": at_s, "request": request, **where, **tokens, **rest, **times, **more}


def figure(at_s: float, **more: Any) -> Event:
    """Ten seconds with 40 answers."""
    counts = {"requests": 40, "refused": 0, "failed": 0}
    return {"at_s": 10 * (at_s // 10), **counts, "ttft_p50_s": 0.021, "ttft_p95_s": 0.34, **more}


def tenant(name: str, **more: Any) -> Event:
    """A row of the table of tenants: 120 answers in a minute."""
    tokens = {"prompt_tokens": 120_000, "cached_tokens": 100_000, "output_tokens": 9_000}
    rates = {"prompt_tokens_per_s": 2000.0, "cached_tokens_per_s": 1666.7, "output_tokens_per_s": 150.0}
    times = {"ttft_p50_s": 0.041, "ttft_p95_s": 0.34, "e2e_p50_s": 1.4, "e2e_p95_s": 4.2}
    counts = {"requests": 120, "refused": 0, "failed": 0, "requests_per_s": 2.1, "hit_rate": 0.8333}
    causes: Event = {"refused_by": [], "missed_by": []}
    held = {"kv_tokens": 41_000, "kv_share_tokens": 43_690}
    return {"tenant": name, **counts, **tokens, **rates, **times, **causes, **held, **more}


def idle(name: str) -> Event:
    """A tenant without requests."""
    none = dict.fromkeys(("hit_rate", "ttft_p50_s", "ttft_p95_s", "e2e_p50_s", "e2e_p95_s"))
    zero = {f"{part}_tokens{end}": 0 for part in ("prompt", "cached", "output") for end in ("", "_per_s")}
    return tenant(name, requests=0, requests_per_s=0.0, kv_tokens=0, **zero, **none)


REMEDY = "Let it send shorter prompts or a smaller max_tokens, or raise its tokens_per_minute."


def refused(name: str, requests: int = 12) -> Event:
    """Refusals of a tenant, as in a table."""
    limit = {"place": "ingress", "limit": "tokens_per_minute", "requests": requests, "remedy": REMEDY}
    return {"tenant": name, **limit}


def table(*rows: Event, viewer: str = "operator", refusals: tuple[Event, ...] = ()) -> Event:
    """The answer of /v1/tenants/stats."""
    span = {"at_s": 100.0, "window_s": 60, "since_s": 45}
    return {"object": "tenants.stats", "viewer": viewer, **span, "data": list(rows), "refusals": list(refusals)}


def tenants(number: int) -> list[Event]:
    """Rows of tenants: the second is refused, misses and is at the end of its budget; the third is idle."""
    budget = {"tenant": "globex", "unit": "tokens", "period": "day", "limit": 5_000_000, "used": 4_300_000}
    budget |= {"left": 700_000, "ends_at": "2027-01-31T00:00:00Z", "hard": True}
    missed = {"reason": "time", "requests": 9, "lost_tokens": 10_800, "remedy": "Move the date or time."}
    by = {name: value for name, value in refused("globex").items() if name != "tenant"}
    causes: Event = {"refused": 12, "refused_by": [by], "missed_by": [missed], "hit_rate": 0.31, "ttft_p95_s": 2.31}
    rows = [
        tenant("acme", today={"cost": 1.2345, "saved": 4.5}),
        tenant("globex", kv_tokens=62_000, budget=budget, today={"cost": 12.5, "saved": 0.5}, **causes),
        idle("initech"),
    ]
    return [*rows, *(tenant(f"team-{at:03}") for at in range(number - 3))][:number]


def prefixes() -> list[Event]:
    """A public prompt, two tenants' system prompts, and conversations; ``r1`` holds all, ``r2`` some."""
    both = {"r1": 512, "r2": 512}
    return [
        node("p-clerk", None, 0, 512, both, label="clerk@1"),
        node("s-acme", "p-clerk", 512, 640, {"r1": 640}, pinned=True),
        node("c-acme", "s-acme", 1152, 320, {"r1": 320}),
        node("s-globex", "p-clerk", 512, 900, {"r1": 896, "r2": 896}, tenant="globex"),
        node("c-globex", "s-globex", 1412, 160, {"r2": 160}, tenant="globex"),
    ]


def snapshot(at_s: float = 0.0, viewer: str = "operator", tenant: str | None = None, **more: Any) -> Event:
    """The instance with two replicas; ``more`` replaces its fields."""
    head = {"type": "snapshot", "at_s": at_s, "viewer": viewer, "tenant": tenant, "model": "demo"}
    engine = {"engine": "simulated", "simulated": True, "policy": "estimated_ttft", "block_size": 16, "ingresses": 1}
    held = {"replicas": [replica("r1"), replica("r2")], "prefixes": prefixes(), "totals": [], "decisions": []}
    known = {"figures": [], "minute": figure(0, requests=0), "incidents": [], "links": []}
    of_operators = {"moves": [], "scale": None, "configuration": [], "ingresses_heard": 1}
    return {**head, **engine, **held, **known, **(of_operators if viewer == "operator" else {}), **more}


def recording() -> list[Event]:
    """One minute of decisions, in which a third replica joins at 20 s, serves requests, and leaves at 50 s."""
    events = [snapshot()]
    for at in range(1, 61):
        if at == 20:
            events.append({"type": "scale", "at_s": 20.0, "from": 2, "target": 3, "needed": 2.6, "reason": "ttft"})
            events.append(replica("r3", 20.0, state="joining"))
        if at == 24:
            events.append(replica("r3", 24.0))
            held = node("p-clerk", None, 0, 512, {"r1": 512, "r2": 512, "r3": 512}, label="clerk@1")
            events.append({"type": "prefixes", "at_s": 24.5, "nodes": [held]})
        if at == 50:
            events.append({"type": "replica_left", "at_s": 50.0, "replica": "r3", "number": 3, "lost": False})
        events.append(decision(f"request{at}.0", at + 0.9, replica=f"r{1 + at % 2}"))
    return events


def write(path: Path, events: list[Event]) -> Path:
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return path
