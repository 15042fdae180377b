"""``--engine``: what is not installed is an error that says what to do."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.common import report
from serve_app.config import engine


@pytest.mark.parametrize("missing", [True, False])
def test_vllm_is_taken_only_where_it_is_installed(
    missing: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "vllm_missing", lambda: missing)
    parser = argparse.ArgumentParser()
    report.add_engine_flag(parser, ["torch", "vllm"], "torch")
    assert parser.parse_args([]).engine == "torch"
    if not missing:
        assert parser.parse_args(["--engine", "vllm"]).engine == "vllm"
        return
    with pytest.raises(SystemExit):
        parser.parse_args(["--engine", "vllm"])
    assert "make venv-vllm" in capsys.readouterr().err
