"""A tenant's live sessions are limited over all ingresses, whichever of them a session's requests reach."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.config.tenants import TenantConfig
from serve_app.errors import RateLimited
from serve_app.fairness.levels import LevelAnswer, LevelQuestion, Levels
from serve_app.fairness.rate_limits import Allowance, TenantLimits
from serve_app.sessions import SessionLimit
from tests.serve_app.sessions.test_sessions import SIZE, Clock, chain

BLOCKS = 100
"""Of a session's first prompt: at 20,000 tokens a second, its context is worth a wait of some seconds."""


@dataclass
class Prompt:
    request_id: str
    block_hashes: bytes
    token_ids: Sequence[int]
    session: str = ""
    parent: str = ""
    final: bool = False


class Ingresses:
    """Ingresses of tenant a, which may have ``most`` sessions, and of b, which may have any number."""

    def __init__(self, ingresses: int, most: int) -> None:
        self.clock = Clock()
        self.asked = 0
        self._number = 0
        made = ({"name": name, "key_sha256": [name * 64], "concurrent_sessions": limit} for name, limit in
                (("a", most), ("b", None)))  # fmt: skip
        configs = [TenantConfig.model_validate(one) for one in made]
        levels = [Levels(f"i{number}", ingresses, self._ask) for number in range(ingresses)]
        self.session_limits = [SessionLimit(one, SIZE, clock=self.clock) for one in levels]
        self.limits = [
            TenantLimits(configs, ingresses, levels=one, checks=[limit.check], clock=self.clock)
            for one, limit in zip(levels, self.session_limits, strict=True)
        ]
        self.sessions = [limit._sessions for limit in self.session_limits]

    async def _ask(self, question: LevelQuestion) -> Sequence[LevelAnswer]:
        self.asked += 1
        return [limits.levels.told(question) for limits in self.limits]

    def begin(self, ingress: int, word: str, turn: int = 0, tenant: str = "a", *, final: str = "") -> Allowance:
        """Begin a turn of the session ``word``. Raises RateLimited."""
        allowance = self.limits[ingress].begin(tenant)
        self._number += 1
        hashes = chain((word, BLOCKS + turn))
        prompt = Prompt(f"r{self._number}", hashes, range(SIZE * (BLOCKS + turn)), f"named {final or word}")
        prompt.final = bool(final)
        try:
            asyncio.run(allowance.prepared([prompt]))
        except RateLimited:
            allowance.end(refused=True)
            raise
        return allowance

    def turn(self, ingress: int, word: str, turn: int = 0, tenant: str = "a") -> None:
        """Answer a turn at once. Raises RateLimited."""
        self.begin(ingress, word, turn, tenant).end()

    def live(self) -> int:
        return sum(sessions.live("a") for sessions in self.sessions)


@pytest.mark.parametrize("ingresses", [1, 3])
def test_a_session_too_many_is_refused_until_another_is_left(ingresses: int) -> None:
    """The refusal names the limit and the tenant's numbers; a session under way continues. (docs: tenants)"""
    both = Ingresses(ingresses, 2)
    first = both.begin(0, "x")
    both.turn(ingresses - 1, "y")
    with pytest.raises(RateLimited) as refused:
        both.turn(0, "z")
    told = refused.value.shown_reason["reason"]
    assert (told["limit"], told["used"], told["most"]) == ("concurrent_sessions", 2, 2)
    assert told["retry_after_s"] >= 1
    both.turn(ingresses // 2, "y", turn=1)
    both.turn(0, "z", tenant="b")
    assert both.live() == 2
    both.clock.now_s += 130.0
    both.turn(0, "z")
    with pytest.raises(RateLimited):
        both.turn(0, "y", turn=2)  # it left long ago, so it is one more
    first.end()
    assert not any(sessions.live("b") for sessions in both.sessions), "nothing is known of a tenant without the limit"


def test_a_closed_session_makes_room_for_another() -> None:
    """At once, or when its request ends; a session of another name or tenant stays."""
    one = Ingresses(1, 2)
    running = one.begin(0, "x")
    one.turn(0, "y")
    for tenant, name in (("a", "named z"), ("b", "named y"), ("a", ""), ("a", "named x")):
        one.session_limits[0].close(tenant, [name])
    assert one.live() == 2
    one.session_limits[0].close("a", ["named y"])
    one.turn(0, "z")
    with pytest.raises(RateLimited):
        one.turn(0, "y")
    running.end()
    one.turn(0, "y")
    assert one.live() == 2


@pytest.mark.parametrize("ingresses", [1, 2])
def test_the_last_request_of_a_session_takes_its_place(ingresses: int) -> None:
    """With any prompt, by any ingress; then the place is free. Such a request has no place beside other sessions."""
    both = Ingresses(ingresses, 1)
    both.turn(0, "x")
    last = both.begin(ingresses - 1, "bye", final="x")
    assert both.live() == 1
    for word, final in (("y", ""), ("bye", "y")):
        with pytest.raises(RateLimited):
            both.begin(0, word, final=final)
    last.end()
    assert both.live() == 0
    both.turn(0, "y")


@settings(max_examples=150, deadline=None)
@example(1, 1, [(0, word, pause_s) for word, pause_s in zip("vuuuuv", (0, 0, 0, 1, 0, 0.1875), strict=True)])
@example(1, 1, [(0, word, pause_s) for word, pause_s in zip("vuuuuwv", (0, 0, 0, 1, 0, 0.1875, 0), strict=True)])
@given(
    ingresses=st.integers(1, 3),
    most=st.integers(1, 4),
    turns=st.lists(st.tuples(st.integers(0, 2), st.sampled_from("uvwxyz"), st.floats(0.0, 20.0)), max_size=40),
)
def test_sessions_never_exceed_the_limit_and_are_refused_only_at_it(
    ingresses: int, most: int, turns: list[tuple[int, str, float]]
) -> None:
    """Wherever their turns arrive: a session counts once, at the ingress that had its last turn."""
    everywhere = Ingresses(ingresses, most)
    lengths = dict.fromkeys("uvwxyz", 0)
    for ingress, word, pause_s in turns:
        everywhere.clock.now_s += pause_s
        before = everywhere.live()
        try:
            everywhere.turn(ingress % ingresses, word, lengths[word])
        except RateLimited:
            assert before == most
            assert everywhere.live() == most, "a refused request leaves nothing"
            continue
        lengths[word] += 1
        assert everywhere.live() <= most
    assert everywhere.asked == 0 or ingresses > 1
