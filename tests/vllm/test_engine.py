"""vLLM behind the engine's contract, and its tokens beside the built-in engine's. One vLLM serves all tests."""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec import structs

from router.protocol.block_hash import PrefixScope, split_chain
from router.protocol.request import Decision
from serve_app.engine.protocol import (
    AdapterError,
    EngineError,
    EngineOutput,
    EngineRequest,
    RemoteKv,
    RequestTooLong,
    Save,
    TokenRules,
    UnknownAdapter,
)
from serve_app.engine.vllm.executor import InCore
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import Matchers
from tests.serve_app.engine.adapters import described, save_adapter
from tests.serve_app.engine.tiny import SCOPE, Collector, request, root_of, run_all
from tests.vllm.engines import (
    BLOCK,
    BLOCKS,
    Both,
    both_engines,
    compute,
    eventually,
    mispredicted,
    outputs_of,
    reset,
    tokens_of,
)


@pytest.fixture(scope="module")
def both(demo_model_path: Path) -> Iterator[Both]:
    with both_engines(demo_model_path) as running:
        yield running


def test_a_step_is_computed_once_and_where_vllm_times_it() -> None:
    """vLLM measures the time that it waits for a step's future; prefill rates, and so routing, depend on it."""
    executor: Any = object.__new__(InCore)
    steps: list[str] = []
    executor.driver_worker = SimpleNamespace(execute_model=lambda step: steps.append(step) or step.index("t"))
    assert executor.execute_model("first") == 4
    later, bad = (executor.execute_model(step, non_block=True) for step in ("next", "bad"))
    assert steps == ["first"]
    assert [later.result(), later.result()] == [3, 3]
    for _ in range(2):
        with pytest.raises(ValueError, match="substring not found"):
            bad.result()
    assert steps == ["first", "next", "bad"]


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "filtered": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 3},
    "min_p": {"temperature": 1.2, "min_p": 0.05, "seed": 11},
    "penalties": {"temperature": 0.9, "seed": 5, "rules": TokenRules(1.0, 0.5, 1.3)},
    "bias": {"rules": TokenRules(logit_bias=((5, 100.0),), bad_words=((5, 5),))},
    "allowed": {"temperature": 1.0, "seed": 13, "rules": TokenRules(allowed=(5, 6, 7, 90))},
    "logprobs": {"temperature": 1.0, "seed": 9, "logprobs": 3},
}


def test_tokens_are_the_built_in_engines_alone_in_a_batch_and_from_the_middle(both: Both) -> None:
    """All sampling options: at once in vLLM, in turn, and after tokens that the built-in engine began."""
    ids = both.prompt(90)
    asked = [request(name, ids, 24, **sampling) for name, sampling in SAMPLED.items()]
    wanted, batch = run_all(both.torch, asked).tokens, run_all(both.vllm, asked).tokens
    assert batch == wanted
    for name, sampling in SAMPLED.items():
        assert tokens_of(both.vllm, name, ids, max_tokens=24, **sampling) == wanted[name], name
        begun = request(name, np.concatenate([ids, np.array(wanted[name][:10], dtype=np.int32)]), 14, **sampling)
        assert run_all(both.vllm, [structs.replace(begun, resumed_tokens=10)]).tokens[name] == wanted[name][10:], name


def test_logprobs_are_of_the_models_own_logits(both: Both) -> None:
    """Each token's own and the likeliest are reported, regardless of rules."""
    asked = request("r", both.prompt(60), 6, temperature=1.0, seed=2, logprobs=3, rules=TokenRules(2.0))
    ours, theirs = (
        [told for output in outputs_of(engine, asked) for told in output.logprobs] for engine in (both.torch, both.vllm)
    )
    assert len(ours) == len(theirs) == 6
    for own, other in zip(ours, theirs, strict=True):
        assert other.logprob == pytest.approx(own.logprob, abs=1e-3)
        assert [token for token, _ in other.top] == [token for token, _ in own.top]
        assert [value for _, value in other.top] == pytest.approx([value for _, value in own.top], abs=1e-3)


