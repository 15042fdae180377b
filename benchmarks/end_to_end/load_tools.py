"""Public tools that load or score a server: their times and token counts beside this server's /metrics.

Each tool runs from its own environment, given as a path; a tool without one is left out. Times agree on a quiet machine
only: a tool sees its own process's delays as well.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from tokenizers import Tokenizer

from benchmarks.common.harness import Findings, FlagError, Options, benchmark, flag, note, rows_of
from benchmarks.common.report import BenchmarkError, metric_sum
from benchmarks.common.server import instance
from serve_app.checkpoints.sources import resolve_model

TTFT, ITL = "warmpath_time_to_first_token_seconds", "warmpath_inter_token_latency_seconds"
PROMPT, OUTPUT = "warmpath_tenant_prompt_tokens_total", "warmpath_tenant_completion_tokens_total"
NAME = "served"
VLLM = """
import sys
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args(sys.argv[1:]))
"""
"""`vllm bench serve`; the command itself does not start in vLLM's CPU build, which has another package name."""
SCORED = [
    {"question": f"{first} plus {second} is", "choices": [str(first + second), str(first + second + 1)], "gold": 0}
    for first in range(1, 6)
    for second in range(1, 5)
]
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one side saw: mean times in ms (None: unknown), sums of tokens, and of gaps between tokens of an answer."""

    ttft_ms: float | None
    itl_ms: float | None
    prompt_tokens: float | None
    output_tokens: float | None
    gaps: float | None


@dataclass(frozen=True, slots=True)
class Load:
    """The server and the load that every tool makes: ``command`` runs it, results go to ``folder``."""

    url: str
    model: Path
    command: str
    folder: Path
    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    within_s: float

    def run(self, *arguments: object) -> None:
        """Run the tool, and stop what it leaves running.

        Raises BenchmarkError with the end of its output if it fails or needs more than ``within_s``.
        """
        log = self.folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [self.command, *map(str, arguments)], cwd=self.folder, stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                status: int | str = process.wait(self.within_s)
            except subprocess.TimeoutExpired:
                status = f"none in {self.within_s:g} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status != 0:
            raise BenchmarkError(f"{self.command} ended with status {status}:\n{log.read_text()[-3000:]}")

    def result(self, pattern: str) -> Any:
        """Return a JSON file that the tool has written."""
        files = sorted(self.folder.rglob(pattern))
        if not files:
            raise BenchmarkError(f"{self.command} wrote no {pattern}")
        return json.loads(files[0].read_text())


def vllm_bench(load: Load) -> Seen:
    """`vllm bench serve`; ``command`` is a Python that has vLLM."""
    load.run(
        "-c", VLLM, "--backend", "openai", "--base-url", load.url, "--endpoint", "/v1/completions", "--model", NAME,
        "--tokenizer", load.model, "--dataset-name", "random", "--random-input-len", load.prompt_tokens,
        "--random-output-len", load.output_tokens, "--num-prompts", load.requests, "--max-concurrency",
        load.concurrency, "--ignore-eos", "--ready-check-timeout-sec", 0, "--percentile-metrics", "ttft,tpot,itl",
        "--save-result", "--result-dir", load.folder, "--result-filename", "result.json",
    )  # fmt: skip
    result = load.result("result.json")
    if result["completed"] != load.requests:
        raise BenchmarkError(f"vllm bench: {result['completed']} of {load.requests} requests were completed")
    prompts, outputs = result["total_input_tokens"], result["total_output_tokens"]
    return Seen(result["mean_ttft_ms"], result["mean_tpot_ms"], prompts, outputs, outputs - load.requests)


def guidellm(load: Load) -> Seen:
    """`guidellm run`."""
    load.run(
        "run", "--backend",
        f"kind=openai_http,target={load.url},model={NAME},request_format=/v1/completions",
        "--profile", f"kind=concurrent,streams={load.concurrency}",
        "--constraint", f"kind=max_requests,count={load.requests}",
        "--tokenizer", f"kind=hf_auto,model={load.model}",
        "--data",
        f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}",
        "--output", f"kind=json,path={load.folder / 'result.json'}", "--disable-console",
    )  # fmt: skip
    metrics = load.result("result.json")["benchmarks"][0]["metrics"]

    def of(name: str, what: str) -> float:
        return float(metrics[name]["successful"][what])

    return Seen(
        of("time_to_first_token_ms", "mean"),
        of("inter_token_latency_ms", "mean"),
        of("prompt_token_count", "total_sum"),
        of("output_token_count", "total_sum"),
        of("output_token_count", "total_sum") - load.requests,
    )


def aiperf(load: Load) -> Seen:
    """`aiperf profile`; by itself it counts the tokens of the answer's text, which is not always read as written."""
    load.run(
        "profile", "--model", NAME, "--url", load.url, "--endpoint-type", "completions", "--streaming", "--tokenizer",
        load.model, "--isl", load.prompt_tokens, "--isl-stddev", 0, "--osl", load.output_tokens, "--osl-stddev", 0,
        "--extra-inputs", "ignore_eos:true", "--request-count", load.requests, "--concurrency", load.concurrency,
        "--artifact-dir", load.folder, "--ui", "none", "--use-server-token-count", "--no-gpu-telemetry",
        "--no-server-metrics",
    )  # fmt: skip
    result = load.result("profile_export_aiperf.json")
    return Seen(
        result["time_to_first_token"]["avg"],
        result["inter_token_latency"]["avg"],
        result["total_isl"]["avg"],
        result["total_osl"]["avg"],
        result["total_osl"]["avg"] - load.requests,
    )


