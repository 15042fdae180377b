"""Fields of a request that this version does not know: told, a few and in safe characters, or the reason for a 400."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice

from serve_app.errors import InvalidRequest

MAX_TOLD = 8
_UNSAFE = re.compile(r"[^\w.\[\]-]", re.ASCII)


@dataclass(frozen=True, slots=True)
class UnknownField:
    """A field's ``name``, fit for a header, and the known one that may be meant, "" for none."""

    name: str
    meant: str = ""

    @property
    def told(self) -> str:
        """Its name, and what may be meant."""
        return f"{self.name} (did you mean {self.meant}?)" if self.meant else self.name


def unknown_fields(names: Iterable[str], known: Iterable[str]) -> tuple[UnknownField, ...]:
    """Return the first ``MAX_TOLD`` of the fields that a client named so; ``known``: those there are."""
    known = tuple(known)
    shown = (_UNSAFE.sub("?", name[:64]) for name in islice(names, MAX_TOLD))
    return tuple(UnknownField(name, _meant(name, known)) for name in shown)


@lru_cache(1024)
def _meant(name: str, known: tuple[str, ...]) -> str:
    # Clients that send such a field send it with every request, and looking takes as long as reading all the rest.
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.75)), "")


def ignored_fields(fields: Sequence[UnknownField]) -> str:
    """Return the sentence that names fields which had no effect, "" for none."""
    return f"unknown fields ignored: {', '.join(field.told for field in fields)}" if fields else ""


def require_none(fields: Sequence[UnknownField]) -> None:
    """Raise InvalidRequest, as OpenAI words it, where there is an unknown field."""
    if fields:
        first = fields[0]
        remedy = f"did you mean {first.meant!r}?" if first.meant else "leave it out."
        raise InvalidRequest(f"Unknown parameter: {first.name!r}; {remedy}", param=first.name, code="unknown_parameter")
