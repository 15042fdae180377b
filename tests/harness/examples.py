"""How many examples a law of Hypothesis gets: all that it asks for in `make test-laboratory`, elsewhere the half."""

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

FEWEST = 25
"""A law that asks for no more gets them."""
SETTINGS = "_hypothesis_internal_use_settings"
"""Hypothesis has no public name for a function's."""


def share_examples(items: Iterable[pytest.Item]) -> None:
    """Give each law the half of its examples. Every run draws others, so that the runs of a day try them all."""
    if os.environ.get("WARMPATH_WHOLE_LABORATORY"):
        return
    laws = {(id(law), name): (law, name) for item in items for law, name in _laws(item)}
    for law, name in laws.values():
        given: settings = getattr(law, name)
        fewer = max(given.max_examples // 2, min(given.max_examples, FEWEST))
        setattr(law, name, settings(given, max_examples=fewer))


def _laws(item: pytest.Item) -> Iterable[tuple[Any, str]]:
    """Yield what has the settings of an item, if it is a law: a function, or the class of a state machine."""
    function, machine = getattr(item, "function", None), getattr(item, "cls", None)
    if isinstance(getattr(machine, "settings", None), settings):
        yield machine, "settings"
    elif function is not None and is_hypothesis_test(function):
        yield getattr(function, "__func__", function), SETTINGS
