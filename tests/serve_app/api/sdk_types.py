"""The typed dicts of the clients' own packages, walked: which types a place in a body has, and smallest examples."""

import collections.abc
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

import typing_extensions
from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

_WRAPPERS = (
    Annotated, Required, NotRequired, typing_extensions.Required, typing_extensions.NotRequired,
)  # fmt: skip


def bare(kind: Any) -> Any:
    """Return a type without Required, Annotated and the like."""
    while get_origin(kind) in _WRAPPERS:
        kind = get_args(kind)[0]
    return kind


def members(kind: Any) -> Iterator[Any]:
    """Yield the members of a union, nested ones included; any other type is its own member."""
    kind = bare(kind)
    if get_origin(kind) in (Union, UnionType):
        for inner in get_args(kind):
            yield from members(inner)
    else:
        yield kind


def items(kind: Any) -> Iterator[Any]:
    """Yield the typed dicts of a place: those of a union, and those that its lists hold."""
    for member in members(kind):
        if is_typeddict(member):
            yield member
        elif _is_list(member):
            yield from items(get_args(member)[0])


def names(typed: Any) -> tuple[str, ...]:
    """Return the values that a typed dict's field ``type`` may have."""
    found = [value for kind in members(fields(typed).get("type", None)) for value in _literals(kind)]
    return tuple(value for value in found if value is not None)


@cache
def fields(typed: Any) -> dict[str, Any]:
    hints: dict[str, Any] = get_type_hints(typed, include_extras=True)
    return hints


def examples(kind: Any, seen: frozenset[Any] = frozenset()) -> Iterator[Any]:
    """Yield values of a type: a smallest one of each member, and one for each member that a field of it may have."""
    for member in members(kind):
        if is_typeddict(member):
            yield from _objects(member, seen)
        elif _is_list(member):
            yield from ([value] for value in examples(get_args(member)[0], seen))
        else:
            yield from _scalars(member)


def _objects(typed: Any, seen: frozenset[Any]) -> Iterator[dict[str, Any]]:
    least = {name: next(examples(kind, seen)) for name, kind in fields(typed).items() if name in _required(typed)}
    yield least
    if typed in seen:
        return
    for name, kind in fields(typed).items():
        if any(is_typeddict(member) or _is_list(member) for member in members(kind)):
            yield from ({**least, name: value} for value in examples(kind, seen | {typed}))
        elif name == "type":
            yield from ({**least, name: value} for value in names(typed)[1:])


def _required(typed: Any) -> frozenset[str]:
    """Return the required fields; the class itself does not know them, as its annotations are strings."""
    bases = [base for base in getattr(typed, "__orig_bases__", ()) if is_typeddict(base)]
    total = typed.__total__
    own = {
        name for name, kind in fields(typed).items()
        if get_origin(kind) in (Required, typing_extensions.Required)
        or (total and get_origin(kind) not in (NotRequired, typing_extensions.NotRequired))
    }  # fmt: skip
    return frozenset(own).union(*map(_required, bases))


def _is_list(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, collections.abc.Iterable) and not issubclass(origin, dict)


def _literals(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _scalars(kind: Any) -> Iterator[Any]:
    if _literals(kind):
        yield _literals(kind)[0]
    elif kind in (str, int, float, bool):
        yield {str: "x", int: 1, float: 1.0, bool: True}[kind]
    elif kind is not type(None) and not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        yield {}  # an answer's own object is sent in the form of a typed dict
