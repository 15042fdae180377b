"""The large file's benchmark, with a small file."""

from benchmarks.simulation.large_file import run


def test_it_imports_and_replays_all_settings() -> None:
    findings = run.measure(run.parse(["--requests", "300"]))
    assert len(findings.results["rows"]) == 8
    assert {row["requests"] for row in findings.results["rows"]} == {300}
    assert findings.results["import"]["memory_bytes"] > 0
