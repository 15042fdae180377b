"""Run the benchmarks of README's table, and write figures.json and the table.

`--only NAME,NAME` measures some rows again. Rows that need vLLM are skipped without `.venv-vllm`, those that need a GPU
without one, and keep their old figures.
"""

import json
import re
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.common.harness import ROOT, Findings, Options, benchmark, names_flag, note
from benchmarks.common.report import BenchmarkError
from benchmarks.gpu.systems import find_card
from benchmarks.simulation.front_door import RAY_PREFIX

FIGURES = ROOT / "benchmarks" / "figures.json"
README = ROOT / "README.md"
PYTHON, VLLM_PYTHON = ".venv/bin/python", ".venv-vllm/bin/python"
BEGIN, END = "<!-- figures: made by `make figures` -->\n", "\n<!-- end of figures -->"
Results = dict[str, Any]


class FigureRow(NamedTuple):
    """One row. ``cell``: makes its figure from the benchmark's results; ``flags``: the benchmark with its flags."""

    question: str
    cell: Callable[[Results], str]
    meaning: str
    flags: str
    python: str = PYTHON


def _ttft(results: Results) -> str:
    return f"**{results['warm_ms_p50'] / 1000:.2f} s**; {results['cold_ms_p50'] / 1000:.1f} s uncached"


def _affinity(results: Results) -> str:
    ours, other = (results[f"{policy}, pulls off"] for policy in ("estimated_ttft", "power_of_two"))
    return f"**{ours['served_from_cache']:.0%}**; Serve's own router: {other['served_from_cache']:.0%}"


def _trace(results: Results) -> str:
    ours, ray = (results[policy]["ttft_mean_s"] for policy in ("estimated_ttft", RAY_PREFIX))
    return f"**{ours:.1f} s**; Ray's prefix router: {ray:.1f} s"


def _agents(results: Results) -> str:
    ours, plain = (results[f"{name}, pool 0.5"]["job_time_mean"] for name in ("warmpath", "first_come"))
    return f"**{ours:.2f}**; first come, first served: {plain:.1f}"


def _flooding(results: Results) -> str:
    return f"**{results['hit_rate_ratio']:.2f}**; without shares: {results['unprotected_hit_rate_ratio']:.2f}"


def _predictions(results: Results) -> str:
    return f"**{results['exact']:.2%}**"


def _vllm(results: Results) -> str:
    ratios = results["ratios"]["vllm_cpu"]
    return f"decode **{ratios['decode_tok_s']:.2f}**, cached TTFT **{ratios['warm_ttft_ms']:.2f}**"


def _gpu(results: Results) -> str:
    rates = {n: _ratio(row, "tokens_per_s") for n, row in results["decode"]["figures"].items()}
    worst = min(rates, key=lambda streams: rates[streams])
    longest, row = list(results["first_token"]["figures"].items())[-1]
    cached = _ratio(row, "warm_ms")
    return f"cached TTFT **{cached:.2f}** ({int(longest) // 1024}k tokens), decode **{rates[worst]:.2f}** (worst)"


def _ratio(row: Results, figure: str) -> float:
    ours, theirs = (row[system][figure]["p50"] for system in ("warmpath", "vllm serve"))
    return float(ours / theirs)


def _routing(results: Results) -> str:
    largest = max(row["blocks"] for row in results["rows"])
    ours, ray = (
        next(row["decision_us_p50"] for row in results["rows"] if row["system"] == system and row["blocks"] == largest)
        for system in ("warmpath", "ray_prefix_tree")
    )
    return f"**{ours:.0f} µs**; Ray's prefix tree: {ray:,.0f} µs"


def _autoscale(results: Results) -> str:
    (row,) = results["rows"]
    return f"**{row['lost'] + row['altered']}** of {row['requests']}, {row['changes']} events, {row['kills']} kills"


