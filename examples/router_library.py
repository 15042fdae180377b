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
from router.vllm_events.far_engine import FarEngine

BLOCK = 32  # vLLM's --block-size
SERVERS = {f"http://127.0.0.1:800{n}": [f"tcp://127.0.0.1:{port}{n}" for port in (555, 565)] for n in (1, 2)}
SECRET = os.environ["WARMPATH_SECRET"].encode()  # keeps other parties from computing the hashes of prompts

core = RoutingCore(router_id=uuid.uuid4().hex, settings=RouterSettings(block_size=BLOCK))
core.update_replicas(SERVERS)
engines = {url: FarEngine(BLOCK, 0, partial(core.apply, url)) for url in SERVERS}  # as `engine: remote` follows them
for url, addresses in SERVERS.items():
    engines[url].follow(*addresses)


def complete(model: str, tenant: str, prompt: str) -> tuple[str, dict]:
    """Return the server and its answer."""
    root = PrefixScope(model, salt=tenant.encode()).root(SECRET)
    any_server = next(iter(SERVERS))
    ids = httpx.post(f"{any_server}/tokenize", json={"model": model, "prompt": prompt}).json()["tokens"]
    chain = hash_blocks(root, np.array(ids, dtype=np.int32), BLOCK)
    decision = core.decide(RoutedRequest(uuid.uuid4().hex, chain, len(ids), placement_key=chain[:16] or root))
    body = {"model": model, "prompt": ids, "max_tokens": 8, "temperature": 0, "cache_salt": root.hex()}
    url = decision.replica_id
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        engines[url].judge(decision.selected_cached_tokens, cached)  # one that lies is routed to by load
        return url, answer
    finally:
        core.release(decision)  # until then its tokens count as queued at the server
