"""One tenant attacks a real instance: what the others notice, against the bars. Fresh instances, real HTTP.

Alone and under attack are measured in one run, so that ratios count and the machine does not.
`python -m benchmarks hostile --engine simulated --scenarios retry_storm,leavers --json FILE`
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.report import names_of, parser_of, write
from benchmarks.common.server import Checkout
from benchmarks.isolation.hostile.neighbours import neighbours
from benchmarks.isolation.hostile.one_tenant import one_tenant
from benchmarks.isolation.hostile.scenarios import SCENARIOS, SETTINGS, Plan
from benchmarks.isolation.hostile.stage import stage
from serve_app.checkpoints.sources.resolve import resolve_model

ENGINES = ("simulated", "torch")
NEIGHBOURS, ONE_TENANT = "neighbours", "one_tenant"
NAMES = (*SCENARIOS, NEIGHBOURS, ONE_TENANT)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--engine", choices=(*ENGINES, "both"), default="both")
    parser.add_argument("--scenarios", type=names_of(NAMES), default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each attack; goodput has windows of 5 at least")
    parser.add_argument("--minutes", type=float, default=10.0, help=f"of the attacks in {NEIGHBOURS}")
    parser.add_argument("--pairs", type=int, default=5, help=f"runs of each side in {ONE_TENANT}")
    for name, what in (("", "attack this checkout"), ("baseline-", f"compare {ONE_TENANT} with this checkout")):
        parser.add_argument(f"--{name}root", type=Path, help=what)
        parser.add_argument(f"--{name}python", type=Path, help="where it is installed; default: its .venv")
    return parser.parse_args(arguments)


def checkout_of(root: Path | None, python: Path | None) -> Checkout | None:
    """Return the checkout that two flags name; None for this one."""
    if root is None:
        return None
    root = root.absolute()
    return Checkout(root, root / ".venv" / "bin" / "python" if python is None else python.absolute())


def measure(engine: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one scenario on an instance of its own; what broke it is told in its place."""
    checkout = checkout_of(options.root, options.python)
    plan = Plan(options.seconds, resolve_model("demo"))
    try:
        if name == ONE_TENANT:
            baseline = checkout_of(options.baseline_root, options.baseline_python)
            return one_tenant(engine, checkout, baseline, options.pairs)
        with stage(engine, checkout, **SETTINGS.get(name, {})) as made:
            if name == NEIGHBOURS:
                return asyncio.run(neighbours(made, options.minutes))
            return asyncio.run(SCENARIOS[name](made, plan))
    except Exception as error:
        # An instance that an attack has brought down is a finding, and the other scenarios go on.
        return {"broke": f"{type(error).__name__}: {error}", "bars": [], "held": False}


def table_of(results: dict[str, dict[str, Any]]) -> Table:
    """Return a row for each bar."""
    table = Table("engine", "scenario", "bar", "value", "held")
    for engine, scenarios in results.items():
        for name, figures in scenarios.items():
            bars = figures.get("bars") or [{"bar": figures.get("broke") or figures.get("not_measured") or "none"}]
            for bar in bars:
                value = bar.get("value")
                told = {True: "yes", False: "NO", None: "-"}[bar.get("held", figures.get("held"))]
                table.add_row(engine, name, bar["bar"], "-" if value is None else f"{value:.3g}", told)
    return table


def said(results: dict[str, dict[str, Any]]) -> str:
    """Return what was found, in a sentence."""
    held = {f"{engine} {name}": row.get("held") for engine, rows in results.items() for name, row in rows.items()}
    judged = {name: kept for name, kept in held.items() if kept is not None}
    broken = ", ".join(name for name, kept in judged.items() if not kept)
    return f"{sum(judged.values())} of {len(judged)} scenarios held{': all but ' * bool(broken)}{broken}."


def main() -> None:
    """Attack, print a table, write the JSON."""
    options = parse()
    results: dict[str, dict[str, Any]] = {}
    try:
        for engine in ENGINES if options.engine == "both" else (options.engine,):
            for name in options.scenarios:
                print(f"{engine} {name}", file=sys.stderr, flush=True)
                results.setdefault(engine, {})[name] = measure(engine, name, options)
    finally:
        # Of minutes that were cut short, what was measured is told too.
        Console(stderr=True, width=140).print(table_of(results))
        write(options.json, vars(options), results, said(results))


if __name__ == "__main__":
    main()
