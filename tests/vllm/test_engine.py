"""vLLM behind the engine's contract, and its tokens beside the built-in engine's. One vLLM for all of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from router.feed.sequencer import BlockMirror
from router.protocol.block_hash import PrefixScope, extend_chain, split_chain
from router.protocol.events import Event
from serve_app.cache.kv_chain import KvChain, TransferError
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.checkpoints.checkpoint import CheckpointInfo, load_checkpoint_info
from serve_app.engine.core.build import build_engine
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import (
    AdapterError,
    EngineError,
    EngineRequest,
    KeptPrefix,
    RemoteKv,
    RequestTooLong,
    Save,
    TokenRules,
    UnknownAdapter,
)
from serve_app.engine.settings import EngineSettings
from serve_app.engine.vllm.engine import VllmEngine
from serve_app.engine.vllm.settings import VllmSettings
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import Matchers
from tests.serve_app.engine.adapters import described, save_adapter
from tests.serve_app.engine.tiny import SCOPE, Collector, request, root_of, run_all

BLOCK = 32
BLOCKS = 96


class Heard:
    """What routers know of the engine."""

    def __init__(self) -> None:
        self.mirror = BlockMirror()
        self._lock = threading.Lock()

    def __call__(self, events: list[Event]) -> None:
        with self._lock:
            for event in events:
                self.mirror.apply(event)

    def held(self) -> set[bytes]:
        with self._lock:
            return set(split_chain(self.mirror.tiers().get("pool", b"")))


@dataclass
class Both:
    vllm: VllmEngine
    torch: TorchEngine
    heard: Heard
    info: CheckpointInfo

    def prompt(self, length: int, seed: int = 0) -> Any:
        return np.random.default_rng(seed).integers(0, self.info.vocab_size, length, dtype=np.int32)


@pytest.fixture(scope="module")
def both(demo_model_path: Path) -> Iterator[Both]:
    """The demo model in float32 on either engine; vLLM's pool holds three thousand tokens."""
    info = load_checkpoint_info(demo_model_path)
    heard = Heard()
    settings = EngineSettings(block_size=BLOCK, num_blocks=BLOCKS, dtype="float32", max_model_len=2048)
    torch = build_engine(demo_model_path, settings, lambda _: None)
    vllm = VllmEngine(
        VllmSettings(
            model=str(demo_model_path),
            end_token_ids=info.eos_token_ids,
            block_size=BLOCK,
            block_bytes=torch.kv_block_bytes,
            num_blocks=BLOCKS,
            max_model_len=2048,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_waiting_requests=32,
            dtype="float32",
            enforce_eager=True,
            num_threads=os.cpu_count() or 1,
            lora=True,
            max_cpu_loras=4,
            max_lora_rank=8,
            model_fingerprint=info.fingerprint,
            transfer=True,
            pin_budget=24,
        ),
        heard,
    )
    vllm.start()
    torch.start()
    yield Both(vllm, torch, heard, info)
    vllm.stop()
    torch.stop()


def eventually(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.005)


def tokens_of(engine: Any, name: str, ids: Any, **sampling: Any) -> list[int]:
    return run_all(engine, [request(name, ids, **sampling)]).tokens[name]


def test_it_is_of_the_size_that_was_asked_for(both: Both) -> None:
    """One block of vLLM's own comes on top; its KV is as large as the built-in engine's."""
    assert both.vllm.facts.num_blocks == BLOCKS
    assert both.vllm.kv_block_bytes == both.torch.kv_block_bytes
    assert both.vllm.healthy()


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "filtered": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 3},
    "min_p": {"temperature": 1.2, "min_p": 0.05, "seed": 11},
    "penalties": {"temperature": 0.9, "seed": 5, "rules": TokenRules(1.0, 0.5, 1.3)},
    "bias": {"rules": TokenRules(logit_bias=((5, 100.0),), bad_words=((5, 5),))},
    "logprobs": {"temperature": 1.0, "seed": 9, "logprobs": 3},
}


