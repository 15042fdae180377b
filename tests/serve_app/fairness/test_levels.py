"""A limit on what a tenant has at once holds over all ingresses, and any of them can use all of it."""

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.config.tenants import TenantConfig
from serve_app.errors import RateLimited
from serve_app.fairness.levels import LevelAnswer, LevelQuestion, Levels
from serve_app.fairness.rate_limits import Allowance, TenantLimits
from tests.harness.eventually import let_others_run


class Deployment:
    """Ingresses of one tenant. Questions and answers take some rounds of the loop; ``asked``: their number."""

    def __init__(self, ingresses: int, most: int, chance: random.Random) -> None:
        self.asked = 0
        self.reachable = True
        self.running = 0
        self._most = most
        self._random = chance
        config = TenantConfig.model_validate({"name": "a", "key_sha256": ["a" * 64], "concurrent_requests": most})
        self.limits = [
            TenantLimits([config], ingresses, levels=Levels(f"i{number}", ingresses, self.ask))
            for number in range(ingresses)
        ]

    async def ask(self, question: LevelQuestion) -> Sequence[LevelAnswer]:
        self.asked += 1
        return await asyncio.gather(*map(self._answer, self.limits, [question] * len(self.limits))) * self.reachable

    async def _answer(self, limits: TenantLimits, question: LevelQuestion) -> LevelAnswer:
        await self.pause()
        answer = limits.levels.told(question)
        await self.pause()
        return answer

    async def pause(self) -> None:
        for _ in range(self._random.randint(0, 5)):
            await let_others_run()

    async def begin(self, ingress: int) -> Allowance:
        """Begin a request. Raises RateLimited."""
        allowance = self.limits[ingress].begin("a")
        await self.pause()
        try:
            await allowance.agree()
        except RateLimited:
            allowance.end(refused=True)
            raise
        self.running += 1
        assert self.running <= self._most
        return allowance

    def end(self, allowance: Allowance) -> None:
        self.running -= 1
        allowance.end()

    async def most_at(self, ingress: int) -> int:
        """Return how many requests one ingress grants now, and end them."""
        begun: list[Allowance] = []
        with pytest.raises(RateLimited) as refused:
            while True:
                begun.append(await self.begin(ingress))
        assert refused.value.reason is not None
        assert (refused.value.reason.limit, refused.value.reason.most) == ("concurrent_requests", self._most)
        for allowance in begun:
            self.end(allowance)
        return len(begun)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 1 << 30))
@example(2, 4, 2859)  # an ingress asks after its answer, which arrives later
@example(2, 2, 233)  # two questions of an ingress overtake each other
def test_the_sum_never_exceeds_the_limit_and_any_ingress_can_use_all_of_it(
    ingresses: int, most: int, seed: int
) -> None:
    """Whatever is under way meanwhile, and also if the limit is less than the number of ingresses. (docs: isolation)"""
    chance = random.Random(seed)
    bursts = [[chance.randint(0, 200), chance.randint(0, 60), chance.randrange(ingresses)] for _ in range(15)]

    async def one(deployment: Deployment, after: int, rounds: int, ingress: int) -> None:
        await let_others_run(after)
        try:
            allowance = await deployment.begin(ingress)
        except RateLimited:
            return
        await let_others_run(rounds)
        deployment.end(allowance)

    async def run() -> None:
        deployment = Deployment(ingresses, most, chance)
        await asyncio.gather(*(one(deployment, *burst) for burst in bursts for _ in range(chance.randint(1, most))))
        for ingress in range(ingresses):
            assert await deployment.most_at(ingress) == most
        assert deployment.asked == 0 or ingresses > 1

    asyncio.run(run())


def test_an_ingress_asks_nobody_while_all_are_within_their_parts() -> None:
    """It asks once to know them. If the others do not answer, it keeps to its part."""

    async def run() -> None:
        deployment = Deployment(2, 6, random.Random(1))
        for _ in range(50):
            deployment.end(await deployment.begin(0))
        assert deployment.asked == 1
        held = [await deployment.begin(0) for _ in range(4)]
        assert deployment.asked == 2, "the fourth is beyond its part"
        with pytest.raises(RateLimited) as refused:
            while True:
                held.append(await deployment.begin(1))
        assert refused.value.reason is not None and refused.value.reason.used == 6
        deployment.reachable = False
        for allowance in held[:4]:
            deployment.end(allowance)
        assert await deployment.most_at(0) == 3

    asyncio.run(run())
