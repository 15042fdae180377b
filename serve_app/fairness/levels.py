"""The home of a limit on what a tenant has at once: counted where it is, and added up over all ingresses.

An ingress counts a request first, and then asks whether it fits. Within its even part of the limit it asks nobody, as
long as it heard of no ingress above its part. Otherwise it tells all others its number, and adds up theirs. So the sum
never exceeds the limit, and one ingress alone can use all of it. Two that ask for the last place in the same moment
may both be refused. If the others do not answer, an ingress has its even part, at least 1.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class LevelQuestion:
    """The ``number``-th question of an ingress to all: it has ``used`` for the tenant.

    ``what``: the request that it is about, for limits that know more.
    """

    ingress: str
    number: int
    tenant: str
    limit: str
    used: int
    what: Any = None


@dataclass(frozen=True, slots=True)
class LevelAnswer:
    """What another ingress has now. ``moved``: it had counted what was asked about, and no longer does."""

    ingress: str
    used: int
    moved: bool = False


CountLevel = Callable[[str, Any], tuple[int, bool]]
"""(tenant, what) -> what this ingress has, without what another one asks about, and whether it had that."""

AskIngresses = Callable[[LevelQuestion], Awaitable[Sequence[LevelAnswer]]]
"""Asks every ingress, also this one. Returns nothing if some do not answer in time."""


async def nobody(_: LevelQuestion) -> Sequence[LevelAnswer]:
    """Ask nobody."""
    return ()


class _Told(NamedTuple):
    """What an ingress has, as it told last. ``seen``: the questions seen here until then; ``number``: of its latest."""

    used: int
    seen: int = 0
    number: int = 0


class Levels:
    """One ingress' part of the home; its ``name`` is one of ``ingresses``. ``counts``: by the limit's name."""

    def __init__(self, name: str = "", ingresses: int = 1, ask: AskIngresses = nobody) -> None:
        self.counts: dict[str, CountLevel] = {}
        self._name = name
        self._ingresses = ingresses
        self._ask = ask
        self._others: dict[tuple[str, str], dict[str, _Told]] = {}
        """By tenant and limit, the other ingresses; one with the name "" stands for all while they are not known."""
        self._seen = self._questions = 0

    def told(self, question: LevelQuestion) -> LevelAnswer:
        """Answer an ingress, and remember its number."""
        reports, asker = self._others.get((question.tenant, question.limit)), question.ingress
        # Questions may overtake each other.
        if reports is not None and asker != self._name and question.number > reports.get(asker, _Told(0)).number:
            self._seen += 1
            reports[asker] = _Told(question.used, self._seen, question.number)
        used, moved = self.counts[question.limit](question.tenant, question.what)
        return LevelAnswer(self._name, used, moved)

    async def total(self, tenant: str, limit: str, most: int, place: int, what: Any = None) -> int:
        """Return what a tenant has, with its request: over ``most`` if that does not fit. Others' part may be missing.

        ``place``: the tenant's number here when the request was counted. ``what``: it may continue what another ingress
        counts, and fits if it does.
        """
        key = tenant, limit
        all_here, _ = self.counts[limit](tenant, None)
        here, part = min(all_here, place), most // self._ingresses
        if self._ingresses == 1:
            return here
        reports = self._others.setdefault(key, {"": _Told(part + 1)})
        if what is None and here <= part and all(report.used <= part for report in reports.values()):
            return here
        self._questions += 1
        seen, question = self._seen, LevelQuestion(self._name, self._questions, tenant, limit, all_here, what)
        answers = await self._ask(question)
        if not answers:
            return here if here <= max(1, part) else most + 1
        reports, self._others[key] = self._others[key], {}
        for answer in (answer for answer in answers if answer.ingress != self._name):
            report = reports.get(answer.ingress, _Told(0))
            # It may have asked meanwhile, after its answer.
            used = max(report.used, answer.used) if report.seen > seen else answer.used
            self._others[key][answer.ingress] = report._replace(used=used)
        if any(answer.moved for answer in answers):
            return min(here, most)
        return here + sum(report.used for report in self._others[key].values())