def test_tokens_are_the_built_in_engines_alone_and_in_a_batch(both: Both) -> None:
    """Every way to choose them, at once in vLLM and in turn."""
    asked = [request(name, both.prompt(90), 24, **sampling) for name, sampling in SAMPLED.items()]
    wanted, batch = run_all(both.torch, asked), run_all(both.vllm, asked)
    for item in asked:
        name = item.request_id
        assert batch.tokens[name] == wanted.tokens[name], name
        assert tokens_of(both.vllm, name, item.token_ids, max_tokens=24, **SAMPLED[name]) == wanted.tokens[name], name


@pytest.mark.parametrize("name", SAMPLED)
def test_an_answer_goes_on_elsewhere(name: str, both: Both) -> None:
    """Tokens that the built-in engine began are gone on with by vLLM as it would have itself."""
    whole = tokens_of(both.torch, name, both.prompt(90), max_tokens=24, **SAMPLED[name])
    ids = np.concatenate([both.prompt(90), np.array(whole[:10], dtype=np.int32)])
    resumed = replace(request("resumed", ids, 14, **SAMPLED[name]), resumed_tokens=10)
    assert run_all(both.vllm, [resumed]).tokens["resumed"] == whole[10:]


def test_logprobs_are_of_the_models_own_logits(both: Both) -> None:
    """Each token's own and the likeliest, whatever rules did."""
    found = []
    for engine in (both.torch, both.vllm):
        outputs: list[Any] = []
        done = threading.Event()

        def sink(batch: Any, outputs: list[Any] = outputs, done: threading.Event = done) -> None:
            outputs.extend(batch)
            if any(output.finish_reason for output in batch):
                done.set()

        asked = request("r", both.prompt(60), 6, temperature=1.0, seed=2, logprobs=3, rules=TokenRules(2.0))
        engine.submit(asked, sink)
        assert done.wait(120)
        found.append([told for output in outputs for told in output.logprobs])
    assert len(found[0]) == len(found[1]) == 6
    for ours, theirs in zip(*found, strict=True):
        assert theirs.logprob == pytest.approx(ours.logprob, abs=1e-3)
        assert [token for token, _ in theirs.top] == [token for token, _ in ours.top]
        assert [value for _, value in theirs.top] == pytest.approx([value for _, value in ours.top], abs=1e-3)


def test_a_grammar_is_followed_and_gone_on_with(both: Both) -> None:
    """An answer matches, also from its middle; one that cannot match is an error and not a text."""
    matchers = Matchers(GrammarCompiler(both.info.path, both.info.vocab_size, both.info.eos_token_ids))
    text = llguidance_form(Grammar.regex(r"(red|green|blue)(, (red|green|blue)){3}", "regex"))
    ends = both.info.eos_token_ids

    def asked(name: str, ids: Any, resumed: int = 0) -> Any:
        wanted = request(name, ids, 40, temperature=1.0, seed=4, stop_token_ids=ends)
        return replace(wanted, matcher=matchers.matcher(text), resumed_tokens=resumed)

    prompt = both.prompt(50)
    wanted = run_all(both.torch, [asked("a", prompt)])
    found = run_all(both.vllm, [asked("a", prompt)])
    assert found.finish["a"] == wanted.finish["a"] == "stop"
    assert found.tokens["a"] == wanted.tokens["a"]
    begun = np.concatenate([prompt, np.array(found.tokens["a"][:3], dtype=np.int32)])
    assert run_all(both.vllm, [asked("b", begun, 3)]).tokens["b"] == wanted.tokens["a"][3:]
    wrong = run_all(both.vllm, [asked("c", np.concatenate([prompt, prompt[:3]]), 3), request("d", prompt)])
    assert wrong.finish == {"c": "error", "d": "length"}
    assert "does not match its grammar" in wrong.errors["c"]


