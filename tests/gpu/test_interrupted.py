"""Interrupted answers in 16 bits, by vLLM's own sampler and runner: each ends whole, in its grammar, by its rules."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from serve_app.engine.protocol import EngineRequest, TokenRules
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import Matchers
from tests.gpu.conftest import sizes_on
from tests.serve_app.engine.tiny import request, run_all
from tests.vllm.engines import Both, both_engines

ANSWERS, TOKENS = 200, 48


@pytest.fixture(scope="module")
def native(device: str, demo_model_path: Path) -> Iterator[Both]:
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # of an exact engine before
    with both_engines(demo_model_path, device=device, dtype="bfloat16", **sizes_on(device, 0.3)) as running:
        assert not running.vllm.settings.exact
        yield running


def test_two_hundred_interrupted_answers_end_whole(native: Both) -> None:
    """Each is cut at a place of its own and sent again with its tokens, as after the death of a replica."""
    matchers = Matchers(GrammarCompiler(native.info.path, native.info.vocab_size, native.info.eos_token_ids))
    text = llguidance_form(Grammar.regex(r"(red|green|blue)(, (red|green|blue)){3,9}", "regex"))
    ends = native.info.eos_token_ids
    random = np.random.default_rng(1)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seeded": False},
        {"temperature": 0.8, "seed": 3, "rules": TokenRules(0.5, 0.2, 1.1, min_tokens=30)},
        {"temperature": 1.0, "seed": 4, "grammar": True},
        {"grammar": True, "rules": TokenRules(min_tokens=12)},
    ]

    def asked(number: int) -> EngineRequest:
        sampling = dict(kinds[number % len(kinds)])
        grammar = sampling.pop("grammar", False)
        wanted = request(f"r{number}", native.prompt(40 + number, number), TOKENS, stop_token_ids=ends, **sampling)
        return structs.replace(wanted, matcher=matchers.matcher(text)) if grammar else wanted

    requests = [asked(number) for number in range(ANSWERS)]
    begun = {}
    for part in range(0, ANSWERS, 20):
        begun |= run_all(native.vllm, requests[part : part + 20]).tokens
    rests: list[EngineRequest] = []
    for one in requests:
        cut = int(random.integers(1, max(2, len(begun[one.request_id]))))
        ids = np.concatenate([one.token_ids, np.array(begun[one.request_id][:cut], dtype=np.int32)])
        sampling = replace(one.sampling, max_tokens=TOKENS - cut)
        rests.append(structs.replace(one, token_ids=ids, sampling=sampling, resumed_tokens=cut))
    equal = same = 0
    for part in range(0, ANSWERS, 20):
        found = run_all(native.vllm, rests[part : part + 20])
        for one in rests[part : part + 20]:
            name, whole = one.request_id, begun[one.request_id][: one.resumed_tokens] + found.tokens[one.request_id]
            assert found.finish[name] in ("stop", "length"), found.errors
            assert (len(whole) == TOKENS) == (found.finish[name] == "length")
            if one.sampling.rules is not None:
                assert len(whole) >= one.sampling.rules.min_tokens
            if one.matcher is not None:
                assert found.finish[name] == "stop"
                assert matchers.matcher(text).allowed(np.array(whole, dtype=np.int32)) is not None
            same += sum(
                a == b for a, b in zip(whole[one.resumed_tokens :], begun[name][one.resumed_tokens :], strict=False)
            )
            equal += len(begun[name]) - one.resumed_tokens
    print(f"{same} of {equal} tokens after the break are those without it")
    assert same > equal / 5, "greedy and forced ones"
