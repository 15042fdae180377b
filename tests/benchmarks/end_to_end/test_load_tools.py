"""The comparison of load tools with /metrics: a tool of ours against a real instance, and what is said of tools."""

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil
import pytest

from benchmarks.common.harness import Options
from benchmarks.common.report import BenchmarkError
from benchmarks.end_to_end import front_door, load_tools
from benchmarks.end_to_end.load_tools import Load, Seen, agrees, differences, said_of, seen_between
from tests.integration.conftest import alone, eventually

BENCH = f"""#!{sys.executable}
import json, sys
from pathlib import Path
import httpx
url, count = sys.argv[sys.argv.index("--base-url") + 1], int(sys.argv[sys.argv.index("--num-prompts") + 1])
folder = sys.argv[sys.argv.index("--result-dir") + 1]
usages = []
for number in range(count):
    body = {{"model": "demo", "prompt": f"{{number}} is a number", "max_tokens": 5, "ignore_eos": True}}
    usages.append(httpx.post(url + "/v1/completions", json=body, timeout=120).raise_for_status().json()["usage"])
prompts, outputs = (sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens"))
found = {{"completed": count, "mean_ttft_ms": 1e9, "mean_tpot_ms": 1e9}}
found |= {{"total_input_tokens": prompts, "total_output_tokens": outputs}}
(Path(folder) / "result.json").write_text(json.dumps(found))
"""
"""In place of `vllm bench serve`; it measures no times."""
OURS = Seen(10.0, 2.0, 1000.0, 320.0, 310.0)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, str]]:
    """The URL and the mark of an instance as `front_door` starts it; a simulated engine has tokens and gaps as well."""
    with alone(front_door.measured("warmpath", front_door.run.parse(["--replicas", "1"]))) as started:
        yield started


@pytest.fixture
def shared(served: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both benchmarks get this instance instead of their own."""
    measured = front_door.measured

    def measured_here(system: str, options: Options) -> AbstractContextManager[tuple[str, str]]:
        return nullcontext(served) if system == "warmpath" else measured(system, options)

    def instance_here(*flags: str) -> AbstractContextManager[str]:
        assert flags == ("--model", "demo", "--replicas", "1", "--set", "served_model_name=demo")
        return nullcontext(served[0])

    monkeypatch.setattr(front_door, "measured", measured_here)
    monkeypatch.setattr(load_tools, "instance", instance_here)
    monkeypatch.setattr(load_tools, "NAME", "demo")


def test_tokens_and_gaps_agree_and_a_tool_that_fails_costs_no_other_row(
    shared: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three answers of five tokens have twelve gaps; wrong times are told, as is a tool that does not run."""
    tool, out = tmp_path / "bench", tmp_path / "load_tools.json"
    tool.write_text(BENCH)
    tool.chmod(0o755)
    with pytest.raises(SystemExit) as ended:
        load_tools.run([
            "--model", "demo", "--requests", "3", "--vllm", str(tool), "--guidellm", "/bin/false", "--json", str(out),
        ])  # fmt: skip
    results = json.loads(out.read_text())["results"]
    assert results["vllm"]["metrics"]["output_tokens"] == 15
    assert results["vllm"]["metrics"]["gaps"] == 12
    assert [results["vllm"]["differences"][name] for name in ("prompt_tokens", "output_tokens", "gaps")] == [0, 0, 0]
    assert results["vllm"]["differences"]["ttft_ms"] > 1
    assert "status 1" in results["guidellm"]["not_measured"]
    assert ended.value.code == 1 and "guidellm was not measured" in capsys.readouterr().err


def test_a_tool_is_stopped_with_its_processes(tmp_path: Path) -> None:
    script = "sleep 1000 & echo $! > child; wait"
    load = Load("", tmp_path, "/bin/sh", tmp_path, 1, 1, 1, 1, within_s=5)
    with pytest.raises(BenchmarkError, match="none in 5 s"):
        load.run("-c", script)
    child = int((tmp_path / "child").read_text())
    eventually(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("theirs", "agreed", "said"),
    [
        (Seen(10.4, 1.95, 1000.0, 320.0, 310.0), True, "tool: all within 5%."),
        (Seen(10.6, 2.0, 1000.0, 320.0, 310.0), False, "tool: ttft_ms +6.0%."),
        (Seen(10.0, 2.0, 1000.0, 300.0, 310.0), False, "tool: output_tokens -6.2%."),
        (Seen(None, None, 1000.0, None, None), True, "tool: all within 5%."),
    ],
)
def test_differences_beyond_the_bar_are_told(theirs: Seen, agreed: bool, said: str) -> None:
    result = {"differences": differences(theirs, OURS)}
    assert agrees(result, 0.05) is agreed
    assert said_of({"tool": result}, 0.05) == said


def test_means_are_of_the_time_between_two_readings() -> None:
    before = {
        "warmpath_time_to_first_token_seconds_sum": 5.0, "warmpath_time_to_first_token_seconds_count": 1.0,
        "warmpath_inter_token_latency_seconds_sum": 1.0, "warmpath_inter_token_latency_seconds_count": 9.0,
        "warmpath_tenant_prompt_tokens_total": 7.0, "warmpath_tenant_completion_tokens_total": 10.0,
    }  # fmt: skip
    more = dict(zip(before, (0.3, 3.0, 8.7, 87.0, 30.0, 90.0), strict=True))
    seen = seen_between(before, {name: value + more[name] for name, value in before.items()})
    assert seen == Seen(pytest.approx(100.0), pytest.approx(100.0), 30.0, 90.0, 87.0)


def test_a_peer_that_does_not_start_costs_no_row_of_ours(shared: None, tmp_path: Path) -> None:
    out = tmp_path / "front_door.json"
    sizes = "--runs 1 --replicas 1 --clients 2 --max-tokens 4 --short-requests 2 --long-requests 1"
    front_door.run([*sizes.split(), "--vllm-python", "/bin/false", "--json", str(out)])
    results = json.loads(out.read_text())["results"]
    assert results["warmpath"]["spread"]["streamed"]["us_a_token"]["ingress"]["p50"] > 0
    assert "did not come up" in results["vllm serve"]["not_measured"]
