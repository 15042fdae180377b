"""Settings of vLLM before a replica starts."""

import re
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from serve_app.cli import main
from serve_app.config import engine
from serve_app.config.app import AppConfig
from serve_app.replica.engine_factory import MAKERS


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
    files = [file for room in ("router", "serve_app", "cluster") for file in (root / room).rglob("*.py")]
    assert files
    found = {
        f"{file.relative_to(root)}: {line.strip()}"
        for file in files
        for line in file.read_text().splitlines()
        if compared.search(line)
    }
    assert found == set()