def test_listed_tokens_are_told_beside_requests_that_ask_for_the_likeliest(both: Both) -> None:
    """One batch of both kinds, of different sizes: vLLM alone would tell the others nothing."""
    ids = both.prompt(30, 95)
    kinds = {
        "likeliest": (4, ()),
        "one": (0, (9,)),
        "many": (0, tuple(range(40, 70))),
        "own": (0, ()),
        "none": (None, ()),
    }
    asked = [
        request(name, ids, 6, logprobs=logprobs, logprob_token_ids=listed) for name, (logprobs, listed) in kinds.items()
    ]
    theirs, ours = (run_all(engine, asked) for engine in (both.vllm, both.torch))
    for name, (logprobs, listed) in kinds.items():
        told, expected = theirs.logprobs[name], ours.logprobs[name]
        assert len(told) == len(expected) == (0 if logprobs is None else 6)
        for token, one, other in zip(ours.tokens[name], told, expected, strict=bool(told)):
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-3)
            if listed:
                assert [other for other, _ in one.top] == [token, *(wanted for wanted in listed if wanted != token)]


def test_a_prompts_logprobs_are_the_built_in_engines_cold_and_cached(both: Both) -> None:
    """With an answer, without one, and of a prompt longer than a step; none of its cached blocks is read."""
    prompts = {"one": both.prompt(1, 91), "short": both.prompt(40, 92), "long": both.prompt(700, 93)}
    for round_ in ("cold", "cached"):
        for name, ids in prompts.items():
            for tokens in (0, 3):
                asked = request(f"{name} {round_} {tokens}", ids, tokens, prompt_logprobs=2)
                theirs, ours = (run_all(engine, [asked]) for engine in (both.vllm, both.torch))
                told, expected = (got.prompt_logprobs[asked.request_id] for got in (theirs, ours))
                assert len(told) == len(expected) == len(ids) - 1
                for one, other in zip(told, expected, strict=True):
                    assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
                    assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-3)
                    assert abs(one.rank - other.rank) <= 2
                assert theirs.cached[asked.request_id] == 0
                assert theirs.finish[asked.request_id] == "length"
                assert theirs.tokens[asked.request_id] == ours.tokens[asked.request_id]
    assert run_all(both.vllm, [request("then", prompts["long"], 1)]).cached == {"then": 672}, "its blocks serve others"


def test_a_grammar_is_followed_and_continued(both: Both) -> None:
    """An answer matches, also when resumed; an answer that cannot match is an error, not a text."""
    matchers = Matchers(GrammarCompiler(both.info.path, both.info.vocab_size, both.info.eos_token_ids))
    text = llguidance_form(Grammar.regex(r"(red|green|blue)(, (red|green|blue)){3}", "regex"))
    ends = both.info.eos_token_ids

    def asked(name: str, ids: Any, resumed: int = 0) -> Any:
        wanted = request(name, ids, 40, temperature=1.0, seed=4, stop_token_ids=ends)
        return structs.replace(wanted, matcher=matchers.matcher(text), resumed_tokens=resumed)

    prompt = both.prompt(50)
    wanted = run_all(both.torch, [asked("a", prompt)])
    found = run_all(both.vllm, [asked("a", prompt)])
    assert found.finish["a"] == wanted.finish["a"] == "stop"
    assert found.tokens["a"] == wanted.tokens["a"]
    begun = np.concatenate([prompt, np.array(found.tokens["a"][:3], dtype=np.int32)])
    assert run_all(both.vllm, [asked("b", begun, 3)]).tokens["b"] == wanted.tokens["a"][3:]
    wrong = run_all(both.vllm, [asked("c", np.concatenate([prompt, prompt[:3]]), 3), request("d", prompt)])
    assert wrong.finish == {"c": "error", "d": "length"}
    assert "the answer so far does not match" in wrong.errors["c"]


def test_how_answers_end(both: Both) -> None:
    """Stop tokens are removed unless requested; without tokens only the prompt is computed."""
    ids = both.prompt(70)
    tokens = tokens_of(both.vllm, "whole", ids, max_tokens=12)
    stop = tokens[5]
    at = tokens.index(stop)
    asked = [
        request("stop", ids, 12, stop_token_ids=(stop,)),
        request("shown", ids, 12, stop_token_ids=(stop,), shown_stop_token_ids=(stop,)),
        request("later", ids, 12, stop_token_ids=(stop,), rules=TokenRules(min_tokens=at + 1)),
        request("none", ids, 0),
        structs.replace(request("late", ids, 1900), timeout_s=0.5),
    ]
    found = run_all(both.vllm, asked)
    later = found.finish.pop("later")
    assert later in ("stop", "length")
    assert found.finish == {"stop": "stop", "shown": "stop", "none": "length", "late": "timeout"}
    assert (found.tokens["stop"], found.tokens["shown"], found.tokens["none"]) == (tokens[:at], tokens[: at + 1], [])
    assert len(found.tokens["later"]) > at
    assert found.tokens["later"][at] != stop
    assert "took too long" in found.errors["late"]


