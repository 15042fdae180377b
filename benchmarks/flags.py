"""Flags that several benchmarks have. Knows argparse only."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse ``type`` for names from ``known``, separated by commas; "" is none of them.

    It raises ArgumentTypeError for any other name, so that a wrong one is told before anything runs.
    """

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse
