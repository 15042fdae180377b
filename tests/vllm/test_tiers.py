"""Disk and object store below vLLM's pool: what falls out of the pool comes back, changes no token, by scope."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from router.core import RoutingCore
from router.protocol.block_hash import PrefixScope, extend_chain, split_chain
from router.protocol.request import RoutedRequest
from router.settings import RouterSettings
from serve_app.cache.tiers.disk import DiskTier
from serve_app.engine.protocol import Save
from serve_app.engine.vllm import tier_loader, tier_writer
from tests.harness.eventually import eventually
from tests.serve_app.engine.adapters import described, save_adapter
from tests.serve_app.engine.tiny import SCOPE, Collector, request, root_of, run_all, sample
from tests.vllm.engines import BLOCK, BLOCKS, Both, both_engines, outputs_of

PROMPT = 700
USABLE = (PROMPT - 1) // BLOCK * BLOCK
TIERS = {"tier_load_ratio": 1e9, "kv_pull": False}
DISK = {**TIERS, "disk_cache_bytes": "1GiB"}


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """No limit of time ends a copy because the machine is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_loader, "UNKNOWN_DEADLINE_S", 600.0)
        for name in ("SAVE_S", "ROOM_S", "CLOSE_S"):
            patch.setattr(tier_writer, name, 600.0)
        yield


def settle(both: Both) -> None:
    """Wait until all that was computed is below the pool."""
    tiers = both.vllm._tiers
    eventually(lambda: tiers.writer.idle and not sample(both.vllm, "warmpath_kv_tier_pending_blocks"))


def ask(both: Both, name: str, ids: Any, **more: Any) -> tuple[list[int], int]:
    """Return a request's tokens, and how many of its prompt's were cached."""
    got = run_all(both.vllm, [request(name, ids, 6, **more)])
    eventually(lambda: both.vllm.cached_blocks(chain_of(ids, **more), 1) or len(ids) <= BLOCK)
    settle(both)
    return got.tokens[name], got.cached[name]


def chain_of(ids: Any, scope: PrefixScope = SCOPE, **_: Any) -> bytes:
    return extend_chain(root_of(scope), scope.public_blocks, ids, BLOCK)


def churn(both: Both) -> None:
    """Replace the pool's content."""
    for seed in range(5):
        ask(both, f"churn {seed}", both.prompt(PROMPT, 900 + seed))


