"""An ingress' misses are explained beside the answer and counted; a tenant's own requests alone explain its misses."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from router.protocol.block_hash import PrefixScope
from serve_app.cache_misses import detector
from serve_app.cache_misses.detector import FAMILY_PROMPTS, MAX_AT_ONCE, MAX_FAMILIES, MissDetector, PromptMemory
from serve_app.cache_misses.reasons import (
    GRAM,
    MAX_PROMPT_TOKENS,
    Miss,
    SeenPrompt,
    equal_behind,
    is_miss,
    line_in_message,
)
from serve_app.cache_misses.rules import classify, value_there
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.prompts.lock import first_difference

REST = "and these are the rules that all of the answers have to follow, no exception: " * 4


def generation(text: str, tenant: str = "a", lora: str = "", salt: str = "", *, store_kv: bool = True) -> EngineRequest:
    """Return a generation in which each character is a token."""
    return EngineRequest(
        request_id="r",
        token_ids=np.array([ord(char) for char in text], dtype=np.int32),
        block_hashes=b"",
        scope=PrefixScope("m", lora, f"{tenant}/{salt}".encode()),
        root=b"",
        placement_key=text.encode()[:200],
        tenant=tenant,
        sampling=SamplingParams(max_tokens=1),
        store_kv=store_kv,
        system_chars=len(text),
    )


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


class Bench:
    """A detector, its counts, and a clock that advances with each request."""

    def __init__(self) -> None:
        self.counted: list[tuple[str, str, int]] = []
        self.now_s = 0.0
        workers = FairWorkers(Shares({}), threads=2)
        self.detector = MissDetector(decode, workers, PromptMemory(lambda: 3), lambda *miss: self.counted.append(miss))

    async def ask(self, wanted: EngineRequest, cached_tokens: int = 0) -> Miss | None:
        self.now_s += 1
        task = self.detector.observe(wanted, cached_tokens, self.now_s, self.now_s + 0.5)
        return None if task is None else await task

    def run(self, *asked: tuple[EngineRequest, int]) -> list[Miss | None]:
        """Observe the requests one after the other."""

        async def all_of_them() -> list[Miss | None]:
            return [await self.ask(wanted, cached_tokens) for wanted, cached_tokens in asked]

        return asyncio.run(all_of_them())


def reasons(misses: Sequence[Miss | None]) -> list[str | None]:
    return [None if miss is None else miss.reason for miss in misses]


def test_hits_and_requests_that_leave_nothing_are_not_explained() -> None:
    """Only the last hit is remembered; with store_kv false not even the request is."""
    bench = Bench()
    kept, left_out = generation(REST), generation("Private. " + REST, store_kv=False)
    asked = bench.run((kept, len(REST) - 16), (kept, 0), (left_out, 0), (generation("Private. " + REST), 0))
    assert reasons(asked) == [None, "evicted", None, "text"]
    assert bench.counted[0] == ("a", "evicted", len(REST))
    anew = structs.replace(kept, sampling=replace(kept.sampling, prompt_logprobs=0))
    assert reasons(bench.run((anew, 0))) == [None], "it could not have read the cache"
    assert not is_miss(63, 0) and is_miss(64, 0)
    assert not is_miss(10_000, 9_000) and is_miss(10_000, 8_000)


def test_reasons_of_a_day() -> None:
    """Each reason is shown with its cost."""
    bench = Bench()
    _, second, _, adapter, _ = bench.run(
        (generation("Today is 2026-11-21. " + REST), 0),
        (generation("Today is 2026-11-22. " + REST), 16),
        (generation("Today is 2026-11-23. " + REST), 16),
        (generation("Today is 2026-11-23. " + REST, lora="clerk"), 0),
        (generation("Today is 2026-11-23. " + REST, salt="x"), 0),
    )
    assert [reason for _, reason, _ in bench.counted] == ["never_seen", "time", "time", "adapter", "salt"]
    assert second is not None and adapter is not None
    shown = second.shown()
    assert shown["first_difference"] == {"part": "system", "token": 18, "char": 18, "line": 1, "found": "2026-11-22"}
    assert shown["lost_tokens"] == len(REST) + 2 and "last user message" in shown["remedy"]
    assert (adapter.lost_tokens, adapter.shown()["first_difference"]) == (len(REST) + 21, None)


def test_lines_are_counted_in_the_message_not_in_the_template() -> None:
    """Also where the template leaves a message or the space around it out, and where one text is in another."""
    rules = "Be kind.\nAnd brief.\n" + REST + "\nIt is 10:01.\n"
    texts = ("\n\n" + rules, "", "left out", "Be kind.", "\nHello.\nIs it open?")
    prompt = f"<|system|>\n{rules.strip()}<|end|>\n<|user|>\nBe kind.<|end|>\n<|user|>\nHello.\nIs it open?<|end|>\n"
    assert line_in_message(prompt, prompt.index("10:01"), texts) == 2 + rules[: rules.index("10:01")].count("\n") + 1
    assert line_in_message(prompt, prompt.rindex("Be kind"), texts) == 1
    assert line_in_message(prompt, prompt.index("Is it"), texts) == 3
    assert line_in_message("<|user|>\nno messages", 12, ()) == 2


def test_of_several_prompts_the_one_that_differs_last_explains() -> None:
    """Not one with a little more in common after an earlier difference, nor a later one with other rules."""
    other = "Today is sunny, and the harbour is open to any ship with papers and a flag. " * 4
    *_, miss = Bench().run(
        (generation("Today is 2026-11-21. Turn 1. " + REST), 0),
        (generation("Today is 2026-11-22. Turn 2. " + REST), 0),
        (generation(other), 0),
        (generation("Today is 2026-11-21. Turn 2. " + REST), 0),
    )
    assert miss is not None and miss.reason == "id" and miss.first_difference is not None
    assert (miss.first_difference.char, miss.first_difference.found) == (26, "2")


@pytest.mark.anyio
async def test_a_later_answer_explains_nothing() -> None:
    """Two requests with one prompt arrive at once: neither could have read the other's KV."""
    bench = Bench()
    tasks = [bench.detector.observe(generation(REST), 0, 1.0, 2.0 + number) for number in range(MAX_AT_ONCE + 3)]
    assert sum(task is None for task in tasks) == 3
    misses = await asyncio.gather(*filter(None, tasks))
    assert reasons(misses) == ["never_seen"] * MAX_AT_ONCE
    assert [reason for _, reason, _ in bench.counted].count("not_compared") == 3


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.sampled_from(("Today is 2026-11-21. ", "Today is 2026-11-22. ", "Turn 1. ", "Turn 2. ")),
            st.sampled_from(("", "x")),
        ),
        max_size=8,
    )
)
def test_a_tenants_misses_depend_on_its_own_requests_alone(asked: list[tuple[str, str, str]]) -> None:
    """Another tenant's requests in between never change the explanations or the counts. (docs: caching)"""

    def told(only: str) -> tuple[list[Miss | None], list[tuple[str, str, int]]]:
        bench = Bench()
        sent = [(generation(start + REST, tenant, salt=salt), 0) for tenant, start, salt in asked if tenant in only]
        misses = bench.run(*sent)
        mine = [miss for (wanted, _), miss in zip(sent, misses, strict=True) if wanted.tenant == "a"]
        return mine, [count for count in bench.counted if count[0] == "a"]

    assert told("ab") == told("a")


