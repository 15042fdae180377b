"""`python -m benchmarks NAME`: every benchmark has a name, and every name a benchmark."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.common.harness import apart, in_turns, rows_of, spreads
from benchmarks.common.report import BenchmarkError

ROOT = Path(benchmarks.__file__).parent


def programs() -> set[str]:
    """Return the modules below ``benchmarks`` that have one."""
    texts = {path.relative_to(ROOT).with_suffix(""): path.read_text() for path in ROOT.rglob("*.py")}
    return {".".join(path.parts) for path, text in texts.items() if "\n@benchmark(" in text}


def test_the_table_names_every_benchmark_and_nothing_else() -> None:
    assert sorted(module for module, _ in benchmarks.BENCHMARKS.values()) == sorted(programs())


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, ...]:
    """Return the exit status, stdout and stderr of the command line, run in this process because imports are slow."""
    with pytest.raises(SystemExit) as ended:
        benchmarks.main(arguments)
    return (ended.value.code, *capsys.readouterr())


@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
def test_flags_are_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said([name, "--help"], capsys)
    assert status == 0
    assert out.startswith(f"usage: benchmarks {name} ")
    assert "--json" in out or "--output" in out


def test_a_benchmark_ends_with_its_findings_in_plain_english(capsys: pytest.CaptureFixture[str]) -> None:
    """The summary follows the JSON; if the JSON is redirected, the terminal still shows the summary."""
    benchmarks.main(["flooding", "--duration-s", "5"])
    out, err = capsys.readouterr()
    report = json.loads(out)
    summary = report["summary"]
    assert report["simulated"] and report["host"]["cores"]
    assert summary.startswith("Beside a tenant that floods, the quiet ones keep ")
    assert err.startswith("flooding: with its defaults about 20 seconds")
    assert err.endswith(f"\n{summary}\n")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["simulate", "--trace", "nonesuch.jsonl"], "nonesuch.jsonl cannot be read: No such file or directory"),
        (["ttft", "--model", "no/such/model.gguf"], "there is no model 'no/such/model.gguf'"),
    ],
)
def test_a_missing_file_or_model_is_reported_in_a_sentence(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process exits with this sentence, which Python writes to standard error."""
    status, _, _ = said(arguments, capsys)
    assert status.startswith("error: ")
    assert why in status


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(["load_tools"], "give the path of at least one tool"), (["ttft", "--warm", "4"], "--warm must be at least 5")],
)
def test_flags_that_measure_nothing_are_refused_with_the_usage(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = said(arguments, capsys)
    assert status == 2
    assert f"usage: benchmarks {arguments[0]} " in err and why in err


def test_runs_take_turns_and_a_failing_system_loses_its_own_row(capsys: pytest.CaptureFixture[str]) -> None:
    turns: list[str] = []

    def turn(name: str, run: int) -> dict[str, float]:
        turns.append(name)
        return {"x": float(run)}

    rows = in_turns(["a", "b"], 3, turn, alternate=True)
    assert turns == ["a", "b", "b", "a", "a", "b"]
    assert spreads(rows["a"])["x"]["p50"] == 1.0

    def measure(name: str) -> dict[str, float]:
        if name == "b":
            raise BenchmarkError("b is away")
        return {"x": 1.0}

    assert rows_of("ab", measure) == {"a": {"x": 1.0}, "b": {"not_measured": "b is away"}}
    assert apart("benchmarks.nonesuch", {}, quiet=True)["not_measured"].endswith("No module named benchmarks.nonesuch")


@pytest.mark.parametrize(("arguments", "status"), [(["nonesuch"], 2), ([], 0), (["--help"], 0)])
def test_without_a_known_name_the_list_is_told(
    arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list gives each benchmark's purpose; a wrong name is an error."""
    found, _, err = said(arguments, capsys)
    assert found == status
    assert ("there is no benchmark 'nonesuch'" in err) == (status == 2)
    for name in benchmarks.BENCHMARKS:
        assert f"\n  {name} " in err
    assert "hit rate of routing policies" in err
