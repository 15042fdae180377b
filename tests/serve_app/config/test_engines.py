"""Settings of vLLM before a replica starts."""

import math
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from typer.testing import CliRunner

from router.protocol.block_hash import PrefixScope
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.cli import main
from serve_app.config import engine
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import AdapterError, AdapterSpec, Engine
from serve_app.replica.engine_factory import MAKERS, make_engine, refused_settings


def test_blocks_are_those_that_vllm_has_on_a_cpu() -> None:
    """The routers' blocks are the same, and a replica reads the settings as they were sent."""
    config = AppConfig(engine="vllm")
    assert config.block_size == 32
    assert AppConfig.model_validate(config.to_json()) == config
    assert AppConfig(engine="vllm", replica_num_gpus=1).block_size == 16
    assert AppConfig(engine="vllm", block_size=64).block_size == 64
    assert AppConfig().block_size == 16


def test_where_vllm_is_not_installed_serve_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve reports it before it starts Ray, and names both remedies."""
    monkeypatch.setattr(engine, "vllm_missing", lambda: True)
    told = CliRunner().invoke(main.app, ["serve", "--engine", "vllm"])
    assert told.exit_code == 2
    assert "pip install '.[vllm]'" in told.output
    assert "make venv-vllm" in " ".join(told.output.split())


def test_an_engine_is_named_in_its_two_tables_alone() -> None:
    """A new engine needs an entry in each, and a folder; nothing else depends on the engine. (ARCHITECTURE.md)"""
    assert tuple(engine.ENGINES) == tuple(MAKERS) == get_args(engine.EngineName)
    root = Path(__file__).parents[3]
    compared = re.compile(
        r"""engine(\.kind)?"?\]? *(==|!=|in|not in) *[("'\[{]|["'](torch|vllm|simulated)["'] *(==|!=)"""
    )
    files = [file for room in ("router", "serve_app", "cluster", "benchmarks") for file in (root / room).rglob("*.py")]
    assert files
    found = {
        f"{file.relative_to(root)}: {line.strip()}"
        for file in files
        for line in file.read_text().splitlines()
        if compared.search(line)
    }
    assert found == set()


LACKING = {"prefixes": {"enable_prefix_caching": True}, "copies": {"prewarm": True}, "saves": {"save_ttl_s": 60}}


@pytest.mark.parametrize("capability", engine.CAPABILITIES)
def test_settings_of_a_capability_that_an_engine_lacks_are_off_and_refused(
    capability: engine.Capability, monkeypatch: pytest.MonkeyPatch, demo_model_path: Path
) -> None:
    """By `warmpath check`, and by each replica."""
    can = engine.ENGINES["simulated"].can - {capability}
    monkeypatch.setitem(engine.ENGINES, "simulated", engine.EngineTraits(can, simulated=True))
    given = {"model": str(demo_model_path), "engine": "simulated", "num_blocks": 32}
    config = AppConfig.model_validate(given)
    assert config.lacking() == AppConfig.model_validate(config.to_json()).lacking() == []
    needing = engine.CAPABILITIES[capability]
    assert {name: getattr(config, name) for name in needing.off} == needing.off
    for name, value in LACKING.get(capability, {}).items():
        wanted = AppConfig.model_validate({**given, name: value})
        assert wanted.lacking() == refused_settings(wanted, on_cpu=True) != []
        assert wanted.lacking()[0].startswith(f"{name}: engine=simulated has no {needing.what}")
        with pytest.raises(ValueError, match=f"{name}: engine=simulated has no"):
            make_engine(wanted, load_checkpoint_info(demo_model_path), lambda _: None)


def test_what_an_engine_does_not_override_refuses() -> None:
    plain = Engine.__dict__
    transfer, adapters = plain["transfer"].fget(None), plain["adapters"].fget(None)
    scope = PrefixScope("m")
    prefix = HashedTokens(scope, np.zeros(4, np.int32), b"")
    assert transfer.export_prefix(prefix) is None
    assert transfer.cache_room().blocks_for(math.inf) == 0
    assert (transfer.hot_prefixes().runs, adapters.loaded, adapters.unload("a@1")) == ((), (), False)
    with pytest.raises(AdapterError):
        adapters.load(AdapterSpec("a", "1", "/a"))