def prompts_of(both: Both) -> list[Any]:
    """A working set of twice the pool."""
    return [both.prompt(PROMPT, seed) for seed in range(2 * BLOCKS * BLOCK // PROMPT)]


def test_a_working_set_of_twice_the_pool_comes_back_from_disk_also_after_a_restart(
    demo_model_path: Path, tmp_path: Path
) -> None:
    """Routers predict it exactly; a saved prompt is still one after the restart."""
    core = RoutingCore("tiers", RouterSettings(block_size=BLOCK))
    core.update_replicas(["r"])
    with both_engines(demo_model_path, disk_cache_dir=str(tmp_path), **DISK) as both:
        prompts = prompts_of(both)
        first = [ask(both, f"first {seed}", ids) for seed, ids in enumerate(prompts)]
        assert not any(cached for _, cached in first)
        again = [ask(both, f"again {seed}", ids) for seed, ids in enumerate(prompts)]
        assert again == [(tokens, USABLE) for tokens, _ in first]
        assert sample(both.vllm, "warmpath_kv_tier_hits_total", tier="disk") > BLOCKS
        assert sample(both.vllm, "warmpath_kv_tier_load_seconds_count", tier="disk") > 0
        assert both.vllm.load().tier_tokens_per_s > 0
        saved = structs.replace(request("save", both.prompt(330, 99)), saves=(Save(b"s" * 16, 320),))
        assert outputs_of(both.vllm, saved)[0].first is not None
        settle(both)
        eventually(lambda: len([*tmp_path.glob("slot-0/*.saved")]) == 10)
        both.vllm.tell_cache(anew=True)
        blocks = {block for ids in prompts for block in split_chain(chain_of(ids))}
        assert blocks <= set(split_chain(both.heard.mirror.tiers()["disk"]))
    with both_engines(demo_model_path, disk_cache_dir=str(tmp_path), **DISK) as both:
        both.vllm._tiers._sink = lambda events: core.apply("r", events)
        both.vllm.tell_cache(anew=True)
        for seed, ids in enumerate(prompts):
            predicted = core.holders(RoutedRequest("q", chain_of(ids), len(ids))).get("r", 0)
            assert ask(both, f"later {seed}", ids) == (first[seed][0], predicted)
            assert predicted == USABLE
        assert len([*tmp_path.glob("slot-0/*.saved")]) == 10
        eventually(both.vllm.reset_prefix_cache)
        eventually(lambda: not [*tmp_path.glob("slot-0/*.*v*")])
        assert ask(both, "reset", prompts[0]) == (first[0][0], 0)


def test_another_node_reads_the_object_store(demo_model_path: Path, tmp_path: Path) -> None:
    """Also of what the first one computed last, and of nothing with another secret."""
    store = {**TIERS, "object_cache_url": f"file://{tmp_path}"}
    with both_engines(demo_model_path, **store) as both:
        prompts = prompts_of(both)
        first = [ask(both, f"first {seed}", ids) for seed, ids in enumerate(prompts)]
    with both_engines(demo_model_path, **store) as both:
        for seed, ids in enumerate(prompts):
            assert ask(both, f"later {seed}", ids) == (first[seed][0], USABLE)
        assert sample(both.vllm, "warmpath_kv_tier_hits_total", tier="object") == len(prompts) * USABLE // BLOCK
        asked = structs.replace(request("other", prompts[0]), root=SCOPE.root(b"another secret"))
        assert run_all(both.vllm, [asked]).cached["other"] == 0


@pytest.fixture(scope="module")
def both(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    directory = tmp_path_factory.mktemp("disk")
    with both_engines(demo_model_path, disk_cache_dir=str(directory), **DISK) as both:
        yield both


def file_of(both: Both, block: bytes) -> Path:
    directory = both.vllm.settings.tiers.disk_cache_dir
    assert directory is not None
    return directory / "slot-0" / f"{block.hex()}.kv"


@pytest.mark.parametrize("how", ["altered", "gone"])
def test_a_harmed_file_costs_time_alone(how: str, both: Both) -> None:
    """Blocks before it are used, the rest is computed and written again."""
    ids = both.prompt(PROMPT, 50 + len(how))
    tokens, _ = ask(both, "computed", ids)
    churn(both)
    victim = file_of(both, list(split_chain(chain_of(ids)))[7])
    content = bytearray(victim.read_bytes())
    content[-3] ^= 4
    victim.write_bytes(content) if how == "altered" else victim.unlink()
    assert ask(both, "harmed", ids) == (tokens, 7 * BLOCK)
    churn(both)
    assert ask(both, "mended", ids) == (tokens, USABLE)


def test_others_run_while_a_request_waits_for_its_blocks(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests wait for one load; one of them leaves, which costs the other nothing."""
    ids = both.prompt(PROMPT, 60)
    tokens, _ = ask(both, "computed", ids)
    churn(both)
    gate, entered, own = threading.Event(), threading.Event(), DiskTier.read

    def read(*arguments: Any) -> Any:
        entered.set()
        assert gate.wait(120)
        return own(*arguments)

    monkeypatch.setattr(DiskTier, "read", read)
    hits, got = sample(both.vllm, "warmpath_kv_tier_hits_total"), Collector()
    for name in ("one", "left"):
        both.vllm.submit(request(name, ids, 6), got)
    assert entered.wait(120)
    assert run_all(both.vllm, [request("other", both.prompt(20, 61), 4)]).tokens["other"]
    both.vllm.cancel("left")
    got.wait(["left"])
    assert "one" not in got.finish
    gate.set()
    got.wait(["one"])
    assert (got.tokens["one"], got.cached["one"]) == (tokens, USABLE)
    assert sample(both.vllm, "warmpath_kv_tier_hits_total") == hits + USABLE // BLOCK


def test_what_does_not_arrive_in_time_is_computed(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = both.prompt(PROMPT, 70)
    tokens, _ = ask(both, "computed", ids)
    churn(both)
    gate, own = threading.Event(), DiskTier.read
    monkeypatch.setattr("serve_app.engine.vllm.tier_loader.LEAST_DEADLINE_S", 0.05)
    monkeypatch.setattr(both.vllm._tiers.loader, "ratio", 1e-9)

    def read(*arguments: Any) -> Any:
        assert gate.wait(120)
        return own(*arguments)

    monkeypatch.setattr(DiskTier, "read", read)
    got = run_all(both.vllm, [request("late", ids, 6)])
    gate.set()
    assert (got.tokens["late"], got.cached["late"]) == (tokens, 0)


def test_tenants_adapters_and_public_prompts_come_back_to_their_scopes(
    both: Both, demo_model_path: Path, tmp_path: Path
) -> None:
    """Equal tokens under six scopes, of which two share a public beginning; some requests store nothing."""
    spec, _ = described(save_adapter(demo_model_path, tmp_path / "x", 3, ("q_proj", "v_proj")), "x")
    both.vllm.adapters.load(spec)
    ids = both.prompt(PROMPT, 80)
    scopes = [PrefixScope("tiny", lora, salt) for lora in ("", spec.key) for salt in (b"a", b"b")]
    public = [PrefixScope("tiny", salt=salt, public_blocks=6) for salt in (b"a", b"b")]
    tokens = {}
    for number, scope in enumerate([*scopes, *public]):
        tokens[scope], cached = ask(both, f"first {number}", ids, scope=scope, tenant=scope.salt.decode())
        assert cached == (6 * BLOCK if scope == public[1] else 0)
    none = structs.replace(request("none", both.prompt(PROMPT, 81)), store_kv=False)
    run_all(both.vllm, [none])
    churn(both)
    for number, scope in enumerate([*public, *scopes]):
        found = ask(both, f"again {number}", ids, scope=scope, tenant=scope.salt.decode())
        assert found == (tokens[scope], USABLE)
    assert run_all(both.vllm, [structs.replace(none, request_id="still none")]).cached["still none"] == 0
    churn(both)
    other = PrefixScope("tiny", salt=b"c", public_blocks=6)
    assert ask(both, "other", ids, scope=other, tenant="c")[1] == 6 * BLOCK
    assert ask(both, "stranger", ids, scope=PrefixScope("tiny", salt=b"c"), tenant="c")[1] == 0


def test_long_random_sequences_of_tenants_answer_as_the_built_in_engine(both: Both) -> None:
    """Conversations of three tenants in a pool that evicts and a disk: cached and uncached tokens are equal."""
    random = np.random.default_rng(5)
    base = [both.prompt(200 + 40 * at, 90 + at // 2) for at in range(6)]
    talks = [(PrefixScope("tiny", salt=bytes([at % 3])), ids) for at, ids in enumerate(base)]
    for number in range(40):
        at = int(random.integers(len(talks)))
        scope, ids = talks[at]
        asked = request(f"turn {number}", ids, 4, scope=scope, tenant=str(at % 3))
        got = run_all(both.vllm, [asked])
        alone = run_all(both.torch, [structs.replace(asked, store_kv=False, scope=PrefixScope("alone"))])
        assert got.tokens == alone.tokens
        answer = np.array(got.tokens[asked.request_id], dtype=np.int32)
        more = np.concatenate([ids, answer, both.prompt(90, 200 + number)])
        talks[at] = (scope, more if len(more) < 1200 else base[at])
