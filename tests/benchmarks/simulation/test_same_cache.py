"""The simulator uses a cache only as replicas do, so no figure rests on behaviour that the product lacks."""

import ast
from collections.abc import Iterator
from pathlib import Path

from serve_app.cache.prefix.prefix_cache import PrefixCache

ROOT = Path(__file__).parents[3]


def attributes(folder: Path, *, without: str = "-") -> Iterator[tuple[str, str]]:
    """Yield (owner's name, attribute) for every attribute that the modules below ``folder`` use."""
    for path in sorted(folder.rglob("*.py")):
        if not path.is_relative_to(folder / without):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    yield getattr(node.value, "attr", getattr(node.value, "id", "")), node.attr


def test_the_simulator_uses_nothing_of_the_cache_that_no_replica_uses() -> None:
    """Every cache member that the simulator uses is also used by the product, on a cache or on its pool.

    docs: decisions
    """
    members = {name for name in dir(PrefixCache(1, 1)) if not name.startswith("_")}
    simulated = {use for room in ("simulation", "isolation") for use in attributes(ROOT / "benchmarks" / room)}
    product = set(attributes(ROOT / "serve_app", without="cache"))
    called = {name for _, name in simulated} & members
    assert {"match", "publish"} <= called, "the simulator should use the real cache"
    assert called <= {name for holder, name in product if holder in ("cache", "_cache")}
    of_pools = {name for name in dir(PrefixCache(1, 1).pool) if not name.startswith("_")}
    pooled = [{name for holder, name in side if holder == "pool"} & of_pools for side in (simulated, product)]
    assert pooled[0] <= pooled[1]