def test_how_answers_end(both: Both) -> None:
    """Stop tokens are taken off unless they are asked for; without tokens only the prompt is computed."""
    ids = both.prompt(70)
    tokens = tokens_of(both.vllm, "whole", ids, max_tokens=12)
    stop = tokens[5]
    at = tokens.index(stop)
    found = run_all(
        both.vllm,
        [
            request("stop", ids, 12, stop_token_ids=(stop,)),
            request("shown", ids, 12, stop_token_ids=(stop,), shown_stop_token_ids=(stop,)),
            request("later", ids, 12, stop_token_ids=(stop,), rules=TokenRules(min_tokens=at + 1)),
            request("none", ids, 0),
            replace(request("late", ids, 1900), timeout_s=0.5),
        ],
    )
    assert found.finish == {
        "stop": "stop",
        "shown": "stop",
        "later": found.finish["later"],
        "none": "length",
        "late": "timeout",
    }
    assert found.tokens["stop"] == tokens[:at]
    assert found.tokens["shown"] == tokens[: at + 1]
    assert len(found.tokens["later"]) > at
    assert found.tokens["later"][at] != stop
    assert found.tokens["none"] == []
    assert "took too long" in found.errors["late"]


def test_what_cannot_be_taken_is_refused_at_once(both: Both) -> None:
    """Before vLLM hears of it, with the contract's errors."""
    ids, collector = both.prompt(40), Collector()
    scope = PrefixScope("tiny", public_blocks=1)
    unknown = PrefixScope("tiny", "nobody@1")
    refused: list[tuple[Any, type[Exception]]] = [
        (request("r", both.prompt(2000), 100), RequestTooLong),
        (request("r", [both.info.vocab_size]), ValueError),
        (request("r", []), ValueError),
        (replace(request("r", ids), scope=scope, root=root_of(scope)), ValueError),
        (replace(request("r", ids), store_kv=False), ValueError),
        (replace(request("r", ids), scope=unknown, root=root_of(unknown)), UnknownAdapter),
    ]
    for item, error in refused:
        with pytest.raises(error):
            both.vllm.submit(item, collector)
    assert both.vllm.load().waiting_sequences == both.vllm.load().queued_prefill_tokens == 0
    saved = replace(request("saved", ids), save=Save(b"k" * 16, 31))
    outputs: list[Any] = []
    done = threading.Event()
    both.vllm.submit(saved, lambda batch: (outputs.extend(batch), batch[-1].finish_reason and done.set()))  # type: ignore[func-returns-value]
    assert done.wait(60)
    assert outputs[0].save.outcome == "too_short"


def test_a_cancelled_request_ends_and_its_prompt_stays(both: Both) -> None:
    """Its blocks are free, what was computed can be hit; unknown ids are nobody's."""
    ids, collector = both.prompt(200, seed=5), Collector()
    both.vllm.submit(request("long", ids, 1500), collector)
    collector.wait_tokens("long", 3, 120)
    both.vllm.cancel("long")
    both.vllm.cancel("nobody")
    collector.wait(["long"])
    assert collector.finish["long"] == "cancelled"
    assert run_all(both.vllm, [request("again", ids)]).cached["again"] == 192


def hear_all_so_far(both: Both, seed: int) -> None:
    """Wait for the events of all steps so far: those of a request of one block and one token come last."""
    ids = both.prompt(BLOCK + 1, seed=seed)
    run_all(both.vllm, [request(f"last {seed}", ids, 1)])
    chain = extend_chain(root_of(SCOPE), 0, ids, BLOCK)
    eventually(lambda: both.vllm.known_blocks(chain, 1) == 1)


