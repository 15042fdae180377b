"""`warmpath replay`: from a file to a verdict, in a sentence where something is missing."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.config.app import AppConfig

RUN = CliRunner()
RATES = ("--prefill-rate", "2000", "--decode-step-ms", "10", "--processes", "1")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of eight conversations that all begin alike, in Mooncake's form."""
    path = tmp_path_factory.mktemp("replay") / "trace.jsonl"
    lines, fresh = [], 100
    for turn in range(6):
        for conversation in range(8):
            ids = [0, 1, *range(fresh + 50 * conversation, fresh + 50 * conversation + 2 + turn)]
            at_ms = 1000 * (20 * turn + 2 * conversation)
            lines.append({"timestamp": at_ms, "input_length": 512 * len(ids), "output_length": 20, "hash_ids": ids})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_setups_side_by_side(trace: Path) -> None:
    done = RUN.invoke(app, ["replay", str(trace), *RATES, "--replicas", "1,2", "--pool-tokens", "50000"])
    assert done.exit_code == 0, done.output
    assert "Simulated" in done.output
    assert re.search(r"estimated_ttft x2.*\d+\.\d%", done.output)
    assert "One cache without a limit would serve" in done.output


def test_json_has_rows_curves_and_a_verdict(trace: Path) -> None:
    done = RUN.invoke(app, ["replay", str(trace), *RATES, "--replicas", "2", "--json"])
    report = json.loads(done.stdout)
    assert report["simulated"] is True
    assert [row["name"] for row in report["rows"]] == ["estimated_ttft", "power_of_two", "round_robin"]
    assert {row["requests"] for row in report["rows"]} == {48}
    assert set(report["curves"]) == {row["name"] for row in report["rows"]}
    assert report["rows"][0]["hit_rate"] >= report["rows"][2]["hit_rate"]


def test_autoscaling_prints_settings_that_load(trace: Path) -> None:
    arguments = ["replay", str(trace), *RATES, "--autoscaling", "--ttft", "3s", "--part", "0.9", "--json"]
    report = json.loads(RUN.invoke(app, arguments).stdout)
    names = [row["name"] for row in report["rows"]]
    assert names == ["ours", "serve", "ray_ttft", "llmd", "fixed", "oracle"]
    assert report["rows"][0]["meets"]
    assert AppConfig(model="demo", **yaml.safe_load(report["settings"])).autoscaling is not None


def test_to_zero_and_back(trace: Path) -> None:
    arguments = ["replay", str(trace), *RATES, "--autoscaling", "--rules", "ours", "--min-replicas", "0", "--json"]
    (row,) = json.loads(RUN.invoke(app, arguments).stdout)["rows"]
    assert row["lost"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the file tells no rates"),
        (["--card", "h100"], "--card needs --model"),
        (["--card", "h1000", "--model", "demo"], "did you mean h100?"),
        ([*RATES, "--policies", "best"], "there is no best"),
        ([*RATES, "--rules", "mine"], "there is no mine"),
        ([*RATES, "--replicas", "two"], "takes whole numbers"),
        ([*RATES, "--ttft", "soon"], "--ttft"),
    ],
)
def test_what_is_missing_is_told(trace: Path, arguments: list[str], said: str) -> None:
    done = RUN.invoke(app, ["replay", str(trace), *arguments])
    assert done.exit_code == 2
    assert said in done.stderr


def test_no_file(tmp_path: Path) -> None:
    done = RUN.invoke(app, ["replay", str(tmp_path / "none.jsonl")])
    assert (done.exit_code, "cannot be read" in done.stderr) == (2, True)


def test_a_recording_is_compared_with_its_simulation_and_its_shadow(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    model = {"engine": "simulated", "policy": "estimated_ttft", "replicas": 2, "pool_tokens": 4096,
             "prefill_tokens_per_s": 1000.0, "decode_step_s": 0.01}  # fmt: skip
    header = {"warmpath_traffic": 1, "recording": "r", "writer": "w", "started_s": 0.0, "block_tokens": 16,
              "models": {"m": model}}  # fmt: skip
    lines: list[dict[str, object]] = [header]
    for number in range(40):
        cached = 0 if number < 2 else 96
        shadow = {"policy": "lmetric", "same": number % 2 == 0, "predicted_tokens": 48}
        lines.append(
            {
                "timestamp": 1000 * number,
                "input_length": 100,
                "output_length": 4,
                "hash_ids": list(range(6)),
                "model": "m",
                "predicted_tokens": cached,
                "cached_tokens": cached,
                "ttft_ms": 5.0 + 100 - cached,
                "duration_ms": 150.0,
                "shadow": shadow,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = json.loads(RUN.invoke(app, ["replay", str(path), "--processes", "1", "--json"]).stdout)
    names = [row["name"] for row in report["rows"]]
    assert names == ["recorded, simulated", "estimated_ttft", "power_of_two", "round_robin", "lmetric"]
    assert report["rows"][0]["hit_rate"] == pytest.approx(report["recorded"][0]["hit_rate"], rel=0.03)
    assert report["rows"][0]["replicas"] == 2
    told = " ".join(report["verdict"])
    assert "The recorded run, simulated" in told
    assert "The shadow lmetric would have chosen another replica for 50% of 40 requests" in told
