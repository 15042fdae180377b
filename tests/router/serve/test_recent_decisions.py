"""After a call, the ingress asks its process's router for the decision about a request."""

from router.protocol.request import Decision
from router.serve.recent_decisions import RecentDecisions


def test_taken_once_and_bounded() -> None:
    decisions = RecentDecisions()
    decision = Decision("a", "router", 1, 0, 0, "cold")
    decisions.add("q5", decision)
    assert decisions.take("q5") == decision
    assert decisions.take("q5") is None
    for number in range(9000):
        decisions.add(f"q{number}", decision)
    assert decisions.take("q807") is None
    assert decisions.take("q808") is not None
    assert decisions.take("q8999") is not None


def test_an_early_leaver_has_nothing_sent_and_a_late_one_learns_the_decision() -> None:
    """The second of departure and decision learns of the first, for this caller only."""
    decisions = RecentDecisions()
    decision = Decision("a", "router", 1, 0, 0, "cold")
    assert decisions.leave("early") is None
    assert decisions.add("other", decision)
    assert not decisions.add("early", decision)
    assert decisions.take("early") is None
    assert decisions.add("late", decision)
    assert decisions.leave("late") == decision
    assert decisions.take("late") is None
    for number in range(9000):
        decisions.leave(f"q{number}")
    assert decisions.add("q807", decision)
    assert not decisions.add("q808", decision)
