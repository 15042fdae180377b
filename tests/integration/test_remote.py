"""`warmpath serve --engine remote` before servers in processes of their own, which die and return. docs: remote."""

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.common.server import instance
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from tests.harness.worker_double import Process, processes
from tests.integration.conftest import HTTP, alone, cache_state, eventually, explained, metric, wait_until_cached

pytestmark = [pytest.mark.integration, pytest.mark.long]

KILLS = int(os.environ.get("WARMPATH_KILLS", "4"))
"""A hundred take some minutes."""

CLIENTS = 3


def body_of(text: str, tokens: int = 8) -> dict[str, Any]:
    words = [{"role": "user", "content": text}]
    return {"model": "demo", "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "messages": words}


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = HTTP.post(f"{url}/v1/chat/completions", json=body).raise_for_status().json()
    return answer


def text_of(url: str, body: dict[str, Any]) -> str:
    return str(ask(url, body)["choices"][0]["message"]["content"])


def streamed(url: str, body: dict[str, Any], begun: threading.Semaphore, texts: list[str]) -> None:
    """Append a streamed answer's text, "" if it broke off. ``begun`` is released after its first tokens."""
    parts, whole = list[str](), False
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=120) as lines:
        for number, line in enumerate(lines.iter_lines()):
            if number == 8:
                begun.release()
            if line.startswith("data: {"):
                choices = httpx.Response(200, text=line.removeprefix("data: ")).json().get("choices") or [{}]
                parts.append((choices[0].get("delta") or {}).get("content") or "")
                whole |= choices[0].get("finish_reason") == "length"
    texts.append("".join(parts) if whole else "")


def by_worker(url: str) -> dict[str, dict[str, Any]]:
    replicas = cache_state(url)["replicas"]
    return {str(replica["attributes"].get("worker")): replica for replica in replicas}


def serving(url: str, *servers: Process) -> bool:
    found = by_worker(url)
    return all(server.url in found and found[server.url]["out"] is None for server in servers)


def test_no_answer_is_lost_while_servers_die_return_empty_and_join(demo_model_path: Path, tmp_path: Path) -> None:
    """Answers stay those of one undisturbed server, and what is predicted of a returned one is right again."""
    file, vocab = tmp_path / "workers", load_checkpoint_info(demo_model_path).vocab_size
    tokenizer = str(demo_model_path / "tokenizer.json")
    with processes(3, vocab=vocab, tokenizer=tokenizer, token_s=0.01, blocks=2000) as servers:
        first, second, later = servers
        file.write_text(f"{first.entry}\n{second.entry}\nhttp://127.0.0.1:9\n")
        with alone(instance("--engine", "remote", "--worker", f"file:{file}", "--model", "demo")) as url:
            eventually(lambda: serving(url, first, second))
            body = body_of("Name the ship before any advice. " * 20)
            assert ask(url, body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            wait_until_cached(url, body)
            usage = ask(url, body)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 16 * 16
            (holder,) = [each for each in explained(url, body)["replicas"] if each["cached_tokens"]]
            assert holder["attributes"]["routed"] == "by its KV events"
            assert "does not answer" in by_worker(url)["http://127.0.0.1:9"]["out"]

            chance = random.Random(1)
            for number in range(KILLS):
                words = [f"{number} {client}: tell all about berths and tides. " * 8 for client in range(CLIENTS)]
                bodies = [body_of(text, 60) for text in words]
                begun, texts = threading.Semaphore(0), list[str]()
                streams = [threading.Thread(target=streamed, args=(url, each, begun, texts)) for each in bodies]
                for stream in streams:
                    stream.start()
                for _ in streams:
                    assert begun.acquire(timeout=120)
                victim = chance.choice([first, second])
                victim.kill()
                for stream in streams:
                    stream.join()
                assert sorted(texts) == sorted(text_of(url, each) for each in bodies)
                eventually(lambda victim=victim: by_worker(url)[victim.url]["out"] is not None)  # type: ignore[misc]
                assert by_worker(url)[victim.url]["blocks"] == {}
                victim.start()
                eventually(lambda: serving(url, first, second))

            def predictions(result: str) -> float:
                return metric(url, "warmpath_worker_predictions_total", f'result="{result}"')

            told = {result: predictions(result) for result in ("right", "wrong")}
            for number in range(50):
                ask(url, body_of(f"{number % 10}: which side is port? " * 10))
                time.sleep(0.02)
            eventually(lambda: predictions("right") >= told["right"] + 35)
            assert predictions("wrong") - told["wrong"] == 0

            file.write_text(f"{second.entry}\n{later.entry}\n")
            eventually(lambda: serving(url, second, later) and first.url not in by_worker(url))
            for number in range(6):
                ask(url, body_of(f"{number}: and starboard? " * 10))
            second.kill()
            later.kill()
            eventually(lambda: all(each["out"] for each in by_worker(url).values()))
            with pytest.raises(httpx.HTTPStatusError, match="503"):
                ask(url, body)
            second.start()
            eventually(lambda: serving(url, second))
            assert text_of(url, body)
