"""The example of docs: ray-serve-llm: two real `vllm serve`, and the router without Ray between them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from tests.integration.conftest import eventually

EXAMPLES = Path(__file__).parents[2] / "examples"
START_S = 400


@pytest.fixture(scope="module")
def library(demo_model_path: Path) -> Iterator[ModuleType]:
    """The example as a module, with its servers running."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("WARMPATH_SECRET", "a secret of this test")
        patch.syspath_prepend(str(EXAMPLES))
        import router_library  # type: ignore[import-not-found]

        for url, (publish, replay) in router_library.SERVERS.items():
            stack.enter_context(vllm_serve(demo_model_path, url, publish, replay, router_library.BLOCK))
        for url in router_library.SERVERS:
            eventually(partial(started, url), START_S)
        yield router_library


@contextmanager
def vllm_serve(model: Path, url: str, publish: str, replay: str, block_size: int, more: str = "") -> Iterator[None]:
    """Run a server of the demo model until the block ends."""
    listens = publish.replace("127.0.0.1", "*")  # vLLM binds no other address
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": listens, "replay_endpoint": replay}
    flags = f"--host 127.0.0.1 --port {url[-4:]} --block-size {block_size} --enable-prompt-tokens-details"
    sizes = "--max-model-len 2048 --dtype float32 --enforce-eager --served-model-name demo"
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command = [*program, *flags.split(), *sizes.split(), *more.split(), "--kv-events-config", json.dumps(events)]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    # vLLM's command needs a distribution named vllm, but its CPU build has another name.
    process = subprocess.Popen(command, env=os.environ | own, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def started(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def cached(answer: dict) -> int:
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def test_a_prompt_returns_to_the_server_that_holds_it_and_tenants_share_nothing(library: ModuleType) -> None:
    prompts = {tenant: f"{tenant} asks. " + "Once upon a time there was a router. " * 20 for tenant in "abcd"}
    places, texts, firsts = {}, {}, []
    for tenant, prompt in prompts.items():
        places[tenant], first = library.complete("demo", tenant, prompt)
        assert cached(first) == 0
        texts[tenant] = first["choices"][0]["text"]
        firsts.append(first)
    assert set(places.values()) == set(library.SERVERS), "load is spread"
    blocks = sum(answer["usage"]["prompt_tokens"] // library.BLOCK for answer in firsts)
    eventually(lambda: library.core.directory.num_blocks >= blocks)
    for tenant, prompt in prompts.items():
        place, again = library.complete("demo", tenant, prompt)
        assert place == places[tenant]
        prompt_tokens = again["usage"]["prompt_tokens"]
        assert cached(again) == (prompt_tokens - 1) // library.BLOCK * library.BLOCK
        assert again["choices"][0]["text"] == texts[tenant]
        _, strangers = library.complete("demo", f"{tenant}, another", prompt)
        assert cached(strangers) == 0