def test_what_the_directory_says_is_what_is_delivered(both: Both) -> None:
    """Conversations of two tenants grow in a pool that evicts; the hint before each request is what it gets."""
    random = np.random.default_rng(1)
    scopes = [PrefixScope("tiny", salt=name) for name in (b"a", b"b")]
    talks = [[scope, both.prompt(40 + 60 * i, seed=i // 2)] for i, scope in enumerate(scopes * 3)]
    wrong, hits = [], 0
    for number in range(300):
        talk = talks[random.integers(len(talks))]
        scope, ids = talk
        chain = extend_chain(root_of(scope), 0, ids, BLOCK)
        hear_all_so_far(both, 5000 + number)
        most = (len(ids) - 1) // BLOCK
        predicted = BLOCK * both.vllm.known_blocks(chain, most)
        name = f"talk {number}"
        found = run_all(both.vllm, [request(name, ids, 6, scope=scope)])
        hits += found.cached[name] > 0
        if found.cached[name] != predicted:
            wrong.append((name, predicted, found.cached[name]))
        more = np.concatenate([ids, np.array(found.tokens[name], dtype=np.int32), both.prompt(50, seed=100 + number)])
        talk[1] = more if len(more) < 900 else both.prompt(40, seed=1000 + number)
    assert hits > 100
    assert wrong == []


def test_the_load_is_exact_and_returns_to_nothing(both: Both) -> None:
    """Prompt tokens that wait are counted from their submission on, by router, and by nothing when all is over."""

    def counted() -> dict[str, float]:
        return {name: value for name, _, value in both.vllm.stats().samples}

    collector, before = Collector(), counted()
    asked = [
        replace(request(f"r{i}", both.prompt(600, seed=50 + i), 4), router_id=f"router {i % 2}", reservation=i + 1)
        for i in range(4)
    ]
    for item in asked:
        both.vllm.submit(item, collector)
    first = both.vllm.load()
    assert first.queued_prefill_tokens <= 2400
    assert first.queued_prefill_tokens > 600
    assert sum(share.queued_prefill_tokens for share in first.shares) == first.queued_prefill_tokens
    seen = {first.queued_prefill_tokens}
    while len(collector.finish) < 4:
        seen.add(both.vllm.load().queued_prefill_tokens)
        time.sleep(0.001)
    last = both.vllm.load()
    assert (last.queued_prefill_tokens, last.running_sequences, last.waiting_sequences) == (0, 0, 0)
    assert {share.router_id: share.last_reservation for share in last.shares} == {"router 0": 3, "router 1": 4}
    assert len(seen) > 3
    assert last.prefill_tokens_per_s > 0
    samples = counted()
    assert samples["warmpath_generation_tokens_total"] > before["warmpath_generation_tokens_total"]
    assert samples["warmpath_recomputed_tokens_total"] == before["warmpath_recomputed_tokens_total"]


def test_a_reset_forgets_everything_or_nothing(both: Both) -> None:
    """While a block is in use nothing is forgotten; then routers hear it at once, though vLLM says so a step later."""
    ids, collector = both.prompt(200, seed=5), Collector()
    both.vllm.submit(request("long", ids, 1500), collector)
    collector.wait_tokens("long", 2, 120)
    assert not both.vllm.reset_prefix_cache()
    both.vllm.cancel("long")
    collector.wait(["long"])
    eventually(both.vllm.reset_prefix_cache)
    assert both.heard.held() == set()
    assert run_all(both.vllm, [request("again", ids)]).cached["again"] == 0
    eventually(lambda: len(both.heard.held()) >= 6)
    assert run_all(both.vllm, [request("more", ids)]).cached["more"] == 192


def test_adapters_apart_and_as_in_the_built_in_engine(both: Both, demo_model_path: Path, tmp_path: Path) -> None:
    """Base and an adapter in every slot, in one batch, get their own tokens and share no KV.

    The files may be gone after the load. The base model's row gets nothing of the last slot's adapter.
    """
    scopes, ids = [PrefixScope("tiny")], both.prompt(100, seed=8)
    for seed, name in enumerate(("one", "two", "three", "four")):
        path = save_adapter(demo_model_path, tmp_path / name, seed, ("q_proj", "v_proj", "up_proj"))
        spec, scope = described(path, name)
        both.vllm.load_adapter(spec)
        both.torch.load_adapter(spec)
        scopes.append(scope)
        (path / "adapter_model.safetensors").write_bytes(b"")
    assert set(both.vllm.adapters()) == {scope.lora for scope in scopes[1:]}
    asked = [request(f"r{i}", ids, 10, scope=scope) for i, scope in enumerate(scopes)]
    wanted, found = run_all(both.torch, asked), run_all(both.vllm, asked)
    assert found.tokens == wanted.tokens
    assert len({tuple(tokens) for tokens in found.tokens.values()}) == 5
    assert set(found.cached.values()) == {0}
    assert set(run_all(both.vllm, asked).cached.values()) == {96}
    assert both.vllm.unload_adapter(scopes[1].lora)
    large, _ = described(save_adapter(demo_model_path, tmp_path / "large", 5, ("q_proj",), r=32), "large")
    with pytest.raises(AdapterError):
        both.vllm.load_adapter(large)
    with pytest.raises(UnknownAdapter):
        both.vllm.submit(asked[1], Collector())
    assert run_all(both.vllm, [asked[0], asked[2]]).tokens["r2"] == wanted.tokens["r2"]


def reset(engine: VllmEngine) -> None:
    eventually(engine.reset_prefix_cache)


def arrives(both: Both, asked: EngineRequest, part: KvChain, first: int = 0) -> tuple[int, Collector]:
    """Give a part to the engine while a request waits for it, as a pull does."""
    remote, collector = RemoteKv(part.header.blocks * BLOCK), Collector()
    both.vllm.submit(replace(asked, remote_kv=remote), collector)
    try:
        chain = extend_chain(asked.root, 0, asked.token_ids, BLOCK)
        return both.vllm.import_part(part, HashedTokens(asked.scope, asked.token_ids, chain, "t"), first), collector
    finally:
        remote.end()
        both.vllm.wake()
        collector.wait([asked.request_id], 120)


@pytest.mark.parametrize("with_adapter", [False, True])
def test_kv_that_left_and_came_back_gives_the_same_tokens(
    with_adapter: bool, both: Both, demo_model_path: Path, tmp_path: Path
) -> None:
    """In two parts, read as computed KV is; afterwards the pool is as empty as before, and routers know of it."""
    scope, ids = PrefixScope("tiny"), both.prompt(1000, seed=300 + with_adapter)
    if with_adapter:
        spec, scope = described(save_adapter(demo_model_path, tmp_path / "kv", 5, ("q_proj", "v_proj")), "kv")
        both.vllm.load_adapter(spec)
    asked = request("asked", ids, 12, scope=scope)
    reset(both.vllm)
    wanted = run_all(both.vllm, [asked]).tokens["asked"]
    chain = extend_chain(asked.root, 0, ids, BLOCK)
    eventually(lambda: both.vllm.known_blocks(chain, 31) == 31)
    parts = [both.vllm.export_prefix(HashedTokens(scope, ids, chain), first, 16) for first in (0, 16)]
    assert both.vllm.export_prefix(HashedTokens(scope, ids, chain), 31) is None
    one, two = parts
    assert one is not None and two is not None
    assert [one.header.blocks, two.header.blocks] == [16, 15]
    reset(both.vllm)
    assert both.heard.held() == set()
    remote, collector = RemoteKv(31 * BLOCK), Collector()
    both.vllm.submit(replace(asked, remote_kv=remote), collector)
    assert both.vllm.import_part(one, HashedTokens(scope, ids, chain, "t"), 0) == 16
    assert both.vllm.import_part(two, HashedTokens(scope, ids, chain, "t"), 16) == 31
    assert not collector.finish, "it waits for all of it"
    remote.end()
    both.vllm.wake()
    collector.wait(["asked"], 120)
    assert collector.tokens["asked"] == wanted
    assert collector.cached["asked"] == 31 * BLOCK
    eventually(lambda: set(split_chain(chain)) <= both.heard.held())
    reset(both.vllm)  # which no block in use would let it
    assert not list(both.vllm._endpoints.directory.glob("kv-[0-9]*"))


def test_a_copy_goes_before_what_waits(both: Both) -> None:
    """A holder hands out while prompts queue there, which is when others pull from it."""
    held, asked = both.prompt(320, seed=500), [request(f"q{i}", both.prompt(600, seed=501 + i), 1) for i in range(4)]
    reset(both.vllm)
    run_all(both.vllm, [request("held", held)])
    chain = extend_chain(request("held", held).root, 0, held, BLOCK)
    eventually(lambda: both.vllm.known_blocks(chain, 10) == 10)
    collector = Collector()
    for item in asked:
        both.vllm.submit(item, collector)
    part = both.vllm.export_prefix(HashedTokens(PrefixScope("tiny"), held, chain))
    ended = len(collector.finish)
    collector.wait([item.request_id for item in asked], 120)
    assert part is not None and part.header.blocks == 10
    assert ended < 4


def test_what_is_offered_can_be_taken_over(both: Both) -> None:
    """By one who has never heard of it: the hottest first, each prefix under its own scope."""
    reset(both.vllm)
    scopes, ids = [PrefixScope("tiny"), PrefixScope("tiny", salt=b"other")], both.prompt(200, seed=600)
    for scope in (*scopes, scopes[1]):
        run_all(both.vllm, [request("r", ids, scope=scope)])
        chain = extend_chain(root_of(scope), 0, ids, BLOCK)
        eventually(lambda chain=chain: both.vllm.known_blocks(chain, 6) == 6)  # type: ignore[misc]
    room = both.vllm.cache_room()
    assert room.free_blocks == BLOCKS - 12
    hot = both.vllm.hot_prefixes()
    assert [hot.prefix(number).scope for number in range(len(hot.runs))] == scopes[::-1]
    prefixes = [hot.prefix(number) for number in range(len(hot.runs))]
    parts = [both.vllm.export_prefix(prefix) for prefix in prefixes]
    reset(both.vllm)
    for prefix, part in zip(prefixes, parts, strict=True):
        assert part is not None
        assert both.vllm.import_part(part, prefix, 0) == 6
    for scope in scopes:
        assert run_all(both.vllm, [request("r", ids, scope=scope)]).cached["r"] == 6 * BLOCK
    reset(both.vllm)


def outcome_of(both: Both, asked: EngineRequest) -> str:
    """What became of a request's save."""
    outputs: list[Any] = []
    done = threading.Event()

    def sink(batch: Any) -> None:
        outputs.extend(batch)
        if batch[-1].finish_reason:
            done.set()

    both.vllm.submit(asked, sink)
    assert done.wait(120)
    assert outputs[-1].finish_reason == "length"
    return str(outputs[0].save.outcome)


def flood(both: Both, seed: int) -> None:
    """Have more computed than the pool holds."""
    run_all(both.vllm, [request(f"f{i}", both.prompt(900, seed=seed + i), 1) for i in range(5)])


def test_saves_stay_until_a_reset_or_their_end(both: Both) -> None:
    """Through floods that evict all else; each saved prompt is a hit, and a reset lets go of them first."""
    reset(both.vllm)
    saved, kept, plain = (request(name, both.prompt(330, seed=700 + i)) for i, name in enumerate("skp"))
    save = replace(saved, save=Save(b"s" * 16, 320))
    assert outcome_of(both, save) == "saved"
    assert outcome_of(both, replace(kept, keep=(KeptPrefix(320, 3600.0),))) == "saved"
    assert outcome_of(both, save) == "present"
    assert outcome_of(both, replace(plain, save=Save(b"p" * 16, 320))) == "over_budget"
    flood(both, 710)
    assert [run_all(both.vllm, [item]).cached[item.request_id] for item in (plain, saved, kept)] == [0, 320, 320]
    samples = {name: value for name, _, value in both.vllm.stats().samples}
    assert samples["warmpath_pinned_blocks"] == 20
    hot = both.vllm.hot_prefixes()
    assert {hot.prefix(one.run).token_ids.tobytes() for one in hot.saves} == {
        item.token_ids[:320].tobytes() for item in (saved, kept)
    }
    (ours,) = (one for one in hot.saves if one.key == b"s" * 16)
    reset(both.vllm)
    assert not both.heard.held()
    assert run_all(both.vllm, [saved]).cached["s"] == 0
    prefix = hot.prefix(ours.run)
    eventually(lambda: both.vllm.known_blocks(prefix.chain, 10) == 10)
    assert both.vllm.take_over_pin(ours, prefix) == "pinned"
    assert both.vllm.take_over_pin(ours, prefix) == "present"
    flood(both, 720)
    assert run_all(both.vllm, [saved]).cached["s"] == 320
    reset(both.vllm)
    assert both.vllm.take_over_pin(ours, prefix) is None, "it is gone"


def test_kv_of_others_is_refused_and_computed(both: Both) -> None:
    """Another byte, another model, another tenant, another prompt, a prefix that nobody asks for."""
    ids = both.prompt(200, seed=400)
    asked = request("mine", ids, 8)
    reset(both.vllm)
    wanted = run_all(both.vllm, [asked]).tokens["mine"]
    chain = extend_chain(asked.root, 0, ids, BLOCK)
    eventually(lambda: both.vllm.known_blocks(chain, 6) == 6)
    part = both.vllm.export_prefix(HashedTokens(asked.scope, ids, chain))
    assert part is not None
    other_scope = PrefixScope("tiny", salt=b"other")
    assert (
        both.vllm.export_prefix(HashedTokens(other_scope, ids, extend_chain(root_of(other_scope), 0, ids, BLOCK)))
        is None
    )
    reset(both.vllm)
    broken = part.payload.copy()
    broken[3, 7] ^= 1
    foreign = msgspec.structs.replace(part.header.format, model="another")
    for wrong in (
        KvChain(part.header, broken),
        KvChain(part.header, part.payload[:-1]),
        KvChain(msgspec.structs.replace(part.header, format=foreign), part.payload),
    ):
        with pytest.raises(TransferError):
            arrives(both, asked, wrong)
        reset(both.vllm)
    with pytest.raises(TransferError):
        arrives(both, request("theirs", ids, 8, scope=other_scope), part)
    with pytest.raises(TransferError):
        arrives(both, request("other", both.prompt(200, seed=401), 8), part)
    reset(both.vllm)
    with pytest.raises(TransferError):
        both.vllm.import_part(
            part, HashedTokens(other_scope, ids, extend_chain(root_of(other_scope), 0, ids, BLOCK), "t"), 0
        )
    assert run_all(both.vllm, [asked]).cached["mine"] == 0
    reset(both.vllm)
    held, collector = arrives(both, asked, part)
    assert (held, collector.cached["mine"], collector.tokens["mine"]) == (6, 6 * BLOCK, wanted)


def test_a_dead_core_fails_requests_at_once_and_is_seen(both: Both) -> None:
    """The replica is replaced then; the end is clean all the same, and leaves no process and no file."""
    ours = [child for child in psutil.Process().children(recursive=True) if child.name().startswith("VLLM")]
    assert len(ours) == 1, "the core computes itself"
    directory = both.vllm._endpoints.directory
    collector = Collector()
    both.vllm.submit(request("dying", both.prompt(40, seed=77), 1500, temperature=1.0, seed=1), collector)
    collector.wait_tokens("dying", 2, 120)
    for child in ours:
        if "EngineCore" in child.name():
            child.kill()
    collector.wait(["dying"], 120)
    assert collector.finish["dying"] == "error"
    assert not both.vllm.healthy()
    both.vllm.stop()
    both.vllm.stop()
    with pytest.raises(EngineError):
        both.vllm.submit(request("late", both.prompt(40)), collector)
    _, alive = psutil.wait_procs(ours, timeout=60)
    assert alive == []
    assert not directory.exists()
