"""lm-eval scores the choices of a task by their log-probabilities, as transformers does. (docs: api)

It runs if WARMPATH_LM_EVAL names its command, `bin/lm-eval` of an environment with
`pip install "lm-eval[api]" transformers`.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.common.server import instance
from tests.integration.conftest import PATIENCE_S, alone, metric

COMMAND = Path(os.environ.get("WARMPATH_LM_EVAL", "/nowhere"))
HOW = 'set WARMPATH_LM_EVAL to bin/lm-eval of an environment with `pip install "lm-eval[api]" transformers`'
TASK = "harbour"
QUESTIONS = [
    {
        "question": f"The {ship} of the northern line lies at the old quay beside the grain store, with a cargo of "
        f"{cargo}, and its master waits for the evening tide and for a clear wind. It sails",
        "choices": ["at dawn", "when the tide turns in the evening", "never", "tomorrow, if the wind is clear"],
        "answer": answer,
    }
    for answer, (ship, cargo) in enumerate((("ferry", "salt"), ("brig", "copper"), ("lugger", "letters")))
]

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


def scores(path: Path, context: str, choice: str) -> tuple[float, bool]:
    """A choice's log-probability behind a context, and whether it is the likeliest text there."""
    import torch  # slow to import, so skipped tests avoid it
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    before, ids = (tokenizer(text, add_special_tokens=False).input_ids for text in (context, f"{context} {choice}"))
    assert ids[: len(before)] == before
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(torch.tensor([ids])).logits[0, :-1]
    told = torch.log_softmax(logits, dim=-1)[len(before) - 1 :]
    targets = ids[len(before) :]
    return float(told[range(len(targets)), targets].sum()), told.argmax(dim=-1).tolist() == targets


def test_lm_eval_scores_choices_as_transformers_does(demo_model_path: Path, tmp_path: Path) -> None:
    """A question's choices share a prefix, which the first of them leaves in the cache: it spoils no score."""
    if not COMMAND.exists():
        pytest.skip(HOW)
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / f"{TASK}.yaml").write_text(yaml.safe_dump(task))
    settings = ("dtype=float32", "kv_cache_bytes=134217728")
    with alone(instance("--model", str(demo_model_path), *(f"--set={setting}" for setting in settings))) as url:
        model = {
            "model": demo_model_path.name,
            "base_url": f"{url}/v1/completions",
            "tokenizer": str(demo_model_path),
            "num_concurrent": 2,
            "max_retries": 1,
        }
        arguments = ",".join(f"{name}={value}" for name, value in model.items())
        done = subprocess.run(
            [
                *(COMMAND, "run", "--model", "local-completions", "--model_args", arguments, "--batch_size", "3"),
                *("--tasks", TASK, "--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples"),
            ],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S * 3,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert metric(url, "warmpath_tenant_prompt_tokens_total") > 12 * 30
        assert metric(url, "warmpath_tenant_cached_prompt_tokens_total") == 0
    (found,) = (tmp_path / "out").rglob(f"samples_{TASK}_*.jsonl")
    samples: list[dict[str, Any]] = [json.loads(line) for line in found.read_text().splitlines()]
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        question = sample["doc"]
        for choice, ((logprob, greedy),) in zip(question["choices"], sample["resps"], strict=True):
            expected, likeliest = scores(demo_model_path, question["question"], choice)
            assert float(logprob) == pytest.approx(expected, abs=0.05)
            assert (str(greedy) == "True") == likeliest
