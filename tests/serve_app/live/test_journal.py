"""The latest requests of each tenant: room by tenant, order, and what a tenant may see."""

from serve_app.errors import LimitReason
from serve_app.live.journal import KEPT_REQUESTS, Journal, latest
from serve_app.live.tally import MAX_TENANTS

REASON = LimitReason("ingress", "concurrent_requests", 3, 3)


def test_a_busy_tenant_takes_no_room_from_another() -> None:
    """Each has its own latest requests."""
    journal = Journal(lambda: 2)
    journal.refused("quiet", REASON)
    for number in range(10 * KEPT_REQUESTS):
        journal.add("busy", {"type": "decision", "at_s": float(number)})
    (refusal,) = journal.of("quiet")
    assert (refusal["type"], refusal["limit"], refusal["used"]) == ("refusal", "concurrent_requests", 3)
    assert "concurrent_requests" in refusal["remedy"]
    assert [row["at_s"] for row in journal.of("busy")] == [*range(9 * KEPT_REQUESTS, 10 * KEPT_REQUESTS)]


def test_tenants_that_are_no_longer_configured_are_dropped() -> None:
    """So is the least recently active one beyond the limit for all."""
    names = [f"t{number}" for number in range(MAX_TENANTS + 1)]
    journal = Journal(lambda: len(names))
    for name in names[:-1]:
        journal.refused(name, REASON)
    assert all(journal.of(name) for name in names[:-1])
    first, second, *_, last = names
    journal.refused(last, REASON)
    assert not journal.of(first) and journal.of(second) and journal.of(last)
    del names[1:]
    journal.refused(last, REASON)
    assert not journal.of(second) and len(journal.of(last)) == 2


def test_requests_of_all_ingresses_are_in_one_order_and_tenants_see_no_load_of_others() -> None:
    rows = [{"type": "decision", "at_s": at_s, "queued_tokens": 7, "cached_tokens": 1} for at_s in (1.0, 3.0, 2.0)]
    assert [row["at_s"] for row in latest(rows, operator=True)] == [3.0, 2.0, 1.0]
    assert latest(rows[:1], operator=True) == rows[:1]
    assert latest(rows[:1], operator=False) == [{"type": "decision", "at_s": 1.0, "cached_tokens": 1}]
    assert len(latest(rows * KEPT_REQUESTS, operator=True)) == KEPT_REQUESTS
