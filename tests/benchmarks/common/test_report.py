"""Benchmarks' command-line arguments: an unknown name is reported at once, with a list of the known names."""

import argparse
import sys
from collections.abc import Callable

import pytest

from benchmarks.common import report
from benchmarks.common.report import names_of
from benchmarks.end_to_end import affinity
from benchmarks.end_to_end.replay import run as replay
from benchmarks.engine import compare as engine
from router.settings import POLICY_NAMES
from serve_app.config import engine as engine_config


def test_names_are_split_and_none_is_allowed() -> None:
    assert names_of(["a", "b"])("b, a") == ["b", "a"]
    assert names_of(["a"])("") == []


@pytest.mark.parametrize(
    ("main", "flag", "known"),
    [
        (engine.main, "--systems", engine.MODULES),
        (replay.main, "--policies", POLICY_NAMES),
        (affinity.main, "--policies", POLICY_NAMES),
    ],
)
def test_an_unknown_name_ends_a_benchmark_before_it_begins(
    main: Callable[[], None],
    flag: str,
    known: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same holds if a known name comes first."""
    monkeypatch.setattr(sys, "argv", ["benchmark", flag, f"{next(iter(known))},nonesuch"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert f"'nonesuch' is none of {', '.join(known)}" in said


def test_vllm_is_taken_only_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    report.add_engine_flag(parser, "torch", simulated=False)
    monkeypatch.setattr(engine_config, "vllm_missing", lambda: False)
    assert (parser.parse_args([]).engine, parser.parse_args(["--engine", "vllm"]).engine) == ("torch", "vllm")
    monkeypatch.setattr(engine_config, "vllm_missing", lambda: True)
    with pytest.raises(SystemExit):
        parser.parse_args(["--engine", "vllm"])
    assert "make venv-vllm" in capsys.readouterr().err
