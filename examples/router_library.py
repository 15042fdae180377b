"""Sends completions to that one of two `vllm serve` which holds the prompt's KV. docs: ray-serve-llm."""

import os
import uuid
from functools import partial

import httpx
import numpy as np

from router.core import RoutingCore
from router.protocol.block_hash import PrefixScope, hash_blocks
from router.protocol.request import RoutedRequest
from router.settings import RouterSettings
from router.vllm_events.pool import VllmPool
from router.vllm_events.subscriber import EventSubscriber

BLOCK = 32  # vLLM's --block-size
SERVERS = {f"http://127.0.0.1:800{n}": [f"tcp://127.0.0.1:{port}{n}" for port in (555, 565)] for n in (1, 2)}
SECRET = os.environ["WARMPATH_SECRET"].encode()  # keeps other parties from computing the hashes of prompts

core = RoutingCore(router_id=uuid.uuid4().hex, settings=RouterSettings(block_size=BLOCK))
core.update_replicas(SERVERS)
for url, (events, replay) in SERVERS.items():
    EventSubscriber(events, replay, VllmPool(BLOCK, max_blocks=1_000_000), partial(core.apply, url)).start()


def complete(model: str, tenant: str, prompt: str) -> tuple[str, dict]:
    """Return the server and its answer."""
    root = PrefixScope(model, salt=tenant.encode()).root(SECRET)
    any_server = next(iter(SERVERS))
    ids = httpx.post(f"{any_server}/tokenize", json={"model": model, "prompt": prompt}).json()["tokens"]
    chain = hash_blocks(root, np.array(ids, dtype=np.int32), BLOCK)
    decision = core.decide(RoutedRequest(uuid.uuid4().hex, chain, len(ids), placement_key=chain[:16] or root))
    body = {"model": model, "prompt": ids, "max_tokens": 8, "temperature": 0, "cache_salt": root.hex()}
    try:
        return decision.replica_id, httpx.post(f"{decision.replica_id}/v1/completions", json=body, timeout=60).json()
    finally:
        core.release(decision)  # until then its tokens count as queued at the server
