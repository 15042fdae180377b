"""Advice names what would keep a prefix, once a session, in bounded memory that no other tenant influences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.cache_misses.advice import MAX_SESSIONS, AdviceBook, advice_on
from serve_app.cache_misses.reasons import FirstDifference, Miss
from serve_app.cache_misses.rules import CAUSES, REMEDIES, MissReason

PLACE = FirstDifference("system", 18, 18, 3, "\u2014secret\n")


@pytest.mark.parametrize("reason", REMEDIES)
def test_advice_is_one_line_for_a_header(reason: MissReason) -> None:
    """Without the text found in the prompt; none for misses that the client cannot avoid."""
    advice = advice_on(Miss(reason, 1200, PLACE if reason not in ("adapter", "salt") else None), ())
    assert bool(advice) == (reason in CAUSES)
    if advice:
        assert advice.isascii() and advice.isprintable() and "secret" not in advice
        assert "1200 tokens" in advice and REMEDIES[reason] in advice


def test_a_rule_that_is_off_comes_first_with_the_clients_own_setting() -> None:
    advice = advice_on(Miss("text", 1200, PLACE), ("billing_line", "git_snapshot"))
    assert "Set agent_prompt_rules: billing_line, git_snapshot may keep this prefix." in advice
    assert "CLAUDE_CODE_ATTRIBUTION_HEADER=0" in advice and "in the system prompt, line 3" in advice


ACTIONS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(("", "one", "two")), st.sampled_from(("time", "id", "")))
)
"""A tenant, a session, and the reason of a miss; "": an answer takes its advice."""


@given(ACTIONS)
def test_each_session_is_advised_once(actions: list[tuple[str, str, str]]) -> None:
    """Requests without a session are advised once for each reason; other tenants change nothing."""

    def told(only: str) -> list[tuple[str, str]]:
        book, told = AdviceBook(lambda: 2), []
        for tenant, session, reason in actions:
            if tenant not in only:
                continue
            if reason:
                book.note(tenant, session, reason, f"{session} {reason}")
            elif advice := book.take(tenant, session):
                told.append((tenant, advice))
        return told

    both = told("ab")
    assert [one for one in both if one[0] == "a"] == told("a")
    assert len(set(both)) == len(both)
    for tenant in "ab":
        for session in ("one", "two"):
            assert sum(advice.startswith(session) for owner, advice in both if owner == tenant) <= 1


def test_the_memory_is_bounded() -> None:
    """By sessions and by tenants; the oldest are forgotten, and advised again."""
    book = AdviceBook(lambda: 2)
    for number in range(MAX_SESSIONS + 1):
        assert book.note("a", f"{number}", "time", "advice")
    assert book.take("a", "0") == "" and book.take("a", f"{MAX_SESSIONS}") == "advice"
    assert book.note("a", "0", "time", "advice") and not book.note("a", f"{MAX_SESSIONS}", "time", "advice")
    for tenant in "bc":
        book.note(tenant, "x", "time", "advice")
    assert book.take("a", "2") == "" and book.take("b", "x") == book.take("c", "x") == "advice"
