"""A default stands in one place: changed there, it changes in the config, the engines, the simulation and the docs."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

CHANGED = {
    "router/settings.py": {
        "min_pull_tokens: int = 512": "min_pull_tokens: int = 640",
        "max_holders: int = 16": "max_holders: int = 9",
        "block_size: int = 16": "block_size: int = 24",
        "max_blocks: int = 2_000_000": "max_blocks: int = 3_000_000",
        "no_replica_wait_s: float = 5.0": "no_replica_wait_s: float = 7.0",
        'DEFAULT_POLICY: PolicyName = "estimated_ttft"': 'DEFAULT_POLICY: PolicyName = "lmetric"',
    },
    "serve_app/config/engine.py": {"MAX_MODEL_LEN = 32_768": "MAX_MODEL_LEN = 1234"},
}
"""By file, in an order in which they can be imported: defaults and others."""

LOOK = """
import inspect, json, sys, types
for name, source in json.load(sys.stdin).items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)

from benchmarks.common.virtual_clock import VirtualClock
from benchmarks.end_to_end.affinity import block_size
from benchmarks.routing.workload import BLOCK_SIZE
from benchmarks.simulation.front_door import SimulatedRouter
from benchmarks.simulation.replica import MIN_PULL_TOKENS
from benchmarks.simulation.settings import ClusterSettings, Contender
from router.core import RoutingCore
from router.directory import Directory
from router.settings import RouterSettings
from serve_app.cache_misses.lint import Linter
from serve_app.checkpoints.kv_planner import BLOCK_TOKENS
from serve_app.config.app import AppConfig
from serve_app.config.reference import settings_page
from serve_app.engine.remote.settings import RemoteSettings
from serve_app.engine.settings import EngineSettings
from serve_app.engine.vllm.settings import VllmSettings
from serve_app.tokenization.tokenizer import PromptTokenizer

def routing(settings):
    scoring = settings.scoring
    return [settings.policy, settings.block_size, settings.max_blocks, settings.no_replica_wait_s,
            scoring.min_pull_tokens, scoring.max_holders]

cluster = ClusterSettings()
door = SimulatedRouter("one", ["a"], cluster, Contender("lmetric"), VirtualClock())
rows = [row.split("|")[1:4] for row in settings_page().splitlines() if row.startswith("| `")]
print(json.dumps({
    "router": routing(RoutingCore("one").settings),
    "deployment": routing(RouterSettings.from_json(AppConfig().routing())),
    "simulation": [*routing(door.core.settings)[2:], cluster.max_holders, MIN_PULL_TOKENS],
    "directory": inspect.signature(Directory).parameters["max_blocks"].default,
    "block sizes": [EngineSettings().block_size, RemoteSettings(()).block_size, BLOCK_SIZE, BLOCK_TOKENS,
                    block_size("torch"), *(inspect.signature(made).parameters["block_size"].default
                                           for made in (PromptTokenizer, Linter))],
    "lengths": [made.max_model_len for made in (EngineSettings(), VllmSettings(""), RemoteSettings(()))],
    "docs": {name.strip(" `"): default.strip() for name, _, default in rows},
}))
"""


def test_a_default_changed_in_one_place_changes_everywhere() -> None:
    """The deployment, the engines, the simulation and the reference page have no default of their own."""
    sources = {}
    for path, changes in CHANGED.items():
        source = (ROOT / path).read_text(encoding="utf-8")
        for before, after in changes.items():
            assert source.count(before) == 1, before
            source = source.replace(before, after)
        sources[path.removesuffix(".py").replace("/", ".")] = source
    done = subprocess.run(
        [sys.executable, "-c", LOOK], input=json.dumps(sources), capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["router"] == seen["deployment"] == ["lmetric", 24, 3_000_000, 7.0, 640, 9]
    assert seen["simulation"] == [3_000_000, 7.0, 640, 9, 9, 640]
    assert seen["directory"] == 3_000_000
    assert set(seen["block sizes"]) == {24}
    assert set(seen["lengths"]) == {1234}
    shown = {name: seen["docs"][name] for name in ("policy", "block_size", "min_pull_tokens", "max_holders")}
    assert shown == {"policy": "`lmetric`", "block_size": "24", "min_pull_tokens": "640", "max_holders": "9"}
