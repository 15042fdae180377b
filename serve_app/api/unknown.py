"""Unknown fields of a request: a few are reported to the client in safe characters, or the request fails with 400."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice

from serve_app.errors import InvalidRequest

MAX_TOLD = 8
_UNPRINTABLE = re.compile(r"[^ -~]")
_UNSAFE = re.compile(r"[^\w.\[\]-]", re.ASCII)


@dataclass(frozen=True, slots=True)
class UnknownField:
    """An unknown field. ``name`` is safe in a header; ``meant`` is the known field that it resembles, "" for none."""

    name: str
    meant: str = ""

    @property
    def told(self) -> str:
        """The name, with the suggested field where there is one."""
        return f"{self.name} (did you mean {self.meant}?)" if self.meant else self.name


def unknown_fields(names: Iterable[str], known: Iterable[str]) -> tuple[UnknownField, ...]:
    """Return the first ``MAX_TOLD`` of a client's unknown fields; ``known`` lists the supported names."""
    known = tuple(known)
    shown = (_UNSAFE.sub("?", name[:64]) for name in islice(names, MAX_TOLD))
    return tuple(UnknownField(name, _meant(name, known)) for name in shown)


@lru_cache(1024)
def _meant(name: str, known: tuple[str, ...]) -> str:
    # Clients repeat an unknown field in every request, and the search takes as long as parsing the rest of the body.
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.75)), "")


def ignored_fields(fields: Sequence[UnknownField]) -> str:
    """Return a sentence that lists the ignored fields, "" for none."""
    return f"unknown fields ignored: {', '.join(field.told for field in fields)}" if fields else ""


def not_enforced(constraints: Sequence[str]) -> str:
    """Return a sentence that lists the first constraints of schemas that an answer may break, "" for none."""
    shown = [_UNPRINTABLE.sub("?", constraint[:160]) for constraint in constraints[:MAX_TOLD]]
    more = f" and {len(constraints) - MAX_TOLD} more" if len(constraints) > MAX_TOLD else ""
    return f"not enforced: {', '.join(shown)}{more}" if shown else ""


def require_none(fields: Sequence[UnknownField]) -> None:
    """Raise InvalidRequest, in OpenAI's wording, if there is an unknown field."""
    if fields:
        first = fields[0]
        remedy = f"did you mean {first.meant!r}?" if first.meant else "leave it out."
        raise InvalidRequest(f"Unknown parameter: {first.name!r}; {remedy}", param=first.name, code="unknown_parameter")
