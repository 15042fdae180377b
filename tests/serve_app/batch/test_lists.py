"""Pages of lists: a walk meets each object that stays once, in order, whatever is made and removed meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.batch.files import new_id, newest_first, place_of
from serve_app.batch.wire import PageQuery, page
from serve_app.errors import InvalidRequest


@dataclass(frozen=True)
class Made:
    id: str
    created_at: float


def shown(one: Made) -> dict[str, Any]:
    return {"id": one.id}


def asked(found: Sequence[Made], **query: Any) -> tuple[list[str], bool]:
    answer = page(newest_first([*found]), PageQuery.checked(query), "file-", shown)
    ids = [one["id"] for one in answer["data"]]
    assert (answer["first_id"], answer["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    return ids, answer["has_more"]


TIMES = st.lists(st.integers(0, 5), min_size=1, max_size=14)
"""Several may be of one millisecond."""
CHANGES = st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=10)


@given(
    TIMES, st.integers(1, 4), st.sampled_from(["after", "after_id", "page"]), st.sampled_from(["asc", "desc"]), CHANGES
)
def test_a_walk_goes_on_after_what_is_gone(
    times: list[int], limit: int, cursor: str, order: str, changes: list[tuple[int, bool]]
) -> None:
    """Between two pages any may be deleted, also the last one that was seen, or all of them; others are made."""
    there = [Made(new_id("file-", at), at) for at in times]
    stay, met, query = {*there}, list[Made](), dict[str, Any]()
    by_id = {one.id: one for one in there}
    made = 0
    for number in range(100):
        ids, more = asked(there, limit=limit, order=order, **query)
        assert len(ids) <= limit and more <= (len(ids) == limit)
        met += [by_id[name] for name in ids]
        if not more:
            break
        query = {cursor: ids[-1]}
        if number < len(changes):
            at, mine = changes[number]
            gone = by_id[ids[-1]] if mine else there[at % len(there)]
            there = [one for one in there if one is not gone]
            stay.discard(gone)
            new = Made(new_id("file-", at_s := 3 if at % 2 else 100), at_s)
            made += 1
            by_id[new.id] = new
            there.append(new)
    else:
        pytest.fail("it has no end")
    assert len({*met}) == len(met), "one twice"
    assert {*met} >= stay
    assert met == sorted(met, key=place_of, reverse=order == "desc")
    assert len({*met} - stay) <= made + len(changes)


@given(TIMES, st.integers(1, 4), CHANGES)
def test_a_walk_back_meets_each_once(times: list[int], limit: int, changes: list[tuple[int, bool]]) -> None:
    """As Anthropic's ``before_id`` asks, from the oldest on."""
    there = newest_first([Made(new_id("file-", at), at) for at in times])
    stay, met, cursor = {*there[:-1]}, list[str](), there[-1].id
    for number in range(100):
        ids, more = asked(there, limit=limit, before_id=cursor)
        met[:0] = ids
        if not more:
            break
        cursor = ids[0]
        if number < len(changes):
            at, mine = changes[number]
            gone = next(one for one in there if one.id == cursor) if mine else there[at % len(there)]
            there = [one for one in there if one is not gone]
            stay.discard(gone)
    else:
        pytest.fail("it has no end")
    assert len({*met}) == len(met)
    assert {*met} >= {one.id for one in stay}
    assert met == sorted(met, key=lambda name: place_of(Made(name, 0)), reverse=True)


@given(TIMES, st.data())
def test_a_page_is_what_lies_between_its_cursors(times: list[int], data: st.DataObject) -> None:
    """Beside a naive oracle over positions; an object of an earlier release, whose id tells no time, has its own."""
    old = data.draw(st.booleans())
    there = [Made(f"file-{number:032x}" if old else new_id("file-", at), at) for number, at in enumerate(times)]
    if old:
        there = [one for one in there if one.id[5] == "0"]
    order, limit = data.draw(st.sampled_from(["asc", "desc"])), data.draw(st.integers(1, 20))
    naive = sorted(there, key=lambda one: (int(one.created_at * 1000), one.id), reverse=order == "desc")
    after = data.draw(st.sampled_from([None, *naive]))
    rest = naive if after is None else naive[naive.index(after) + 1 :]
    ids, more = asked(there, limit=limit, order=order, **({} if after is None else {"after": after.id}))
    assert ids == [one.id for one in rest[:limit]] and more == (len(rest) > limit)


@pytest.mark.parametrize("cursor", ["file-none", "batch_" + "0" * 36, "file-" + "a" * 32, "", "file-" + "g" * 36])
def test_a_cursor_of_no_list_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidRequest, match="after must be an id of this list"):
        asked([Made(new_id("file-", 1), 1)], after=cursor)
