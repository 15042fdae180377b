"""What a name means: one version, for some another, always the same for the same user; and how that is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import InvalidRequest
from serve_app.prompts.cutover import STATE, Cutover, Cutovers, read_cutovers, share_of, write_cutovers
from serve_app.prompts.lock import PromptError

VERSIONS = st.sampled_from("1234")
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("promote"), st.sampled_from(["clerk", "pilot"]), VERSIONS),
        st.tuples(st.just("canary"), st.sampled_from(["clerk", "pilot"]), VERSIONS),
        st.tuples(st.just("roll_back"), st.sampled_from(["clerk", "pilot"]), st.just("")),
    ),
    max_size=12,
)


def changed(state: Cutovers, change: tuple[str, str, str]) -> Cutovers:
    kind, name, version = change
    try:
        match kind:
            case "promote":
                return state.promoted(name, version)
            case "canary":
                return state.canary(name, version, 10)
        return state.rolled_back(name)
    except InvalidRequest:
        return state


@given(key=st.text(), tenant=st.text(max_size=4), small=st.floats(0.1, 99), large=st.floats(0.1, 99))
def test_who_gets_the_canary_keeps_it(key: str, tenant: str, small: float, large: float) -> None:
    """The same key always gets the same version, and while the share grows nobody goes back. (docs/prompts.md)"""
    small, large = sorted((small, large))
    share = share_of(tenant, key, "clerk@2")
    assert 0 <= share < 1
    assert share == share_of(tenant, key, "clerk@2")
    fewer, more = Cutover("1", canary="2", percent=small), Cutover("1", canary="2", percent=large)
    assert fewer.version(share) == "1" or more.version(share) == "2"


@pytest.mark.parametrize("percent", [1, 5, 50, 95])
def test_the_share_of_a_canary_is_what_was_asked_for(percent: float) -> None:
    """Of 20,000 users, within four standard deviations; another canary tries others."""
    users, part = 20_000, percent / 100
    cutover = Cutover("1", canary="2", percent=percent)
    first = {user for user in range(users) if cutover.version(share_of("acme", f"user-{user}", "clerk@2")) == "2"}
    other = {user for user in range(users) if cutover.version(share_of("acme", f"user-{user}", "clerk@3")) == "2"}
    spread = 4 * (users * part * (1 - part)) ** 0.5
    assert abs(len(first) - users * part) < spread
    assert abs(len(first & other) - users * part * part) < 4 * (users * part * part) ** 0.5


@given(changes=CHANGES)
def test_every_state_is_kept_and_names_no_version_twice(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, str, str]]
) -> None:
    """What is written is what is read; a later state is newer, and a canary is never what is promoted."""
    directory, state = tmp_path_factory.mktemp("state"), Cutovers()
    for change in changes:
        after = changed(state, change)
        assert after is state or (after.newer_than(state) and not state.newer_than(after))
        state = after
        for each in state.names.values():
            assert each.promoted and len(each.versions()) == len([v for v in (each.promoted, each.canary) if v]) + (
                each.previous not in ("", each.canary)
            )
    write_cutovers(directory, state)
    assert read_cutovers(directory) == state


def test_promote_and_roll_back() -> None:
    """A roll-back ends the canary first, then goes back once: the version that was left is not returned to."""
    state = Cutovers().promoted("clerk", "1")
    assert state.names == {"clerk": Cutover("1")}
    state = state.promoted("clerk", "2").canary("clerk", "3", 5)
    assert state.names == {"clerk": Cutover("2", "1", "3", 5)}
    assert state.without_canaries().names == {"clerk": Cutover("2", "1")}
    assert state.promoted("clerk", "3").names == {"clerk": Cutover("3", "2")}
    state = state.rolled_back("clerk")
    assert state.names == {"clerk": Cutover("2", "1")}
    assert state.promoted("clerk", "2").names == state.names, "promoted again it keeps what was before"
    state = state.rolled_back("clerk")
    assert state.names == {"clerk": Cutover("1")}
    for refused in (
        lambda: state.rolled_back("clerk"), lambda: state.rolled_back("pilot"), lambda: state.canary("clerk", "1", 5),
        lambda: state.canary("pilot", "1", 5),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest):
            refused()


def test_of_two_changes_made_at_once_one_counts_everywhere() -> None:
    before = Cutovers().promoted("clerk", "1")
    one, other = before.promoted("clerk", "2"), before.promoted("clerk", "3")
    assert one.newer_than(other) != other.newer_than(one)


@pytest.mark.parametrize("raw", ["", "[]", '{"names": {"clerk": {}}}', '{"serial": "x"}', '{"names": {"a": 1}}'])
def test_a_state_that_is_none_is_refused(tmp_path: Path, raw: str) -> None:
    assert read_cutovers(tmp_path) == Cutovers()
    (tmp_path / STATE).write_text(raw)
    with pytest.raises(PromptError, match=STATE):
        read_cutovers(tmp_path)


def test_a_version_in_use_must_be_there() -> None:
    state = Cutovers().promoted("clerk", "1").promoted("clerk", "2")
    state.check({"clerk@1", "clerk@2"})
    with pytest.raises(PromptError, match="clerk@1 is in use"):
        state.check({"clerk@2"})