def lm_eval(load: Load) -> Seen:
    """`lm_eval` with a small task of its own: sums with two answers, scored by log-probabilities of the prompt."""
    docs = load.folder / "sums.jsonl"
    docs.write_text("\n".join(map(json.dumps, SCORED)))
    (load.folder / "sums.yaml").write_text(TASK.format(file=docs))
    model = f"model={NAME},base_url={load.url}/v1/completions,tokenizer={load.model},tokenized_requests=False"
    load.run(
        "--model", "local-completions", "--model_args", model, "--tasks", "sums", "--include_path", load.folder,
        "--output_path", load.folder / "result.json",
    )  # fmt: skip
    scores = load.result("result*.json")["results"]["sums"]
    print(f"lm_eval: {scores}", flush=True)
    tokenizer = Tokenizer.from_file(str(load.model / "tokenizer.json"))
    texts = [f"{doc['question']} {choice}" for doc in SCORED for choice in doc["choices"]]  # type: ignore[attr-defined]
    return Seen(
        None, None, sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts), None, None
    )


TOOLS: dict[str, tuple[Callable[[Load], Seen], str]] = {
    "vllm": (vllm_bench, "a Python with vLLM (pip install vllm)"),
    "guidellm": (guidellm, "the command of `pip install guidellm`"),
    "aiperf": (aiperf, "the command of `pip install aiperf`"),
    "lm_eval": (lm_eval, "the command of `pip install 'lm-eval[api]' transformers`"),
}


@benchmark(
    __doc__,
    *(flag(name.replace("_", "-"), help_=help_, metavar="PATH") for name, (_, help_) in TOOLS.items()),
    flag("requests", 20),
    flag("concurrency", 1),
    flag("prompt-tokens", 2048),
    flag("output-tokens", 32),
    flag("timeout-s", 300.0, "for each tool"),
    flag("within", 0.05, "largest relative difference"),
    model="smollm2",
)
def run(options: Options) -> Findings:
    """Run each given tool."""
    given = [name for name in TOOLS if getattr(options, name)]
    if not given:
        raise FlagError("give the path of at least one tool")

    with instance("--model", options.model, "--replicas", "1", "--set", f"served_model_name={NAME}") as url:
        httpx.post(f"{url}/v1/completions", json={"model": NAME, "prompt": "Warm", "max_tokens": 4}, timeout=300)

        def measure(name: str) -> dict[str, Any]:
            note(f"{name} runs")
            with TemporaryDirectory(prefix="warmpath-") as folder:
                return compared(load_of(url, name, Path(folder), options), name)

        results = rows_of(given, measure)
    passed = all(agrees(result, options.within) for result in results.values())
    return Findings(results, said_of(results, options.within), passed=passed)


def agrees(result: Mapping[str, Any], within: float) -> bool:
    """Return whether a tool ran, and saw what /metrics say."""
    differences = result.get("differences", {"not measured": float("inf")})
    return all(abs(difference) <= within for difference in differences.values())


def said_of(results: Mapping[str, Mapping[str, Any]], within: float) -> str:
    """Return a sentence for each tool."""
    said = []
    for name, result in results.items():
        far = [f"{what} {by:+.1%}" for what, by in result.get("differences", {}).items() if abs(by) > within]
        if "not_measured" in result:
            said.append(f"{name} was not measured.")
        else:
            said.append(f"{name}: {', '.join(far) or f'all within {within:.0%}'}.")
    return " ".join(said)


def load_of(url: str, name: str, folder: Path, options: Options) -> Load:
    """Return the load for a tool."""
    return Load(
        url, resolve_model(options.model), getattr(options, name), folder, options.requests,
        options.concurrency, options.prompt_tokens, options.output_tokens, options.timeout_s,
    )  # fmt: skip


def compared(load: Load, name: str) -> dict[str, Any]:
    """Run a tool; return what it saw, what /metrics say of the same time, and the relative differences."""
    before = metrics_of(load.url)
    theirs = TOOLS[name][0](load)
    ours = seen_between(before, settled_metrics(load.url))
    return {"tool": asdict(theirs), "metrics": asdict(ours), "differences": differences(theirs, ours)}


def differences(theirs: Seen, ours: Seen) -> dict[str, float]:
    """Return how much more a tool saw than /metrics say, as a part of the latter, of all that it measured."""
    return {
        what: getattr(theirs, what) / value - 1
        for what, value in asdict(ours).items()
        if value and getattr(theirs, what) is not None
    }


def settled_metrics(url: str) -> dict[str, float]:
    """Return the sums and counts once they no longer change: the last ones arrive beside the answers."""
    before, after = dict[str, float](), metrics_of(url)
    while before != after:
        time.sleep(1)
        before, after = after, metrics_of(url)
    return after


def metrics_of(url: str) -> dict[str, float]:
    """Return the sums and counts of the families that are compared."""
    text = httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text
    names = (f"{TTFT}_sum", f"{TTFT}_count", f"{ITL}_sum", f"{ITL}_count", PROMPT, OUTPUT)
    return {name: metric_sum(text, name) for name in names}


def seen_between(before: Mapping[str, float], after: Mapping[str, float]) -> Seen:
    """Return what the server counted between two readings."""
    delta = {name: value - before[name] for name, value in after.items()}

    def mean_ms(name: str) -> float | None:
        return 1000 * delta[f"{name}_sum"] / delta[f"{name}_count"] if delta[f"{name}_count"] else None

    return Seen(mean_ms(TTFT), mean_ms(ITL), delta[PROMPT], delta[OUTPUT], delta[f"{ITL}_count"])
