"""vLLM and the built-in engine with one model, and helpers to test both."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from router.protocol.block_hash import PrefixScope, extend_chain
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.checkpoints.checkpoint import CheckpointInfo, load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EngineOutput, EngineRequest
from serve_app.engine.vllm.engine import VllmEngine
from serve_app.replica.engine_factory import make_engine
from tests.harness.eventually import eventually
from tests.router.vllm_events.pool_model import Routers
from tests.serve_app.engine.tiny import SCOPE, request, root_of, run_all

BLOCK = 32
BLOCKS = 96


@dataclass
class Both:
    vllm: VllmEngine
    torch: TorchEngine
    heard: Routers
    info: CheckpointInfo

    @property
    def block_size(self) -> int:
        return self.vllm.settings.block_size

    def prompt(self, length: int, seed: int = 0) -> Any:
        return np.random.default_rng(seed).integers(0, self.info.vocab_size, length, dtype=np.int32)


@contextmanager
def both_engines(
    demo_model_path: Path, *, device: str = "cpu", dtype: str = "float32", block_size: int = BLOCK, **changed: Any
) -> Iterator[Both]:
    """The demo model on either engine; vLLM's pool holds three thousand tokens. ``changed``: of vLLM's."""
    info, heard = load_checkpoint_info(demo_model_path), Routers()
    num_blocks, gpus = BLOCKS * BLOCK // block_size, int(device != "cpu")
    sizes = {"block_size": block_size, "num_blocks": num_blocks, "max_model_len": 2048}
    sizes |= {"dtype": dtype, "device": device, "replica_num_gpus": gpus}
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_waiting_requests": 32, "enforce_eager": True}
    loras = {"allow_runtime_lora": True, "max_cpu_loras": 4, "max_lora_rank": 8}
    moves = {"kv_pull": True, "pin_budget": 24, "num_threads": 1}
    torch = make_engine(AppConfig(engine="torch", **sizes), info, lambda _: None)
    config = AppConfig(engine="vllm", **(sizes | limits | loras | moves | changed))
    vllm = make_engine(config, info, heard)
    assert isinstance(torch, TorchEngine) and isinstance(vllm, VllmEngine)
    vllm.start()
    torch.start()
    yield Both(vllm, torch, heard, info)
    vllm.stop()
    torch.stop()


def check_reads(content: list[bytes], blocks: Sequence[int], names: Sequence[bytes], computed: int, read: int) -> None:
    """Compare a request's blocks with what they are for: it reads the first ``read``; a step ``computed`` the rest."""
    for at in range(computed):
        if at < read:
            assert content[blocks[at]] == names[at], "a request reads another's KV"
        else:
            content[blocks[at]] = names[at]


def tokens_of(engine: Any, name: str, ids: Any, **sampling: Any) -> list[int]:
    return run_all(engine, [request(name, ids, **sampling)]).tokens[name]


def outputs_of(engine: Any, asked: EngineRequest) -> list[EngineOutput]:
    """Return all outputs of a request."""
    outputs: list[EngineOutput] = []
    done = threading.Event()

    def sink(batch: Sequence[EngineOutput]) -> None:
        outputs.extend(batch)
        if batch[-1].finish_reason:
            done.set()

    engine.submit(asked, sink)
    assert done.wait(120)
    return outputs


def prefix_of(ids: Any, scope: PrefixScope = SCOPE, block_size: int = BLOCK) -> HashedTokens:
    return HashedTokens(scope, ids, extend_chain(root_of(scope), 0, ids, block_size), "t")


def compute(both: Both, ids: Any, scope: PrefixScope = SCOPE, max_tokens: int = 8) -> tuple[HashedTokens, list[int]]:
    """Compute a prompt, wait until its blocks are known, and return it with the answer."""
    prefix = prefix_of(ids, scope, both.block_size)
    tokens = tokens_of(both.vllm, "r", ids, max_tokens=max_tokens, scope=scope)
    blocks = (len(ids) - 1) // both.block_size
    eventually(lambda: both.vllm.cached_blocks(prefix.chain, blocks) == blocks)
    return prefix, tokens


def mispredicted(both: Both, requests: int) -> tuple[list[tuple[str, int, int]], int]:
    """Grow conversations of two tenants in a pool that evicts; return wrong predictions, and the number of hits."""
    random, size = np.random.default_rng(1), both.block_size
    scopes = [PrefixScope("tiny", salt=name) for name in (b"a", b"b")]
    talks = [[scope, both.prompt(40 + 60 * i, seed=i // 2)] for i, scope in enumerate(scopes * 3)]
    wrong, hits = [], 0
    for number in range(requests):
        talk = talks[random.integers(len(talks))]
        scope, ids = talk
        compute(both, both.prompt(size + 1, seed=5000 + number), max_tokens=1)  # its events come last
        predicted = size * both.vllm.cached_blocks(prefix_of(ids, scope, size).chain, (len(ids) - 1) // size)
        name = f"talk {number}"
        found = run_all(both.vllm, [request(name, ids, 6, scope=scope)])
        hits += found.cached[name] > 0
        if found.cached[name] != predicted:
            wrong.append((name, predicted, found.cached[name]))
        more = np.concatenate([ids, np.array(found.tokens[name], dtype=np.int32), both.prompt(50, seed=100 + number)])
        talk[1] = more if len(more) < 900 else both.prompt(40, seed=1000 + number)
    return wrong, hits


def reset(both: Both) -> None:
    """Reset once no block is in use; routers know of it before it returns."""
    eventually(both.vllm.reset_prefix_cache)
    assert not both.heard.held()
