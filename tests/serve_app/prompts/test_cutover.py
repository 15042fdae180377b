"""The versions that names stand for, and their state file. (docs: prompts)"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import InvalidRequest
from serve_app.prompts.cutover import STATE, Cutover, Cutovers, read_cutovers, write_cutovers
from serve_app.prompts.lock import PromptError

CHANGES = st.lists(st.tuples(st.sampled_from(["clerk", "pilot"]), st.sampled_from(["1", "2", "3", ""])), max_size=12)
"""A name and the version that it shall stand for; "": the previous one."""


@given(changes=CHANGES)
def test_every_state_is_kept_and_names_no_version_twice(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, str]]
) -> None:
    """Reading returns the written state; a later state is newer; a roll-back without a previous version is refused."""
    directory, state = tmp_path_factory.mktemp("state"), Cutovers()
    for name, version in changes:
        before = state.names.get(name)
        if not version and (before is None or not before.previous):
            with pytest.raises(InvalidRequest):
                state.rolled_back(name)
            continue
        after = state.promoted(name, version) if version else state.rolled_back(name)
        assert after.newer_than(state) and not state.newer_than(after)
        state, cutover = after, after.names[name]
        assert cutover.promoted == (version or (before and before.previous))
        # A roll-back goes back once; promoting a version again keeps the previous one.
        kept = before.previous if before and before.promoted == version else before.promoted if before else ""
        assert cutover.previous == (kept if version else "")
        assert cutover.promoted != cutover.previous and len(state.refs(name)) == 1 + (cutover.previous != "")
        one, other = state.promoted(name, "8"), state.promoted(name, "9")
        assert one.newer_than(other) != other.newer_than(one), "one of two concurrent changes counts everywhere"
    write_cutovers(directory, state)
    assert read_cutovers(directory) == state


def test_an_old_state_with_a_canary_stands_for_the_promoted_version(tmp_path: Path) -> None:
    (tmp_path / STATE).write_text('{"serial":3,"by":"x","names":{"clerk":{"promoted":"1","canary":"2","percent":5}}}')
    assert read_cutovers(tmp_path).names == {"clerk": Cutover("1")}


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