def test_an_unsupported_request_is_refused_at_once(both: Both) -> None:
    """vLLM never sees it, and the errors are the contract's."""
    ids, collector = both.prompt(40), Collector()
    scope = PrefixScope("tiny", public_blocks=2)
    unknown = PrefixScope("tiny", "nobody@1")
    refused: list[tuple[Any, type[Exception]]] = [
        (request("r", both.prompt(2000), 100), RequestTooLong),
        (request("r", [both.info.vocab_size]), ValueError),
        (request("r", []), ValueError),
        (structs.replace(request("r", ids), scope=scope, root=root_of(scope)), ValueError),
        (structs.replace(request("r", ids), store_kv=False, saves=(Save(b"s" * 16, 32),)), ValueError),
        (structs.replace(request("r", ids), scope=unknown, root=root_of(unknown)), UnknownAdapter),
    ]
    for item, error in refused:
        with pytest.raises(error):
            both.vllm.submit(item, collector)
    assert both.vllm.load().waiting_sequences == both.vllm.load().queued_prefill_tokens == 0


def test_the_directory_predicts_the_delivered_tokens(both: Both) -> None:
    """Conversations of two tenants grow in a pool that evicts; each request gets its predicted hit."""
    wrong, hits = mispredicted(both, 300)
    assert hits > 100
    assert wrong == []


def test_the_load_is_exact_and_returns_to_nothing(both: Both) -> None:
    """Waiting prompt tokens are counted from their submission on, and the count ends at zero.

    One block of vLLM's own is added to the pool.
    """
    assert both.vllm.facts.num_blocks == BLOCKS

    def counted() -> dict[str, float]:
        return {name: value for name, _, value in both.vllm.stats().samples}

    collector, before = Collector(), counted()
    for i in range(4):
        asked = request(f"r{i}", both.prompt(600, seed=50 + i), 4)
        both.vllm.submit(
            structs.replace(asked, decision=Decision("", f"router {i % 2}", i + 1, 0, 0, "cold")), collector
        )
    first = both.vllm.load()
    assert 600 < first.queued_prefill_tokens <= 2400
    seen = {first.queued_prefill_tokens}
    while len(collector.finish) < 4:
        seen.add(both.vllm.load().queued_prefill_tokens)
        time.sleep(0.001)
    last, after = both.vllm.load(), counted()
    assert (last.queued_prefill_tokens, last.running_sequences, last.waiting_sequences) == (0, 0, 0)
    assert last.admitted == {"router 0": 3, "router 1": 4}
    assert len(seen) > 3
    assert last.prefill_tokens_per_s > 0
    assert after["warmpath_generation_tokens_total"] > before["warmpath_generation_tokens_total"]
    assert after["warmpath_recomputed_tokens_total"] == before["warmpath_recomputed_tokens_total"]


def test_cancelling_frees_blocks_and_a_reset_forgets_everything_or_nothing(both: Both) -> None:
    """While a block is in use nothing is forgotten, and a cancelled prompt can be hit; after a reset nothing can."""
    ids, collector = both.prompt(200, seed=5), Collector()
    both.vllm.submit(request("long", ids, 1500), collector)
    collector.wait_tokens("long", 3, 120)
    assert not both.vllm.reset_prefix_cache()
    both.vllm.cancel("long")
    both.vllm.cancel("nobody")
    collector.wait(["long"])
    assert collector.finish["long"] == "cancelled"
    assert run_all(both.vllm, [request("again", ids)]).cached["again"] == 192
    reset(both)
    assert run_all(both.vllm, [request("computed", ids)]).cached["computed"] == 0
    eventually(lambda: len(both.heard.held()) >= 6)
    assert run_all(both.vllm, [request("more", ids)]).cached["more"] == 192