def test_tokens_read_are_not_lost_and_a_few_equal_tokens_are_no_reason() -> None:
    """An eviction costs the unread tokens; fewer than 32 equal tokens after a difference count as never seen."""
    start, other = "Be brief. ", "0123456789abcdefghijklmnopqrstuvwxyz" * 4
    _, evicted = Bench().run((generation(REST), 0), (generation(REST), 16))
    assert evicted is not None and evicted.lost_tokens == len(REST) - 16
    for equal, reason in ((31, "never_seen"), (33, "text")):
        _, miss = Bench().run((generation(start + REST), 0), (generation(start + other + REST[-equal:]), 0))
        assert miss is not None and miss.reason == reason


def prompt(tokens: int, lora: str = "") -> SeenPrompt:
    return SeenPrompt(np.zeros(tokens, dtype=np.int32), PrefixScope("m", lora, b""), 0, 0.0)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.just(0) | st.integers(0, 40), st.integers(0, 5000)), max_size=120),
    st.integers(1000, 200_000),
)
def test_a_tenants_room_is_bounded_and_does_not_depend_on_others(
    added: list[tuple[str, int, int]], max_bytes: int
) -> None:
    """After each prompt it is within the bounds of bytes, prompts and families, as if the tenant were alone.

    docs: caching
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detector, "MAX_TENANT_BYTES", max_bytes)
        both, alone = PromptMemory(lambda: 2), PromptMemory(lambda: 2)
        for tenant, family, tokens in added:
            seen = prompt(tokens, str(family))
            for memory in (both, alone) if tenant == "a" else (both,):
                memory.add(tenant, b"%d" % family, seen)
            assert sum(known.ids.nbytes for known in both.prompts(tenant)) <= max_bytes
            families = Counter(known.cache for known in both.prompts(tenant))
            assert len(families) <= MAX_FAMILIES and max(families.values(), default=0) <= FAMILY_PROMPTS
        assert both.prompts("a") == alone.prompts("a")


def test_a_long_prompt_is_kept_in_part_and_a_tenant_that_is_gone_not_at_all() -> None:
    """Its first tokens are copied, to free the rest. The settings have two tenants, so a third replaces one."""
    long = prompt(MAX_PROMPT_TOKENS + 1)
    assert len(long.ids) == MAX_PROMPT_TOKENS and long.ids.base is None
    memory = PromptMemory(lambda: 2)
    for tenant in "abc":
        memory.add(tenant, b"f", prompt(10))
    assert [len(memory.prompts(tenant)) for tenant in "abc"] == [0, 1, 1]


def test_a_system_prompt_has_a_few_places_and_the_one_used_least_recently_goes_first() -> None:
    memory = PromptMemory(lambda: 1)
    for family in (*range(MAX_FAMILIES), *[0] * 2 * FAMILY_PROMPTS, MAX_FAMILIES):
        memory.add("a", b"%d" % family, prompt(10, str(family)))
    kept = Counter(known.cache[0] for known in memory.prompts("a"))
    assert kept == {**dict.fromkeys(map(str, range(2, MAX_FAMILIES + 1)), 1), "0": FAMILY_PROMPTS}


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_the_first_difference(one: bytes, other: bytes) -> None:
    """Everything before it is equal, and at it something differs or ends, unless both texts are the same."""
    at = first_difference(one, other)
    assert one[:at] == other[:at]
    assert one == other if at == max(len(one), len(other)) else one[at : at + 1] != other[at : at + 1]


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40), st.integers(0, 5))
def test_the_equal_part_behind_agrees_with_a_naive_search(new: list[int], old: list[int], start: int) -> None:
    """It counts runs of eight tokens that the other prompt also has, anywhere after the difference."""
    known = {tuple(old[at : at + GRAM]) for at in range(start, len(old) - GRAM + 1)}
    covered: set[int] = set()
    for at in range(start, len(new) - GRAM + 1):
        if tuple(new[at : at + GRAM]) in known:
            covered.update(range(at, at + GRAM))
    assert equal_behind(np.array(new, dtype=np.int32), np.array(old, dtype=np.int32), start) == len(covered)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("Today is 2026-11-21.", "Today is 2026-11-22.", "time"),
        ("It is Mon, 21 November 2026 now", "It is Tue, 22 November 2026 now", "time"),
        ("2026-11-21T10:00:00Z go", "2026-11-21T10:00:01Z go", "time"),
        ("t=1763800000 x", "t=1763800001 x", "time"),
        ("Turn 3:", "Turn 4:", "id"),
        ("as 6f1c1d1e-0d5f-4c3e-9a53-0a5b8a2a9c11.", "as 6f1c1d1e-0d5f-4c3e-9a53-0a5b8a2a9c12.", "id"),
        ("Mail ada@a.example now", "Mail bob@a.example now", "user"),
        ("You are talking to Ada.", "You are talking to Bob.", "user"),
        ("a  b and so on", "a b and so on", "whitespace"),
        ('x {"a": 1, "b": [2, 3]} y', 'x {"b": [2, 3], "a": 1} y', "reordered"),
        ("- one\n- two\nend", "- two\n- one\nend", "reordered"),
        ('x {"a": "one", "b": "two"} y', 'x {"a": "two", "b": "three"} y', "text"),
        ("Use v1.2.3", "Use v1.2.4", "text"),
        ("It costs $4.90.", "It costs $4.95.", "text"),
        *((f'{"[" * depth}"one"{"]" * depth}', f'{"[" * depth}"two"{"]" * depth}', "text") for depth in (40, 4000)),
    ],
)  # fmt: skip
def test_classes(old: str, new: str, reason: str) -> None:
    """A text that only resembles a date, an id or another order is text."""
    assert classify(new, old, first_difference(new, old)) == reason


def test_the_value_there_is_shown_as_a_whole() -> None:
    """A value is shown whole, though only its last digit differs; a long word is cut."""
    text = "Today is 2026-11-22."
    assert value_there(text, text.index("22")) == "2026-11-22"
    assert len(value_there("x" * 500, 3)) == 64 and value_there("", 0) == ""
