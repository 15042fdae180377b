"""KV moved when a replica joins or leaves gives the tokens of computed KV; real engines compute meanwhile."""

import asyncio

from msgspec import structs

from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Save
from serve_app.replica.lifecycle.handover import HandOver
from serve_app.replica.lifecycle.prewarm import Prewarm
from serve_app.replica.lifecycle.receipt import Receipt
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.tiny import Collector, prompt, request, run_all
from tests.serve_app.replica.lifecycle.peers import Local
from tests.serve_app.replica.lifecycle.test_prewarm import no_adapter


def test_moved_kv_is_computed_kv(make_engine: MakeEngine, reference: Reference) -> None:
    """KV is handed over while a stream runs, then copied by a joining replica; the save survives both."""
    first, second, third = (make_engine(pin_budget_blocks=64) for _ in range(3))
    ids, saved = prompt(200), prompt(100, 3)
    run_all(first, [request("a", ids, 1), structs.replace(request("b", saved, 1), saves=(Save(b"key", 96),))])
    stream = Collector()
    first.submit(request("stream", prompt(40, 4), 300), stream)
    stream.wait_tokens("stream", 3)
    receipt = Receipt()

    peers = Local({"peer": second})
    asyncio.run(HandOver(first, peers, 16, lambda: True, receipt).run(["peer"], 60.0))
    assert receipt.saves == 1
    assert receipt.bytes == receipt.blocks.total() * first.kv_block_bytes
    prewarm = Prewarm(third, peers, no_adapter, AppConfig(prewarm_timeout_s=60.0))
    assert asyncio.run(prewarm.run(["peer"])).blocks["save"] == 6
    for name, engine in (("second", second), ("third", third)):
        got = run_all(engine, [request(name, ids, 8), request(f"{name} saved", saved, 8)])
        assert got.cached == {name: 192, f"{name} saved": 96}
        assert got.tokens[name] == reference("qwen3", ids, 8)
        assert got.tokens[f"{name} saved"] == reference("qwen3", saved, 8)
    again = run_all(second, [structs.replace(request("again", saved, 1), saves=(Save(b"key", 96),))])
    assert again.cached["again"] == 96
    stream.wait(["stream"])
    assert stream.tokens["stream"] == reference("qwen3", prompt(40, 4), 300)
