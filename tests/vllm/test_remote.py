"""A replica before a plain `vllm serve`, with nothing of ours in it. docs: remote."""

import json
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from tokenizers import Tokenizer

from router.protocol.block_hash import PrefixScope, hash_blocks
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.workers import worker_of
from serve_app.engine.remote.engine import RemoteEngine
from serve_app.engine.remote.settings import RemoteSettings
from serve_app.engine.sampling_params import TokenRules
from tests.integration.conftest import eventually
from tests.router.vllm_events.pool_model import Routers
from tests.serve_app.engine.tiny import Collector, request
from tests.vllm.test_library import START_S, started, vllm_serve

BLOCK, BLOCKS = 32, 96
URL = "http://127.0.0.1:8003"
ENTRY = f"{URL}?events=5553&replay=5653"


@pytest.fixture(scope="module")
def engine(demo_model_path: Path) -> Iterator[RemoteEngine]:
    worker = worker_of(ENTRY)
    more = f"--num-gpu-blocks-override {BLOCKS}"
    info = load_checkpoint_info(demo_model_path)
    settings = RemoteSettings(
        (ENTRY,),
        model=str(demo_model_path),
        model_name="demo",
        tokenizer=str(demo_model_path / "tokenizer.json"),
        vocab_size=info.vocab_size,
        block_size=BLOCK,
        max_model_len=2048,
        apart=True,
    )
    with vllm_serve(demo_model_path, URL, worker.events, worker.replay, BLOCK, more):
        eventually(partial(started, URL), START_S)
        made = RemoteEngine(settings, Routers())
        made.start()
        eventually(lambda: not made.load().out)
        try:
            yield made
        finally:
            made.stop()


def prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(300, 900, length, dtype=np.int32)


def ask(engine: RemoteEngine, name: str, ids: object, most: int = 8, **more: object) -> Collector:
    out = Collector()
    engine.submit(request(name, ids, most, **more), out)  # type: ignore[arg-type]
    out.wait([name])
    assert out.finish[name] != "error", out.errors[name]
    return out


def test_it_is_followed_by_its_events(engine: RemoteEngine) -> None:
    told = engine.load().attributes
    assert told["routed"] == "by its KV events"
    assert str(told["server"]).startswith("vLLM 0.")


def test_cached_tokens_are_exactly_those_predicted(engine: RemoteEngine) -> None:
    """Conversations of two tenants grow and return in a pool that is too small for them."""
    chance, exact = random.Random(1), 0
    talks = {(tenant, number): prompt(100, 10 * tenant + number) for tenant in range(2) for number in range(8)}
    for turn in range(60):
        key = chance.choice(list(talks))
        scope = PrefixScope("demo", salt=bytes([key[0]]) * 8)
        asked = request(f"t{turn}", talks[key], 4, scope=scope)
        chain = hash_blocks(asked.root, talks[key], BLOCK)
        known = engine.cached_blocks(chain, (len(talks[key]) - 1) // BLOCK) * BLOCK
        answer = ask(engine, f"t{turn}", talks[key], 4, scope=scope)
        exact += answer.cached[f"t{turn}"] == known
        talks[key] = np.concatenate([talks[key], answer.tokens[f"t{turn}"], prompt(60, 1000 + turn)])[:1900]
        time.sleep(0.05)
    assert exact >= 59


def test_answers_continue_with_the_same_tokens(engine: RemoteEngine) -> None:
    ids = prompt(150, 1)
    whole = ask(engine, "whole", ids, 12).tokens["whole"]
    out = Collector()
    asked = request("rest", [*ids, *whole[:5]], 7)
    engine.submit(structs.replace(asked, resumed_tokens=5), out)
    out.wait(["rest"])
    assert [*whole[:5], *out.tokens["rest"]] == whole


def test_sampling_rules_reach_it(engine: RemoteEngine) -> None:
    ids = prompt(80, 2)
    plain = ask(engine, "plain", ids).tokens["plain"]
    assert ask(engine, "only", ids, rules=TokenRules(allowed=(5, 6))).tokens["only"][0] in (5, 6)
    biased = ask(engine, "bias", ids, rules=TokenRules(logit_bias=((7, 100.0),))).tokens["bias"]
    assert set(biased) == {7}
    without = ask(engine, "word", ids, rules=TokenRules(bad_words=((plain[0],),))).tokens["word"]
    assert plain[0] not in without
    stop = ask(engine, "stop", ids, stop_token_ids=(plain[2],))
    assert (stop.tokens["stop"], stop.finish["stop"]) == (plain[: plain.index(plain[2])], "stop")
    seeded = [ask(engine, f"s{n}", ids, temperature=1.0, seed=5).tokens[f"s{n}"] for n in range(2)]
    assert seeded[0] == seeded[1] != plain
    longest = ask(engine, "long", ids, rules=TokenRules(bad_words=(tuple(plain[:2]),))).tokens["long"]
    assert longest[:2] != plain[:2]


def test_log_probabilities_are_told(engine: RemoteEngine) -> None:
    ids = prompt(40, 3)
    told = ask(engine, "top", ids, 3, logprobs=2)
    for token, each in zip(told.tokens["top"], told.logprobs["top"], strict=True):
        assert each.top[0] == (token, each.logprob)
        assert len(each.top) == 2
    some = ask(engine, "some", ids, 2, logprobs=2, logprob_token_ids=(4, 9)).logprobs["some"]
    assert {token for token, _ in some[0].top} >= {4, 9}
    whole = ask(engine, "prompt", ids, 1, prompt_logprobs=1).prompt_logprobs["prompt"]
    assert len(whole) == len(ids) - 1
    assert all(each.rank >= 1 and each.logprob < 0 for each in whole)


def test_a_grammar_is_its_own(engine: RemoteEngine, demo_model_path: Path) -> None:
    """White space is as the server's own settings have it."""
    ends = load_checkpoint_info(demo_model_path).eos_token_ids
    schema = {"type": "object", "properties": {"side": {"enum": ["port"]}}, "required": ["side"]}
    asked = request("json", prompt(40, 4), 40, stop_token_ids=ends)
    out = Collector()
    engine.submit(structs.replace(asked, grammar=json.dumps({"grammars": [{"json_schema": schema}]})), out)
    out.wait(["json"])
    assert out.finish["json"] != "error", out.errors["json"]
    told = Tokenizer.from_file(str(demo_model_path / "tokenizer.json")).decode(out.tokens["json"])
    assert "".join(told.split()).startswith('{"side":')
