"""Models with several kinds of KV, tiny and random, one vLLM each: tokens equal those without a cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, Lfm2Config, MistralConfig

from router.directory import Directory
from router.protocol.block_hash import PrefixScope
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import RequestTooLong, Save
from serve_app.engine.vllm.engine import VllmEngine
from serve_app.replica.engine_factory import make_engine
from tests.harness.eventually import eventually
from tests.serve_app.engine.tiny import request, run_all
from tests.vllm.engines import BLOCK, outputs_of, prefix_of

VOCAB = 211
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
KINDS = ["sliding_attention", "full_attention"] * 2  # as vLLM reads it, for any config
MODELS = {
    "a window in every layer": MistralConfig(**SIZES, sliding_window=80),
    "short convolutions beside attention": Lfm2Config(
        **{**SIZES, "tie_word_embeddings": True},
        layer_types=["conv", "full_attention"] * 2,
        conv_dim=128,
        conv_dim_out=128,
        block_dim=128,
    ),
    "windows beside full attention, sinks, experts": GptOssConfig(
        **{**SIZES, "initializer_range": 0.1},
        head_dim=32,
        sliding_window=80,
        layer_types=KINDS,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "Gemma 3: three layers with a window for each with full attention": Gemma3TextConfig(
        **{**SIZES, "initializer_range": 0.1, "tie_word_embeddings": True},
        head_dim=32,
        sliding_window=80,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    ),
}
BLOCKS = 80
SCOPES = {name: PrefixScope("tiny", salt=name.encode()) for name in ("a", "b")}


@dataclass
class Served:
    engine: VllmEngine
    directory: Directory
    model: Any

    @property
    def longest(self) -> int:
        """The tokens of a longest request, beside all saves."""
        return min(self.engine.facts.max_model_len, self.engine._most_blocks * BLOCK)

    def check(self, ids: Any, tokens: list[int]) -> None:
        """Compare with the model's logits in transformers, without a prefix cache.

        On a CPU vLLM rounds convolutions in decodes, and so the states of answers' blocks; tokens are then likely ones.
        """
        answer = torch.tensor(np.concatenate([ids, tokens]).astype(np.int64))
        with torch.no_grad():
            told = self.model(answer[None]).logits[0, len(ids) - 1 : -1]
        rounded = 0.5 if isinstance(self.model.config, Lfm2Config) else 1e-3
        assert (told.max(dim=-1).values - told[torch.arange(len(tokens)), tokens]).max() < rounded

    def settle(self, number: int) -> None:
        """Return once all earlier events are heard: those of a separate prompt come last."""
        ids = np.random.default_rng(9000 + number).integers(3, VOCAB, BLOCK + 1, dtype=np.int32)
        run_all(self.engine, [request(f"settle {number}", ids, 1)])  # type: ignore[arg-type]
        eventually(lambda: self.engine.cached_blocks(prefix_of(ids).chain, 1) == 1)


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_config(MODELS[request.param]).float().eval()
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    config = AppConfig(
        engine="vllm",
        block_size=BLOCK,
        num_blocks=2 * BLOCKS if "Gemma" in request.param else BLOCKS,  # each has the KV of one layer in four
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=250,  # a turn would end within a block unless prevented
        dtype="float32",
        device="cpu",
        enforce_eager=True,
        num_threads=1,  # with more, vLLM is wrong about sinks
        pin_budget=0.0 if "convolutions" in request.param else 0.25,  # a state cannot be kept
    )
    directory = Directory(BLOCK)
    directory.add_replica("r")
    engine = make_engine(config, load_checkpoint_info(path), lambda events: directory.apply("r", events))
    assert isinstance(engine, VllmEngine)
    engine.start()
    yield Served(engine, directory, model)
    engine.stop()


def test_predictions_are_delivered_and_no_token_changes(served: Served) -> None:
    """Conversations of two tenants grow in a pool that evicts; some diverge in the middle, and some run together."""
    random = np.random.default_rng(1)
    talks = [[name, random.integers(3, VOCAB, 100 + 90 * i, dtype=np.int32)] for i, name in enumerate("ababab")]
    wrong, hits = [], 0
    for number in range(36):
        served.settle(number)
        together = number % 6 == 5
        chosen = random.choice(len(talks), 3 if together else 1, replace=False)
        asked, predicted = [], {}
        for at in chosen:
            tenant, ids = talks[at]
            if number % 7 == 6:
                ids = ids[: len(ids) // 2]
            name, scope = f"{number} {at}", SCOPES[tenant]
            asked.append(structs.replace(request(name, ids, 6, scope=scope), tenant=tenant))
            chain, most = prefix_of(ids, scope).chain, (len(ids) - 1) // BLOCK
            predicted[name] = BLOCK * served.engine.cached_blocks(chain, most)
            assert served.directory.match(chain[: 16 * most]).get("r", 0) == predicted[name]
        found = run_all(served.engine, asked)  # type: ignore[arg-type]
        for at, one in zip(chosen, asked, strict=True):
            tokens = found.tokens[one.request_id]
            served.check(one.token_ids, tokens)
            hits += found.cached[one.request_id] > 0
            if not together and found.cached[one.request_id] != predicted[one.request_id]:
                wrong.append((one.request_id, predicted[one.request_id], found.cached[one.request_id]))
            more = random.integers(3, VOCAB, 40, dtype=np.int32)
            grown = np.concatenate([one.token_ids, np.array(tokens, dtype=np.int32), more])
            talks[at][1] = grown if len(grown) < 800 else grown[:150]
    assert wrong == []
    assert hits > 12
    assert served.engine.healthy()
    counted = {name: value for name, _, value in served.engine.stats().samples}
    assert counted["warmpath_unplaced_kv_blocks_total"] == 0


def test_a_reset_forgets_all_groups(served: Served) -> None:
    ids = np.random.default_rng(3).integers(3, VOCAB, 300, dtype=np.int32)
    run_all(served.engine, [request("first", ids)])  # type: ignore[arg-type]
    served.settle(100)
    assert served.engine.cached_blocks(prefix_of(ids).chain, 9) == 9
    eventually(served.engine.reset_prefix_cache)
    assert served.directory.match(prefix_of(ids).chain) == {}
    assert run_all(served.engine, [request("again", ids)]).cached["again"] == 0  # type: ignore[arg-type]


def test_a_save_outlives_a_flood_and_leaves_space_for_the_longest_request(served: Served) -> None:
    """Of a window its last blocks are kept, at the save's end; layers stay in their groups."""
    if served.engine.settings.pin_budget:
        eventually(served.engine.reset_prefix_cache)
        random, kept = np.random.default_rng(5), 6 * BLOCK
        ids = random.integers(3, VOCAB, kept + 9, dtype=np.int32)
        saved = structs.replace(request("save", ids), saves=(Save(b"s" * 16, kept),))
        first = next(output.first for output in outputs_of(served.engine, saved) if output.first is not None)
        assert first.save is not None and first.save.outcome == "saved"
        for number, length in enumerate((700, 900, 800, 700, 900, served.longest - 4)):
            flood = random.integers(3, VOCAB, length, dtype=np.int32)
            run_all(served.engine, [request(f"flood {number}", flood, 4)])  # type: ignore[arg-type]
        served.settle(200)
        assert served.engine.cached_blocks(prefix_of(ids).chain, 6) == 6
        again = run_all(served.engine, [request("again", ids, 6)])  # type: ignore[arg-type]
        assert again.cached["again"] == kept
        served.check(ids, again.tokens["again"])
        eventually(served.engine.reset_prefix_cache)
        assert run_all(served.engine, [request("anew", ids, 6)]).cached["anew"] == 0  # type: ignore[arg-type]


def test_the_longest_request_fits(served: Served) -> None:
    """vLLM lowers the length to what the pool holds in all groups; with windows alone that may exceed the pool."""
    eventually(served.engine.reset_prefix_cache)
    longest = served.longest
    full = {"mistral": 0, "lfm2": 1, "gpt_oss": 1, "gemma3_text": 1}[served.model.config.model_type]
    assert (longest < 4096) == bool(full)
    ids = np.random.default_rng(4).integers(3, VOCAB, longest - 6, dtype=np.int32)
    assert len(run_all(served.engine, [request("longest", ids, 6)]).tokens["longest"]) == 6  # type: ignore[arg-type]
    with pytest.raises(RequestTooLong):
        served.engine.submit(request("longer", ids, 7), lambda _: None)
