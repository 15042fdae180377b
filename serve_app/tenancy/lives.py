"""Lives of names: a tenant that is added under a name that another tenant had is a tenant of its own, `acme~2`.

Caches, files, counters and limits know a tenant by the name of its life alone, so whatever keeps something for one
finds nothing of an earlier one. Operators and settings use the plain name, which is that of its last life.
"""

from collections.abc import Collection

import msgspec

from serve_app.tenants import DEFAULT_TENANT

MAX_NAMES = 10_000
"""The names that are known at once; of more, those that changed first go, and unknown names then begin above them."""


_ENDED_S = -1.0
"""Instead of the time at which a tenant was added: it was removed."""


class Life(msgspec.Struct, omit_defaults=True, frozen=True):
    """The last life of a name. ``added_s``: when its tenant was added, None: it is of the settings.

    It has ended once no tenant was added then. So it has ended too if a release that knows no lives removed it.
    """

    number: int = 1
    added_s: float | None = None


class Lives(msgspec.Struct, omit_defaults=True):
    """The last life of each name, in the order of their changes. ``first``: the number of a name that has none here."""

    names: dict[str, Life] = msgspec.field(default_factory=dict)
    first: int = 1

    def number(self, name: str, added_s: float | None = None) -> int:
        """Return the number of a tenant that was added at ``added_s``, None: of one of the settings.

        If it is not the one that is known, it is the next.
        """
        life = self.names.get(name)
        return self.first if life is None else life.number + (life != Life(life.number, added_s))

    def begin(self, name: str, added_s: float, *, again: bool = False) -> int:
        """Return the number of a tenant that is added: a new one, or (``again``) that of the last one of its name.

        An attempt that is made again, as another change came between, has the number that it had.
        """
        life = self.names.get(name)
        if life is not None:
            same = again or life == Life(life.number, added_s)
            number = life.number if same else life.number + 1
        elif name == DEFAULT_TENANT and not again:  # an open deployment's clients were this tenant
            number = max(self.first, 2)
        else:
            number = self.first
        self._put(name, Life(number, added_s))
        return number

    def end(self, name: str) -> None:
        """The tenant is removed: one of its name that is added at the same moment is another one."""
        if (life := self.names.get(name)) is not None:
            self._put(name, Life(life.number, _ENDED_S))

    def keep(self, name: str, number: int, added_s: float | None) -> None:
        """There is this tenant."""
        life = self.names.get(name)
        if life is None or (life.number <= number and life != Life(number, added_s)):
            self._put(name, Life(number, added_s))

    def bound(self, kept: Collection[str]) -> None:
        """Forget the names that changed first, without ``kept``, until there are at most ``MAX_NAMES``."""
        for name in list(self.names):
            if len(self.names) <= MAX_NAMES:
                return
            if name not in kept:
                self.first = max(self.first, self.names.pop(name).number + 1)

    def _put(self, name: str, life: Life) -> None:
        self.names.pop(name, None)
        self.names[name] = life
