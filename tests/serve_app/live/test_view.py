"""A viewer's events: differences add up to the snapshot, and contain nothing of another tenant."""

import asyncio
from typing import Any, NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from serve_app.live.prefixes import node_rows
from serve_app.live.tally import Tally
from serve_app.live.view import Facts, Occurrence, View, Watcher, difference, picture_of, visible
from tests.serve_app.live.traffic import USES, Uses, filled

TENANTS = ["a", "b"]
AT_S = 1_790_000_000


class Moment(NamedTuple):
    """The uses that two ingresses have seen, and the other facts."""

    uses: Uses
    replicas: set[str]
    running: int
    target: int | None


COUNTS = st.integers(0, 3)
MOMENTS = st.builds(Moment, USES, st.sets(st.sampled_from(["r1", "r2", "r3"])), COUNTS, st.none() | COUNTS)


def facts_of(moment: Moment) -> Facts:
    tables = [filled([use for use in moment.uses if use.at_s % 2 == which]) for which in (0, 1)]
    about = {"engine": "simulated", "simulated": True, "state": "serving", "report_age_s": 0.1}
    counts = [Tally(lambda: float(AT_S)), Tally(lambda: float(AT_S))]
    for use in moment.uses:
        counts[use.at_s % 2].first_token(use.tenant, 0.1 * (1 + use.at_s % 3), len(use.blocks), use.cached_tokens)
    scale = [] if moment.target is None else [{"target": moment.target, "at_s": 1.0}]
    refused = [{"name": f"Replica {at}", "accepted": False, "why": "rps", "at_s": 2.0} for at in range(moment.running)]
    return Facts(
        {"model": "m"},
        {
            name: {"replica": name, "number": int(name[1]), "running": moment.running, **about}
            for name in moment.replicas
        },
        [node_rows(table, lambda chain: {"r1": len(chain) // 2}) for table in tables],
        [each.totals() for each in counts],
        [each.rings for each in counts],
        {"autoscaling": scale, "configuration": refused},
        [{"type": "reset"}, {"type": "replica_left", "replica": "r0"}],
        moment.running,
        AT_S,
    )


def applied(shown: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a page after a snapshot and events (docs: api)."""
    picture = {
        "replica": {row["replica"]: row for row in shown["replicas"]},
        "prefixes": {row["id"]: row for row in shown["prefixes"]},
        "totals": shown["totals"],
        "figures": {row["at_s"]: row for row in shown["figures"]},
        **{field: shown.get(field) for field in ("scale", "configuration", "ingresses_heard")},
    }
    for event in events:
        kind, body = event["type"], {key: value for key, value in event.items() if key not in ("type", "at_s")}
        match kind:
            case "replica":
                picture[kind][event["replica"]] = body
            case "replica_left":
                del picture["replica"][event["replica"]]
            case "prefixes":
                picture[kind] |= {row["id"]: row for row in event["nodes"]}
            case "prefixes_gone":
                picture["prefixes"] = {
                    name: row for name, row in picture["prefixes"].items() if name not in body["ids"]
                }
            case "totals":
                picture[kind] = event["totals"]
                picture["figures"] |= {row["at_s"]: row for row in event["figures"]}
            case "scale":
                picture[kind] = {**body, "at_s": event["at_s"]}
            case "configuration" | "ingresses_heard":
                picture[kind] = event[kind]
    return picture


def taken(watcher: Watcher) -> list[dict[str, Any]]:
    """Return the events that a stream would send now."""
    return [msgspec.json.decode(event.payload) for event in asyncio.run(watcher.take(0.0))]


@given(st.lists(MOMENTS.map(facts_of), min_size=2, max_size=5), st.sampled_from([None, "a"]))
def test_a_snapshot_and_its_changes_give_the_later_snapshot(course: list[Facts], viewer: str | None) -> None:
    """A viewer that follows the events sees the same as a later viewer."""
    view, watcher = View(viewer, course[0]), Watcher()
    first = msgspec.json.decode(msgspec.json.encode(view.snapshot(0.0)))
    view.watchers.add(watcher)
    for each in course[1:]:
        view.update(each, 1.0)
    events = taken(watcher)
    last = applied(msgspec.json.decode(msgspec.json.encode(View(viewer, course[-1]).snapshot(1.0))), [])
    seen = applied(first, events)
    if last["scale"] is None:  # a decision that left the board stays valid
        seen["scale"] = None
    figures = seen.pop("figures")
    assert figures == figures | last.pop("figures")  # outdated ones are not sent any more
    assert seen == last


@given(MOMENTS, MOMENTS)
def test_a_tenants_view_is_independent_of_other_tenants(before: Moment, after: Moment) -> None:
    """No row, count or event depends on another tenant's presence. The work of replicas is equal in both cases."""
    beside = [picture_of(facts_of(moment), "b") for moment in (before, after)]
    alone = [
        picture_of(facts_of(Moment([use for use in uses if use.tenant == "b"], replicas, 0, None)), "b")
        for uses, replicas, _, _ in (before, after)
    ]
    assert beside == alone
    assert difference(beside[0], beside[1], 1.0) == difference(alone[0], alone[1], 1.0)


@given(st.sampled_from([*TENANTS, None]), st.sampled_from(["decision", "reset", "pulls", "evictions"]))
def test_an_event_reaches_its_tenant_and_operators(owner: str | None, kind: str) -> None:
    """A tenant's decision comes without fields about others' work. Events without a tenant go to operators only."""
    told = Occurrence(
        kind, 1.0, owner, {"ttft_s": 1.0, "estimated_ttft_s": 1.0, "cold_ttft_s": 2.0, "queued_tokens": 9}
    )
    assert visible(told, None) == {"type": kind, "at_s": 1.0, **told.body}
    for tenant in TENANTS:
        expected = {"type": kind, "at_s": 1.0, "ttft_s": 1.0} if tenant == owner else None
        assert visible(told, tenant) == expected


def test_a_flood_of_one_tenant_costs_another_no_decision() -> None:
    """Each view has its own limit, and counts only visible decisions."""
    view, watcher = View("b", Facts()), Watcher()
    view.watchers.add(watcher)
    view.tell([Occurrence("decision", 1.0, "a", {"request": str(number)}) for number in range(1000)])
    view.tell([Occurrence("decision", 1.0, "b", {"request": "mine"})])
    assert [event["request"] for event in taken(watcher)] == ["mine"]
    view.tell([Occurrence("decision", 1.0, "b", {"request": str(number)}) for number in range(100)])
    assert len(taken(watcher)) == 19, "20 in all"
    view.update(Facts(), 2.0)
    assert taken(watcher)[-1] == {"type": "skipped", "at_s": 2.0, "decisions": 81}
    assert len(view.snapshot(2.0)["decisions"]) == 50
    view.tell([Occurrence("decision", 2.5, "b", {"request": "next"})])
    view.update(Facts(), 3.0)
    assert taken(watcher)[-1]["request"] == "next", "each look starts a new count"
