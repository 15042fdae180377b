"""Batches outlive the processes that run them: real replicas and ingresses, and a whole instance, killed at work."""

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import httpx
import openai
import psutil
import pytest

from benchmarks.common.server import MARK, instance, marked_processes
from tests.integration.conftest import alone, eventually, workers_of

pytestmark = [pytest.mark.integration, pytest.mark.long]

KILLS = int(os.environ.get("WARMPATH_BATCH_KILLS", "12"))
LINES = 300
SIMULATED = "--model demo --engine simulated --replicas 2 --set ingress_replicas=2 --set max_num_seqs=8"


def lines() -> str:
    """Return a file's lines: ten system prompts, mixed, and one line in 30 that fails."""
    made = []
    for number in range(LINES):
        system = f"You are the assistant of department {number % 10}. " * 20
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {number}?"}]
        body = {"model": "demo", "max_tokens": 4, "messages": messages if number % 30 else []}
        made.append(json.dumps({"custom_id": f"c{number}", "url": "/v1/chat/completions", "body": body}))
    random.Random(3).shuffle(made)
    return "\n".join(made)


@pytest.mark.timeout(max(900, 75 * KILLS))
def test_killed_replicas_ingresses_and_a_killed_head_lose_and_repeat_no_line(tmp_path: Path) -> None:
    """They die one by one while batches run, the whole instance in between; each line has one result. docs: batch"""
    file, seed = tmp_path / "responses.sqlite", random.randrange(2**32)
    print(f"{seed = }")  # each run kills at other moments
    rng = random.Random(seed)
    settings = *SIMULATED.split(), f"--set=responses_file={file}", "--set=simulated_decode_step_s=0.05"
    killed: Counter[str] = Counter()
    batch_id = ""

    def begin(client: openai.OpenAI) -> str:
        uploaded = client.files.create(file=("in.jsonl", lines().encode()), purpose="batch")
        made = client.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        return made.id

    def judge(client: openai.OpenAI, batch_id: str) -> None:
        eventually(lambda: client.batches.retrieve(batch_id).status == "completed", 300)
        batch = client.batches.retrieve(batch_id)
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": LINES, "completed": LINES - 10, "failed": 10}
        found = [
            json.loads(line)
            for name in (batch.output_file_id, batch.error_file_id)
            for line in client.files.content(name or "").text.splitlines()
        ]
        assert sorted(line["custom_id"] for line in found) == sorted(f"c{number}" for number in range(LINES))
        assert {line["response"]["status_code"] for line in found} == {200, 400}

    while sum(killed.values()) < KILLS:
        mark = uuid4().hex
        with alone(instance(*settings, env={"WARMPATH_SECRET": "a secret of the test's own", MARK: mark})) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=8, timeout=30)
            if batch_id:  # of the killed instance
                judge(client, batch_id)
            for _ in range(3):
                batch_id = begin(client)
                for kind in ("ServeReplica:warmpath:Replica", "Ingress"):
                    time.sleep(rng.random() * 4)
                    with suppress(httpx.HTTPError, psutil.Error, StopIteration, IndexError, AssertionError):
                        os.kill(rng.choice(workers_of(url, kind)), signal.SIGKILL)
                        killed[kind] += 1
                judge(client, batch_id)
                print(f"so far: {dict(killed)}", flush=True)
            batch_id = begin(client)
            eventually(lambda: client.batches.retrieve(batch_id).request_counts.completed > 10)  # type: ignore[union-attr]  # noqa: B023
            family = [process for process, _ in marked_processes(mark)]
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family)
            killed["instance"] += 1
    with alone(instance(*settings, env={"WARMPATH_SECRET": "a secret of the test's own"})) as url:
        judge(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=8, timeout=30), batch_id)
    print(dict(killed))
    assert min(killed.values()) > 0 and len(killed) == 3
