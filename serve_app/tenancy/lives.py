"""Lives of names: a tenant that is added under a name that another tenant had is a tenant of its own, `acme~2`.

Caches, files, counters and limits know a tenant by the name of its life alone, so whatever keeps something for one
finds nothing of an earlier one. Operators and settings use the plain name, which is that of its last life.
"""

from collections.abc import Collection, Iterable

import msgspec

from serve_app.tenants import DEFAULT_TENANT, life_name

MAX_NAMES = 10_000
"""The names that are known at once; of more, those that ended first go, and unknown names then begin above them."""


class Life(msgspec.Struct, omit_defaults=True):
    """The last life of a name. ``ended``: its tenant was removed."""

    number: int = 1
    ended: bool = False


class Lives(msgspec.Struct, omit_defaults=True):
    """The last life of each name, in the order of their changes. ``first``: the number of a name that has none here."""

    names: dict[str, Life] = msgspec.field(default_factory=dict)
    first: int = 1

    def of(self, name: str) -> str:
        """Return the tenant that bears a name now; if its last life has ended: that would, if it was declared."""
        life = self.names.get(name)
        return life_name(name, self.first if life is None else life.number + life.ended)

    def begin(self, name: str, *, again: bool = False) -> None:
        """A tenant of this name begins: a new one, or (``again``) the last one that bore it."""
        life = self.names.pop(name, None)
        if life is not None:
            number = life.number if again else life.number + 1
        elif name == DEFAULT_TENANT and not again:  # an open deployment's clients were this tenant
            number = max(self.first, 2)
        else:
            number = self.first
        self.names[name] = Life(number)

    def end(self, name: str) -> None:
        """The tenant of this name ends."""
        life = self.names.pop(name, None) or Life(self.first)
        self.names[name] = Life(life.number, ended=True)

    def unknown(self, declared: Iterable[str]) -> list[str]:
        """Return the declared names that ``declare`` would change."""
        return [name for name in declared if (life := self.names.get(name)) is None or life.ended]

    def declare(self, declared: Iterable[str]) -> None:
        """The settings have these names: each is that of a tenant now, ``of`` it."""
        for name in self.unknown(declared):
            life = self.names.pop(name, None)
            self.names[name] = Life(self.first if life is None else life.number + 1)

    def bound(self, kept: Collection[str]) -> None:
        """Forget the names that changed first, without ``kept``, until there are at most ``MAX_NAMES``."""
        for name in list(self.names):
            if len(self.names) <= MAX_NAMES:
                return
            if name not in kept:
                self.first = max(self.first, self.names.pop(name).number + 1)
