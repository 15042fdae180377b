"""docs/engines.md names every part of the engine's contract, once, and says of each engine whether it has it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from router.protocol.block_hash import PrefixScope
from serve_app.engine.protocol import Engine, EngineRequest, SamplingParams, TokenRules
from serve_app.engine.vllm.refusals import TABLE, refuse_unmapped

PAGE = Path(__file__).parents[1] / "docs/engines.md"
REFUSED = "Settings that vLLM refuses"
_STATE = re.compile(r"^(yes|no|refused)(: .+)?$")


def tables() -> dict[str, dict[str, list[str]]]:
    """Return the page's tables by heading: a row's first cell, without its backquotes, and the others."""
    by_heading: dict[str, dict[str, list[str]]] = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        heading, *lines = part.splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        assert len({row[0] for row in rows}) == len(rows), f"a row of {heading!r} is there twice"
        if rows:
            by_heading[heading] = {name if heading == REFUSED else name.strip("`"): cells for name, *cells in rows[2:]}
    return by_heading


def names_of(heading: str) -> set[str]:
    return set(next(rows for title, rows in tables().items() if heading in title))


def test_every_cell_says_yes_no_or_refused() -> None:
    """Of each of the three engines; behind it there may be words."""
    for heading, rows in tables().items():
        if heading == REFUSED:
            continue
        for name, cells in rows.items():
            assert len(cells) == 3 and all(_STATE.match(cell) for cell in cells), (heading, name)


def test_the_page_names_every_part_of_the_contract() -> None:
    """Who adds to the contract says what each engine does with it."""
    members = {name for name, _ in inspect.getmembers(Engine) if not name.startswith("_")}
    assert names_of("(`Engine`)") == members
    assert names_of("`EngineRequest`") == {field.name for field in fields(EngineRequest)}
    assert names_of("`SamplingParams`") == {
        field.name for kind in (SamplingParams, TokenRules) for field in fields(kind)
    }


def test_the_page_names_every_setting_that_vllm_refuses() -> None:
    """And none that it takes."""
    named = [name for row in tables()[REFUSED] for name in re.findall(r"`([^`]+)`", row)]
    assert sorted(named) == sorted(name for refusal in TABLE for name in refusal.settings)


def test_what_the_page_says_is_refused_of_a_request_is() -> None:
    """By vLLM's engine, before it takes the request."""
    plain = EngineRequest("r", np.array([1], np.int32), PrefixScope("m"), b"r" * 16, SamplingParams(1))
    asked = {
        "scope": replace(plain, scope=PrefixScope("m", public_blocks=1)),
        "store_kv": replace(plain, store_kv=False),
    }
    refuse_unmapped(plain)
    for request in asked.values():
        with pytest.raises(ValueError, match="engine=vllm"):
            refuse_unmapped(request)
    rows = next(rows for title, rows in tables().items() if "`EngineRequest`" in title)
    assert {name for name, (_, _, vllm) in rows.items() if "refused" in vllm} == asked.keys()
