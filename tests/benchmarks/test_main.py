"""`python -m benchmarks NAME`: every benchmark has a name, and every name a benchmark."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks

ROOT = Path(benchmarks.__file__).parent


def programs() -> set[str]:
    """Return the modules below ``benchmarks`` that run as programs, except the measured peers."""
    texts = {path.relative_to(ROOT).with_suffix(""): path.read_text() for path in ROOT.rglob("*.py")}
    found = {path for path, text in texts.items() if '\nif __name__ == "__main__":' in text and "\ndef main(" in text}
    return {".".join(path.parts) for path in found if path.parts[0] not in ("peers", "__main__")}


def test_the_table_names_every_benchmark_and_nothing_else() -> None:
    assert sorted(module for module, _ in benchmarks.BENCHMARKS.values()) == sorted(programs())


def said(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[Any, ...]:
    """Return the exit status, stdout and stderr of the command line, run in this process because imports are slow."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as ended:
        benchmarks.main()
    return (ended.value.code, *capsys.readouterr())


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
def test_flags_are_told(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said([name, "--help"], monkeypatch, capsys)
    assert status == 0
    assert out.startswith(f"usage: benchmarks {name} ")
    assert "--json" in out or "--output" in out


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_a_benchmark_ends_with_its_findings_in_plain_english(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary follows the JSON; if the JSON is redirected, the terminal still shows the summary."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", "flooding", "--duration-s", "20"])
    benchmarks.main()
    out, err = capsys.readouterr()
    summary = json.loads(out)["summary"]
    assert summary.startswith("Beside a tenant that floods, the quiet ones keep ")
    assert err.startswith("flooding: with its defaults about 20 seconds")
    assert err.endswith(f"\n{summary}\n")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["simulate", "--trace", "nonesuch.jsonl"], "nonesuch.jsonl cannot be read: No such file or directory"),
        (["ttft", "--model", "no/such/model.gguf"], "there is no model 'no/such/model.gguf'"),
    ],
)
def test_a_missing_file_or_model_is_reported_in_a_sentence(
    arguments: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process exits with this sentence, which Python writes to standard error."""
    status, _, _ = said(arguments, monkeypatch, capsys)
    assert status.startswith("error: ")
    assert why in status


@pytest.mark.parametrize(("arguments", "status"), [(["nonesuch"], 2), ([], 0), (["--help"], 0)])
def test_without_a_known_name_the_list_is_told(
    arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list gives each benchmark's purpose; a wrong name is an error."""
    found, _, err = said(arguments, monkeypatch, capsys)
    assert found == status
    assert ("there is no benchmark 'nonesuch'" in err) == (status == 2)
    for name in benchmarks.BENCHMARKS:
        assert f"\n  {name} " in err
    assert "hit rate of routing policies" in err
