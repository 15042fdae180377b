"""What a name means, and how that is kept. (docs: prompts)"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import InvalidRequest
from serve_app.prompts.cutover import STATE, Cutover, Cutovers, read_cutovers, write_cutovers
from serve_app.prompts.lock import PromptError

CHANGES = st.lists(st.tuples(st.sampled_from(["clerk", "pilot"]), st.sampled_from(["1", "2", "3", ""])), max_size=12)
"""A name, and the version that it is to mean; "": the one before."""


@given(changes=CHANGES)
def test_every_state_is_kept_and_names_no_version_twice(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, str]]
) -> None:
    """What is written is what is read; a later state is newer; a roll-back where nothing was before is refused."""
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
        # A roll-back goes back once; a version that is promoted again keeps the one before.
        kept = before.previous if before and before.promoted == version else before.promoted if before else ""
        assert cutover.previous == (kept if version else "")
        assert cutover.promoted != cutover.previous and len(state.refs(name)) == 1 + (cutover.previous != "")
        one, other = state.promoted(name, "8"), state.promoted(name, "9")
        assert one.newer_than(other) != other.newer_than(one), "of two changes made at once one counts everywhere"
    write_cutovers(directory, state)
    assert read_cutovers(directory) == state


def test_a_state_with_a_canary_of_before_means_what_was_promoted(tmp_path: Path) -> None:
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