def test_adapters_apart_and_as_in_the_built_in_engine(both: Both, demo_model_path: Path, tmp_path: Path) -> None:
    """Base and an adapter in every slot, in one batch, get their own tokens and share no KV.

    The files may be deleted after the load. The base model's row gets nothing of the last slot's adapter.
    """
    scopes, ids = [PrefixScope("tiny")], both.prompt(100, seed=8)
    for seed, name in enumerate(("one", "two", "three", "four")):
        path = save_adapter(demo_model_path, tmp_path / name, seed, ("q_proj", "v_proj", "up_proj"))
        spec, scope = described(path, name)
        both.vllm.adapters.load(spec)
        both.torch.adapters.load(spec)
        scopes.append(scope)
        (path / "adapter_model.safetensors").write_bytes(b"")
    assert set(both.vllm.adapters.loaded) == {scope.lora for scope in scopes[1:]}
    asked = [request(f"r{i}", ids, 10, scope=scope) for i, scope in enumerate(scopes)]
    wanted, found = run_all(both.torch, asked), run_all(both.vllm, asked)
    assert found.tokens == wanted.tokens
    assert len({tuple(tokens) for tokens in found.tokens.values()}) == 5
    assert set(found.cached.values()) == {0}
    assert set(run_all(both.vllm, asked).cached.values()) == {96}
    assert both.vllm.adapters.unload(scopes[1].lora)
    large, _ = described(save_adapter(demo_model_path, tmp_path / "large", 5, ("q_proj",), r=32), "large")
    with pytest.raises(AdapterError):
        both.vllm.adapters.load(large)
    with pytest.raises(UnknownAdapter):
        both.vllm.submit(asked[1], Collector())
    assert run_all(both.vllm, [asked[0], asked[2]]).tokens["r2"] == wanted.tokens["r2"]


@pytest.mark.parametrize("with_adapter", [False, True])
def test_kv_that_left_and_came_back_gives_the_same_tokens(
    with_adapter: bool, both: Both, demo_model_path: Path, tmp_path: Path
) -> None:
    """It is imported in two parts and read like computed KV; later the pool is empty again, and routers know it."""
    scope, ids = SCOPE, both.prompt(1000, seed=300 + with_adapter)
    if with_adapter:
        spec, scope = described(save_adapter(demo_model_path, tmp_path / "kv", 5, ("q_proj", "v_proj")), "kv")
        both.vllm.adapters.load(spec)
    reset(both)
    prefix, wanted = compute(both, ids, scope, 12)
    one, two = (both.vllm.transfer.export_prefix(prefix, first, 16) for first in (0, 16))
    assert both.vllm.transfer.export_prefix(prefix, 31) is None
    assert one is not None and two is not None
    assert [one.header.blocks, two.header.blocks] == [16, 15]
    reset(both)
    remote, collector = RemoteKv(31 * BLOCK), Collector()
    both.vllm.submit(structs.replace(request("asked", ids, 12, scope=scope), remote_kv=remote), collector)
    assert both.vllm.transfer.import_part(one, prefix, 0) == 16
    assert both.vllm.transfer.import_part(two, prefix, 16) == 31
    assert not collector.finish, "it waits for all of it"
    remote.end()
    both.vllm.wake()
    collector.wait(["asked"], 120)
    assert (collector.tokens["asked"], collector.cached["asked"]) == (wanted, 31 * BLOCK)
    eventually(lambda: set(split_chain(prefix.chain)) <= both.heard.held())
    reset(both)
    assert not list(both.vllm._endpoints.directory.glob("kv-[0-9]*"))


def test_a_copy_goes_before_waiting_requests(both: Both) -> None:
    """A holder exports while prompts queue there, which is when others pull from it."""
    reset(both)
    prefix, _ = compute(both, both.prompt(320, seed=500))
    collector, names = Collector(), [f"q{i}" for i in range(4)]
    for number, name in enumerate(names):
        both.vllm.submit(request(name, both.prompt(600, seed=501 + number), 1), collector)
    part = both.vllm.transfer.export_prefix(prefix)
    ended = len(collector.finish)
    collector.wait(names, 120)
    assert part is not None and part.header.blocks == 10
    assert ended < 4


def test_blocks_that_a_waiting_request_will_read_are_not_evicted_next(both: Both) -> None:
    """They were used long ago, and an earlier request needs more space than older blocks have."""
    reset(both)
    for number, tokens in enumerate((10, 10, 38, 38)):  # the whole pool, the oldest first
        compute(both, both.prompt(tokens * BLOCK, seed=800 + number), max_tokens=1)
    long, waits = (
        request("long", both.prompt(30 * BLOCK, seed=810), 1),
        request("w", both.prompt(10 * BLOCK, seed=801), 1),
    )
    assert run_all(both.vllm, [long, waits]).cached == {"long": 0, "w": 9 * BLOCK}


