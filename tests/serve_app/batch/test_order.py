"""The order that computes least: equal beginnings run together, every request once, and few beginnings at a time."""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.batch.order import Group, LineRunner, as_given, beginnings, grouped
from tests.harness.eventually import let_others_run

LONG = "m" * 5000
WORDS = "river stone copper garden winter signal harbor window letter orange".split()


def text(seed: int, tokens: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=tokens))


def chat(system: str, question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "demo", "messages": messages, **fields}


def numbers(groups: Sequence[Group]) -> list[int]:
    return [number for group in groups for number in group.numbers]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 600)), max_size=60), st.integers(1, 9))
def test_every_request_is_in_one_group_and_equal_beginnings_are_neighbours(
    shapes: list[tuple[int, int, int]], most: int
) -> None:
    """At each length of a beginning, the requests that have it are in a row."""
    bodies = [chat(text(one, 400) + text(other, 300), text(9, length)) for one, other, length in shapes]
    chains = [beginnings(body) for body in bodies]
    groups = grouped(chains, most)
    order = numbers(groups)
    assert sorted(order) == list(range(len(bodies)))
    assert all(len(group.numbers) <= most for group in groups)
    for length in {len(chain) for chain in chains}:
        seen = [chains[number][:length] for number in order if len(chains[number]) >= length]
        runs = [one for at, one in enumerate(seen) if at == 0 or seen[at - 1] != one]
        assert len(runs) == len(set(runs))


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (chat("s" * 5000, "a"), chat("s" * 5000, "b"), True),
        (chat("s" * 5000, "a"), chat("t" * 5000, "a"), False),
        (chat("s" * 5000, "a"), chat("s" * 5000, "a", cache_salt="x"), False),
        (chat("s" * 5000, "a"), chat("s" * 5000, "a", lora_name="french"), False),
        (chat("s" * 5000, "a"), chat("s" * 5000, "a", temperature=0, max_tokens=9), True),
        ({"prompt": "p" * 5000 + "a"}, {"prompt": "p" * 5000 + "b"}, True),
        ({"system": "s" * 5000, "messages": []}, {"system": "s" * 5000, "messages": [1]}, True),
        ({"input": "i" * 5000, "instructions": "x"}, {"input": "i" * 5000, "instructions": "y"}, False),
        ({"tools": ["t" * 5000], "messages": [1]}, {"tools": ["t" * 5000], "messages": [2]}, True),
        ({"messages": [{"role": "u", "content": LONG}]}, {"messages": [{"content": LONG, "role": "u"}]}, True),
        (chat("hi", "a"), chat("hi", "a"), False),  # too short for a group
    ],
)  # fmt: skip
def test_what_the_prompts_begin_with_decides(one: dict[str, Any], other: dict[str, Any], alike: bool) -> None:
    groups = grouped([beginnings(body) for body in (one, other)])
    assert [group.shared for group in groups] == ([True] if alike else [False])


def computed(order: Sequence[tuple[int, int]], room: int) -> int:
    """Return the beginnings that an LRU cache for ``room`` of them computes. ``order``: (beginning, request)."""
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for beginning, _ in order:
        misses += beginning not in cache
        cache[beginning] = None
        cache.move_to_end(beginning)
        if len(cache) > room:
            cache.popitem(last=False)
    return misses


def test_two_thousand_shuffled_requests_compute_each_beginning_once() -> None:
    """The order in which a runner starts them, four groups at a time, in a cache for ten of fifty beginnings."""
    shuffled = [(beginning, question) for beginning in range(50) for question in range(40)]
    random.Random(1).shuffle(shuffled)
    systems = [text(beginning, 1500) for beginning in range(50)]
    chains = [beginnings(chat(systems[beginning], f"Question {question}?")) for beginning, question in shuffled]
    started: list[tuple[int, int]] = []

    async def work(number: int) -> None:
        started.append(shuffled[number])
        await let_others_run()

    for groups in (grouped(chains), as_given(len(chains))):
        started.clear()
        asyncio.run(LineRunner(work, lambda: 16, lambda: 4).run(groups))
        assert sorted(started) == sorted(shuffled)
        if len(groups) > 1:
            assert computed(started, 10) == 50
        else:
            assert started == shuffled
            assert computed(started, 10) > 1000


def test_the_first_request_of_a_group_is_alone_until_it_is_answered() -> None:
    """So its beginning is computed once; a group without a common one does not wait, and lanes are few."""
    running: dict[int, asyncio.Event] = {}
    most: dict[str, int] = {"all": 0, "lanes": 0}
    chains = [bytes([group]) * 80 for group in range(5) for _ in range(6)] + [b""] * 9

    async def work(number: int) -> None:
        group = number // 6
        if number < 30 and number % 6 == 0:
            assert not {other for other in running if other // 6 == group}
        running[number] = asyncio.Event()
        most["all"] = max(most["all"], len(running))
        most["lanes"] = max(most["lanes"], len({other // 6 for other in running if other < 30}))
        await running[number].wait()
        del running[number]

    async def run() -> None:
        done = asyncio.create_task(LineRunner(work, lambda: 8, lambda: 2).run(grouped(chains)))
        while not done.done():
            for _ in range(20):  # whatever can start starts
                await let_others_run()
            for first in [*running][:1]:
                running[first].set()
        done.result()

    asyncio.run(run())
    assert most["all"] == 8
    assert most["lanes"] <= 4, "two that end, and the next"


def test_a_failure_and_a_cancel_end_all_that_is_in_progress() -> None:
    ended: list[int] = []

    async def work(number: int) -> None:
        try:
            if number == 3:
                raise ValueError("three")
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    with pytest.raises(ValueError, match="three"):
        asyncio.run(LineRunner(work, lambda: 4, lambda: 2).run(as_given(9)))
    assert sorted(ended) == [0, 1, 2, 3]
