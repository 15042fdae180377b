"""An engine's load, from its incoming requests and first tokens."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.ray_llm.prefills import Prefills


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
