"""Open decisions, prefills and recent answers, each against a naive list and its limit."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from router.protocol.request import Decision
from serve_app.ray_llm.requests import KEPT, DecisionKey, OpenDecisions, Prefills, RecentAnswer, RecentAnswers

MOST, TTL_S = 5, 10.0
STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 6)), max_size=40)


def decision(number: int) -> Decision:
    return Decision("a", "me", number, 0, 0, "cold", 0.0, "", 0, None, 0.0)


@dataclass
class Naive:
    """All in one list, each with its time and key."""

    kept: list[tuple[float, DecisionKey, Decision]] = field(default_factory=list)

    def add(self, key: DecisionKey, one: Decision, now_s: float) -> list[Decision]:
        self.kept.append((now_s, key, one))
        first = max(0, len(self.kept) - MOST)
        dropped = [row for at, row in enumerate(self.kept) if at < first or now_s - row[0] >= TTL_S]
        self.kept = [row for row in self.kept if row not in dropped]
        return [row[2] for row in dropped]

    def take(self, key: DecisionKey) -> list[Decision]:
        taken = [row for row in self.kept if row[1] == key]
        self.kept = [row for row in self.kept if row[1] != key]
        return [row[2] for row in taken]


@given(STEPS)
def test_decisions_are_kept_until_they_begin_grow_old_or_are_too_many(steps: list[tuple[bool, str, str, int]]) -> None:
    """Many of them may be for one prompt."""
    decisions, naive, now_s = OpenDecisions(MOST, TTL_S), Naive(), 0.0
    for number, (adds, replica, prompt, pause) in enumerate(steps):
        now_s += pause
        key = replica, prompt.encode()
        if adds:
            assert decisions.add(key, decision(number), now_s) == naive.add(key, decision(number), now_s)
        else:
            assert list(decisions.of(key)) == [row[2] for row in naive.kept if row[1] == key]
            assert list(decisions.take(key)) == naive.take(key)
        assert len(decisions) == len(naive.kept) <= MOST
        assert {key: list(held.values()) for key, held in decisions._by_key.items()} == {
            key: [row[2] for row in naive.kept if row[1] == key] for _, key, _ in naive.kept
        }


def test_queued_tokens_are_those_before_a_first_token_and_the_rate_is_measured() -> None:
    now_s = [0.0]
    prefills = Prefills(4, lambda: now_s[0])
    prefills.arrived("a", 1000, b"key of a")
    prefills.arrived("b", 500, b"key of b")
    report = prefills.report()
    assert (report.queued_prefill_tokens, report.arrived, report.begun) == (1500, b"key of akey of b", b"")
    now_s[0] = 2.0
    prefills.begun("a")
    prefills.begun("a")  # every later token
    report = prefills.report()
    assert (report.queued_prefill_tokens, report.running_sequences) == (500, 1)
    assert (report.arrived, report.begun) == (b"", b"key of a")
    assert report.prefill_tokens_per_s == 500
    now_s[0] = 3.0
    prefills.begun("b")
    assert prefills.report().prefill_tokens_per_s == 500
    now_s[0] = 60.0  # idle time is no work
    prefills.arrived("c", 500, b"key of c")
    now_s[0] = 61.0
    prefills.begun("c")
    assert prefills.report().prefill_tokens_per_s == 500


@given(st.lists(st.tuples(st.sampled_from(["arrived", "begun", "ended"]), st.sampled_from("abc")), max_size=30))
def test_nothing_is_left_of_requests_that_ended(steps: list[tuple[str, str]]) -> None:
    """A client may leave in any order; every reported arrival is followed by its end."""
    prefills = Prefills(2)
    for step, name in steps:
        getattr(prefills, step)(name, *([100, name.encode()] if step == "arrived" else []))
    for name in "abc":
        prefills.ended(name)
    report = prefills.report()
    assert (report.queued_prefill_tokens, report.running_sequences, report.waiting_sequences) == (0, 0, 0)
    assert set(report.arrived) == set(report.begun)


def answer(request_id: str) -> RecentAnswer:
    return request_id, "t", b"chain", 100, 32, 0.1


def test_answers_are_told_once_and_the_oldest_are_forgotten() -> None:
    answers = RecentAnswers()
    for number in range(2 * KEPT):
        answers.add(answer(f"chatcmpl-{number}"))
    assert answers.since(2 * KEPT) == []
    assert answers.since(2 * KEPT - 2) == [answer(f"chatcmpl-{2 * KEPT - 2}"), answer(f"chatcmpl-{2 * KEPT - 1}")]
    assert [one[0] for one in answers.since(0)] == [f"chatcmpl-{number}" for number in range(KEPT, 2 * KEPT)]


def test_the_name_of_a_response_is_not_shown() -> None:
    """Where vLLM stores responses, their ids open their text, and events are shown to watchers."""
    answers = RecentAnswers()
    answers.add(answer("resp_123"))
    ((shown, *others),) = answers.since(0)
    assert others == list(answer(""))[1:] and len(shown) == 32
    assert "123" not in shown