ROWS: dict[str, FigureRow] = {
    "ttft": FigureRow(
        "Time to first token, 2,700 cached tokens",
        _ttft,
        "a long document is read once",
        "ttft --model smollm2 --prefix-tokens 2700",
    ),
    "affinity": FigureRow(
        "Repeated prompts found in a cache, 4 replicas",
        _affinity,
        "requests go where their prefix is",
        "affinity --policies estimated_ttft,power_of_two --pulls off",
    ),
    "trace": FigureRow(
        "Mean time to first token, production trace (simulated)",
        _trace,
        "routing pays on real traffic",
        f"simulate --speed 2 --no-parts --policies estimated_ttft {RAY_PREFIX}",
    ),
    "agents": FigureRow(
        "Job time of agents in half the memory (simulated; ideal: 1)",
        _agents,
        "a full cache does not collapse",
        "simulate --trace agents --replicas 2 --pools 0.5",
    ),
    "flooding": FigureRow(
        "Hit rate beside a flood (simulated; undisturbed: 1)",
        _flooding,
        "a neighbour cannot empty your cache",
        "flooding",
    ),
    "autoscale": FigureRow(
        "Answers lost to scaling and kills (simulated)",
        _autoscale,
        "scaling costs none",
        "autoscale --trace saw --arms ours --seconds 150 --requests-per-s 4 --compress 60 --min-replicas 2 --kills 6",
    ),
    "predictions": FigureRow(
        "Cached tokens exactly as predicted, over vLLM",
        _predictions,
        "the router knows the caches",
        "predictions --engine vllm --blocks 512",
        VLLM_PYTHON,
    ),
    "vllm": FigureRow(
        "One replica against plain vLLM (equal: 1)",
        _vllm,
        "tenants and routing cost no speed",
        "engine --threads 1 --systems warmpath_vllm,vllm_cpu --runs 5 --prefix-tokens 2000",
        VLLM_PYTHON,
    ),
    "gpu": FigureRow(
        "One replica on a GPU against `vllm serve`",
        _gpu,
        "known text is not read twice",
        "gpu",
        VLLM_PYTHON,
    ),
    "routing": FigureRow(
        "One routing decision, 64 replicas, a million blocks",
        _routing,
        "the router is not the bottleneck",
        "routing",
    ),
}


def table(figures: dict[str, dict[str, str]]) -> str:
    """Return README's table of the measured rows, with the origin of the figures."""
    lines = ["| measurement | result | for you |", "|---|---|---|"]
    measured = {name: row for name, row in ROWS.items() if name in figures}
    for name, row in measured.items():
        lines.append(f"| {row.question} | {figures[name]['figure']} | {row.meaning} |")
    origins = dict.fromkeys(
        f"{figure['date']} at {figure['commit']} ({figure['machine']})"
        for figure in (figures[name] for name in measured)
    )
    return "\n".join([*lines, "", f"Measured on {'; '.join(origins)}."])


def in_readme(readme: str, figures: dict[str, dict[str, str]]) -> str:
    """Return README with its table replaced."""
    return re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: BEGIN + table(figures) + END, readme, flags=re.DOTALL
    )


def measured(row: FigureRow) -> dict[str, str]:
    """Run a row's benchmark; return its figure with date, commit and machine. Raises BenchmarkError."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [row.python, "-m", "benchmarks", *row.flags.split(), "--json", str(path)]
        if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
            raise BenchmarkError(f"it failed: {' '.join(command)}")
        report = json.loads(path.read_text())
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {
        "figure": row.cell(report["results"]),
        "summary": report["summary"],
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit.stdout.strip(),
        "machine": report.get("card") or report["versions"]["processor"],
    }


@benchmark(__doc__, names_flag("only", ROWS, help_="rows, separated by commas"))
def run(options: Options) -> Findings:
    """Measure the rows; write the JSON after each row, and README at the end."""
    figures: dict[str, dict[str, str]] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name in options.only:
        row = ROWS[name]
        if not (ROOT / row.python).exists():
            note(f"{name}: skipped, since {row.python} is missing (make venv-vllm)")
            continue
        if name == "gpu" and not find_card().name:
            note("gpu: skipped, since this machine has no GPU (docs/how-to/gpus.md)")
            continue
        figures[name] = measured(row)
        FIGURES.write_text(json.dumps(figures, indent=2) + "\n")
    README.write_text(in_readme(README.read_text(), figures))
    return Findings(figures, " ".join(figures[name]["summary"] for name in options.only if name in figures))