def flood(both: Both, seed: int) -> None:
    """Compute more than the pool holds."""
    run_all(both.vllm, [request(f"f{i}", both.prompt(900, seed=seed + i), 1) for i in range(5)])


def test_saves_stay_until_a_reset_or_their_end(both: Both) -> None:
    """They survive floods that evict all else; each saved prompt is a hit, and a reset releases them first."""

    def outcome_of(asked: EngineRequest) -> str:
        first = outputs_of(both.vllm, asked)[0].first
        return "" if first is None or first.save is None else first.save.outcome

    reset(both)
    saved, kept, plain = (request(name, both.prompt(330, seed=700 + i)) for i, name in enumerate("skp"))
    save = structs.replace(saved, saves=(Save(b"s" * 16, 320),))
    assert outcome_of(save) == "saved"
    assert outcome_of(structs.replace(kept, saves=(Save(b"", 320, 3600.0),))) == "saved"
    assert outcome_of(save) == "present"
    assert outcome_of(structs.replace(plain, saves=(Save(b"p" * 16, 320),))) == "over_budget"
    flood(both, 710)
    assert [run_all(both.vllm, [item]).cached[item.request_id] for item in (plain, saved, kept)] == [0, 320, 320]
    samples = {name: value for name, _, value in both.vllm.stats().samples}
    assert samples["warmpath_pinned_blocks"] == 20
    hot = both.vllm.transfer.hot_prefixes()
    assert len(hot.saves) == 2
    (ours,) = (save for save in hot.saves if save.key == b"s" * 16)
    prefix = hot.prefix(ours.run)
    assert prefix.token_ids.tobytes() == saved.token_ids[:320].tobytes()
    reset(both)
    assert both.vllm.transfer.take_over_pin(ours, prefix) is None, "it is gone"
    compute(both, saved.token_ids)
    assert both.vllm.transfer.take_over_pin(ours, prefix) == "pinned"
    flood(both, 720)
    assert run_all(both.vllm, [saved]).cached["s"] == 320
    reset(both)


MOST_CALLS = 20.0
"""Of Python's functions a token, between vLLM's core and the replica: three, and a step's 115. It was 91."""


def test_a_token_takes_few_calls(both: Both) -> None:
    """In the middle of answers, eight in each step: the difference of two lengths."""
    counts = [_calls(both, tokens) / 8 for tokens in (20, 20, 120)]
    taken = (counts[2] - counts[1]) / 100
    assert 1.0 < taken <= MOST_CALLS


def _calls(both: Both, tokens: int) -> int:
    """Return the calls in the thread of vLLM's frontend while it answers eight requests."""
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    async def watch(by: Any) -> None:
        sys.setprofile(by)

    asked = [request(f"calls {tokens} {number}", both.prompt(40, number), tokens) for number in range(8)]
    both.vllm._frontend.call(watch(count)).result()
    try:
        done = run_all(both.vllm, asked).tokens
    finally:
        both.vllm._frontend.call(watch(None)).result()
    assert [len(ids) for ids in done.values()] == [tokens] * 8
    return calls


def test_a_dead_core_fails_requests_at_once_and_is_seen(both: Both) -> None:
    """Other replicas can go on with them. The engine still ends cleanly, and leaves no process and no file."""
    ours = [child for child in psutil.Process().children(recursive=True) if child.name().startswith("VLLM")]
    assert len(ours) == 1, "the core computes itself"
    directory = both.vllm._endpoints.directory
    collector, kinds = Collector(), dict[str, str]()

    def sink(outputs: Sequence[EngineOutput]) -> None:
        kinds.update({output.request_id: output.error for output in outputs})
        collector(outputs)

    both.vllm.submit(request("dying", both.prompt(40, seed=77), 1500, temperature=1.0, seed=1), sink)
    collector.wait_tokens("dying", 2, 120)
    for child in ours:
        if "EngineCore" in child.name():
            child.kill()
    collector.wait(["dying"], 120)
    assert not both.vllm.healthy()
    both.vllm.submit(request("next", both.prompt(40)), sink)
    collector.wait(["next"], 120)
    assert collector.finish == dict.fromkeys(("dying", "next"), "error")
    assert kinds == dict.fromkeys(("dying", "next"), "unavailable")
    both.vllm.stop()
    both.vllm.stop()
    with pytest.raises(EngineError):
        both.vllm.submit(request("late", both.prompt(40)), collector)
    _, alive = psutil.wait_procs(ours, timeout=60)
    assert alive == []
    assert not directory.exists()
