"""Rules of a deployment's adapters: who sees which, copies that agree, and changes by operators alone."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError

from router.protocol.block_hash import HASH_BYTES, PrefixScope
from router.protocol.events import BlocksStored
from serve_app.api.request import CompletionRequest
from serve_app.checkpoints.adapter_registry import AdapterEntry, AdapterRegistry, configured_adapters
from serve_app.checkpoints.checkpoint import CheckpointInfo, load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import AdapterError, AdapterSpec, EngineRequest, UnknownAdapter
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from serve_app.errors import InvalidRequest, ModelNotFound, NotFound, Overloaded, PermissionDenied
from serve_app.generation.dispatch import route_of
from serve_app.generation.prepare import Limits, Preparer
from serve_app.ingress.adapter_admin import AdapterAdmin
from serve_app.ingress.broadcast import Broadcast
from serve_app.replica.adapter_loader import ReplicaAdapters
from serve_app.tenants.tenants import Tenant, Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.engine.adapters import save_plain
from tests.serve_app.engine.tiny import Collector, prompt


def spec(name: str, digest: str = "0") -> AdapterSpec:
    return AdapterSpec(name, digest, f"/somewhere/{name}")


def registry(*entries: AdapterEntry) -> AdapterRegistry:
    made = AdapterRegistry("base", now_ns=itertools.count(1).__next__)
    made.merge(entries)
    return made


def test_model_or_lora_name_chooses_the_adapter() -> None:
    """Either names it; the base stays the base; two different names are a contradiction."""
    held = registry(AdapterEntry("a", spec("a")), AdapterEntry("b", spec("b")))
    assert held.choose("base", None, "t") is None
    assert held.choose("a", None, "t") == held.choose("base", "a", "t") == held.choose("a", "a", "t") == spec("a")
    with pytest.raises(InvalidRequest, match="name one"):
        held.choose("a", "b", "t")


def test_an_unknown_adapter_is_refused_and_only_what_the_caller_may_use_is_named() -> None:
    """404 for a model, 400 for a lora_name; a private adapter is as unknown to others as one that does not exist."""
    held = registry(AdapterEntry("open", spec("open")), AdapterEntry("secret", spec("secret"), ("acme",)))
    assert held.choose("secret", None, "acme") == spec("secret")
    for model, lora_name, kind in (("secret", None, ModelNotFound), ("base", "secret", InvalidRequest)):
        with pytest.raises(kind) as private:
            held.choose(model, lora_name, "globex")
        with pytest.raises(kind) as missing:
            held.choose(model.replace("secret", "nothing"), lora_name and "nothing", "globex")
        assert private.value.message.replace("secret", "nothing") == missing.value.message
        assert "'open'" in private.value.message
    assert [one.name for one in held.visible("globex")] == ["open"]
    assert [one.name for one in held.visible(None)] == ["open", "secret"]
    with pytest.raises(InvalidRequest, match="none is loaded"):
        registry().choose("base", "x", "t")


entries = st.builds(
    AdapterEntry,
    st.sampled_from("ab"),
    st.one_of(st.none(), st.builds(spec, st.just("a"), st.sampled_from("01"))),
    tenants=st.sampled_from([(), ("acme",)]),
    stamp=st.integers(1, 5),
)


@given(news=st.lists(entries), order=st.randoms())
def test_copies_agree_whatever_the_order_of_the_news(news: list[AdapterEntry], order: Any) -> None:
    """Merging is commutative and idempotent: late, repeated and reordered news change nothing.

    Nor do two entries of one name that were made at the same time by two ingresses.
    """
    shuffled = news * 2
    order.shuffle(shuffled)
    first, second = registry(*news), registry(*shuffled)
    assert set(first.entries()) == set(second.entries())
    for entry in news:
        assert first.next_entry(entry.name, None).stamp > entry.stamp


def test_settings_that_changed_do_not_change_each_other() -> None:
    """A new ingress keeps what its own settings say, whatever older replicas tell; what was loaded since beats both."""
    held = registry(AdapterEntry("a", spec("a", "5")))
    for digest in "19":
        held.merge([AdapterEntry("a", spec("a", digest))])
        assert held.choose("a", None, "t") == spec("a", "5")
    held.merge([AdapterEntry("a", None, stamp=1)])
    assert held.get("a") is None


def test_an_ingress_that_has_just_started_serves_no_adapter_before_it_knows_what_others_know() -> None:
    """One of the settings may have been unloaded, or another kept for some: 503 until then. The base is served."""
    old = registry(AdapterEntry("a", spec("a")))
    old.merge([old.next_entry("a", None)])
    config = AppConfig.model_validate({"model": "demo", "allow_runtime_lora": True})
    new = AdapterRegistry("base", current=False)
    new.merge([AdapterEntry("a", spec("a"))])
    admin = AdapterAdmin(config, new, _nobody, _nobody)
    for model, lora_name in (("a", None), ("base", "a"), ("gone", None)):
        with pytest.raises(Overloaded) as refused:
            new.choose(model, lora_name, "t")
        assert refused.value.retry_after_s
    with pytest.raises(Overloaded):
        asyncio.run(admin.load(b'{"lora_name": "b", "lora_path": "/b"}'))
    assert new.choose("base", None, "t") is None

    class Others(Broadcast):
        """The first call finds no replica that answers, the second one an ingress that does not."""

        calls = 0

        def __init__(self) -> None:
            self._replica = SimpleNamespace(describe=SimpleNamespace(remote=self.describe))

        async def describe(self) -> None:
            pass

        async def replicas(self, method: str, *arguments: Any, timeout_s: float = 0) -> list[Any]:
            self.calls += 1
            if self.calls == 1:
                raise ActorUnavailableError("not yet", None)
            return [()]

        async def ingresses(self, method: str, *arguments: Any, timeout_s: float = 0) -> list[Any]:
            assert not new.current
            if self.calls == 2:
                raise TimeoutError
            return [new.entries(), old.entries()]

    asyncio.run(Others().connect(new))
    assert new.current
    with pytest.raises(ModelNotFound):
        new.choose("a", None, "t")


async def _nobody(method: str, argument: Any) -> list[Any]:
    return []


class Deployment:
    """Two simulated replicas and another ingress' registry, told without Ray."""

    def __init__(self, **settings: Any) -> None:
        self.config = AppConfig.model_validate({"model": "demo", "allow_runtime_lora": True, **settings})
        self.engines = [_engine() for _ in range(2)]
        self.replicas = [ReplicaAdapters(self.config, engine) for engine in self.engines]
        self.registry = AdapterRegistry("demo")
        self.other_ingress = AdapterRegistry("demo")
        self.admin = AdapterAdmin(self.config, self.registry, self._replicas, self._ingresses)

    async def _replicas(self, method: str, argument: Any) -> list[Any]:
        answers = []
        for replica in self.replicas:
            match method:
                case "load_adapter":
                    answers.append(await replica.load(argument))
                case "drop_adapter":
                    answers.append(replica.drop(argument))
                case _:
                    replica.registry.merge(argument)
        return answers

    async def _ingresses(self, method: str, argument: Any) -> list[Any]:
        assert method == "merge_adapters"
        self.other_ingress.merge(argument)
        return []

    def load(self, name: str, path: Path | str, **more: Any) -> str:
        return asyncio.run(self.admin.load(json.dumps({"lora_name": name, "lora_path": str(path), **more}).encode()))

    def unload(self, name: str) -> str:
        return asyncio.run(self.admin.unload(json.dumps({"lora_name": name}).encode()))


def _engine(**settings: Any) -> TorchEngine:
    cost = CostModel(prefill_tokens_per_s=1e9, decode_base_s=0.0)
    return TorchEngine(SimulatedRunner(cost, **settings), EngineSettings(num_blocks=64), lambda _: None)


def test_a_loaded_adapter_is_on_every_replica_and_every_ingress(tmp_path: Path) -> None:
    """And gone from all of them once unloaded."""
    app = Deployment()
    assert app.load("style", save_plain(tmp_path / "a")) == "Success: LoRA adapter 'style' added successfully."
    chosen = app.registry.choose("style", None, "t")
    assert chosen is not None
    assert app.other_ingress.choose("demo", "style", "t") == chosen
    assert all(engine.adapters() == (chosen.key,) for engine in app.engines)
    assert all(replica.registry.choose("style", None, "t") == chosen for replica in app.replicas)
    with pytest.raises(InvalidRequest, match="already been loaded"):
        app.load("style", tmp_path / "a")
    assert app.unload("style") == "Success: LoRA adapter 'style' removed successfully."
    assert all(engine.adapters() == () for engine in app.engines)
    for copy in (app.registry, app.other_ingress, app.replicas[0].registry):
        with pytest.raises(ModelNotFound):
            copy.choose("style", None, "t")
    with pytest.raises(NotFound, match="cannot be found"):
        app.unload("style")


def test_a_reload_in_place_changes_the_key_everywhere(tmp_path: Path) -> None:
    """The old weights leave the replicas; the new key differs in its digest alone."""
    app = Deployment()
    app.load("style", save_plain(tmp_path / "old", 1.0))
    old = app.registry.choose("style", None, "t")
    app.load("style", save_plain(tmp_path / "new", 2.0), load_inplace=True)
    new = app.other_ingress.choose("style", None, "t")
    assert old is not None
    assert new is not None
    assert (old.name, old.digest) != (new.name, new.digest)
    assert all(engine.adapters() == (new.key,) for engine in app.engines)


def test_a_reload_in_place_is_for_whom_its_predecessor_was(tmp_path: Path) -> None:
    """Leaving ``tenants`` out keeps them; only an explicit null opens a tenant's adapter to all."""
    tenants = [{"name": name, "key_sha256": [sha256(name.encode()).hexdigest()]} for name in ("acme", "globex")]
    app = Deployment(tenants=tenants, operator_key_sha256=[sha256(b"operator").hexdigest()])

    def reload(weight: float, **more: Any) -> tuple[str, ...]:
        app.load("style", save_plain(tmp_path / str(weight), weight), load_inplace=True, **more)
        entry, other = app.registry.get("style"), app.other_ingress.get("style")
        assert entry is not None
        assert entry == other
        return entry.tenants

    assert reload(1.0, tenants=["acme"]) == ("acme",)
    assert reload(2.0) == ("acme",)
    with pytest.raises(ModelNotFound):
        app.registry.choose("style", None, "globex")
    assert reload(3.0, tenants=["globex"]) == ("globex",)
    assert reload(4.0, tenants=None) == ()
    assert reload(5.0) == ()
    app.unload("style")
    assert reload(6.0) == (), "a new adapter is for all"


def test_two_ingresses_that_load_one_name_at_once_end_with_one_entry(tmp_path: Path) -> None:
    """Whoever comes second is told to look at what there is now, and leaves nothing in the replicas' memory."""
    app = Deployment()
    slow = AdapterAdmin(app.config, app.other_ingress, app._replicas, app._ingresses)
    body = {"lora_name": "style", "lora_path": str(save_plain(tmp_path / "slow", 2.0))}

    async def replicas(method: str, argument: Any) -> list[Any]:
        answers = await app._replicas(method, argument)
        if method == "load_adapter":
            await app.admin.load(json.dumps({**body, "lora_path": str(fast)}).encode())
        return answers

    fast = save_plain(tmp_path / "fast", 1.0)
    slow._tell_replicas = replicas
    with pytest.raises(InvalidRequest, match="meanwhile"):
        asyncio.run(slow.load(json.dumps(body).encode()))
    kept = app.registry.get("style")
    assert kept is not None
    assert kept.spec is not None
    assert Path(kept.spec.path) == fast
    for copy in (app.registry, app.other_ingress, *(replica.registry for replica in app.replicas)):
        assert copy.entries() == (kept,)
    assert all(engine.adapters() == (kept.spec.key,) for engine in app.engines)


def test_an_adapter_that_one_replica_cannot_serve_is_offered_nowhere(tmp_path: Path) -> None:
    """The reason reaches the operator; the replicas that could have served it do not keep it."""
    app = Deployment()

    def fail(_: AdapterSpec) -> None:
        raise AdapterError("model.x has rank 9, over max_lora_rank 8")

    app.engines[1].load_adapter = fail  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest, match="over max_lora_rank 8"):
        app.load("style", save_plain(tmp_path / "a"))
    assert [engine.adapters() for engine in app.engines] == [(), ()]
    assert app.registry.entries() == ()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"lora_name": "a"}, "Both 'lora_name' and 'lora_path'"),
        ({"lora_path": "a"}, "Both 'lora_name' and 'lora_path'"),
        ({"lora_name": 3, "lora_path": "a"}, "lora_name must be"),
        ({"lora_name": "demo", "lora_path": "a"}, "base model's name"),
        ({"lora_name": "a@1", "lora_path": "a"}, "no adapter name"),
        ({"lora_name": "a", "lora_path": "/nowhere"}, "no adapter_model.safetensors"),
        ({"lora_name": "a", "lora_path": "x\0y"}, "no path|no adapter_model"),
        ({"lora_name": "a", "lora_path": "x", "tenants": ["nobody"]}, "no tenant 'nobody'"),
        ({"lora_name": "a", "lora_path": "x", "tenants": []}, "at least one"),
    ],
)
def test_a_wrong_body_is_a_400(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        asyncio.run(Deployment().admin.load(json.dumps(body).encode()))


@pytest.mark.parametrize("path", ["x" * 256, "x" * 256 + "/a", "x" * 256 + ".safetensors", "x/" * 2048])
def test_a_path_that_no_system_call_takes_is_a_400(path: str, tmp_path: Path) -> None:
    for settings in ({}, {"lora_root": str(tmp_path)}):
        with pytest.raises(InvalidRequest, match="The adapter cannot be loaded"):
            Deployment(**settings).load("a", path)


def test_adapters_change_only_where_the_settings_allow_it_and_only_inside_the_root(tmp_path: Path) -> None:
    """Off by default; with ``lora_root`` no path leads out of it, neither by dots nor by a link."""
    inside, outside = save_plain(tmp_path / "root" / "a"), save_plain(tmp_path / "b")
    with pytest.raises(PermissionDenied, match="allow_runtime_lora"):
        Deployment(allow_runtime_lora=False).load("a", inside)
    app = Deployment(lora_root=str(tmp_path / "root"))
    (tmp_path / "root" / "link").symlink_to(outside)
    for path in (outside, "../b", "link", "/etc/passwd"):
        with pytest.raises(PermissionDenied, match="outside lora_root"):
            app.load("b", path)
    assert "added" in app.load("a", "a")
    assert "added" in app.load("same", inside)


@pytest.mark.parametrize(
    ("path", "linked"),
    [
        ("a", "adapter_config.json"),
        ("a", "adapter_model.safetensors"),
        ("a/adapter_model.safetensors", "adapter_config.json"),
    ],
)
def test_links_in_an_adapters_directory_lead_nowhere_else(path: str, linked: str, tmp_path: Path) -> None:
    """A file outside ``lora_root`` is not read, whatever it is; links inside, as Hugging Face's cache has, are."""
    app = Deployment(lora_root=str(tmp_path / "root"))
    file = save_plain(tmp_path / "root" / "a") / linked
    secret = tmp_path / "secret.json"
    secret.write_text('{"peft_type": "TOPSECRET"}')
    (tmp_path / "fine").write_bytes(file.read_bytes())
    for target in (secret, tmp_path / "fine", tmp_path / "missing"):
        file.unlink()
        file.symlink_to(target)
        with pytest.raises(InvalidRequest, match=f"{linked} is a link that leads out of lora_root") as refused:
            app.load("a", path)
        assert "TOPSECRET" not in refused.value.message
    blob = (tmp_path / "fine").rename(tmp_path / "root" / "blob")
    file.unlink()
    file.symlink_to(blob)
    assert "added" in app.load("a", path)


def test_settings_that_name_no_adapter_are_refused_at_start(tmp_path: Path) -> None:
    """With the name of the one that is wrong; the model's own name cannot be an adapter's."""
    with pytest.raises(AdapterError, match="'gone' of the settings"):
        configured_adapters({"fine": save_plain(tmp_path / "a"), "gone": tmp_path / "none"})
    with pytest.raises(ValueError, match="as the model is"):
        AppConfig(model="demo", lora_adapters={"demo": tmp_path})
    with pytest.raises(ValueError, match="max_cpu_loras"):
        AppConfig(model="demo", max_loras=8, max_cpu_loras=7)


def _request(request_id: str, adapter: AdapterSpec) -> EngineRequest:
    from tests.serve_app.engine.tiny import request

    return request(request_id, prompt(40), 1, scope=PrefixScope("m", adapter.key))


def test_a_replica_that_was_never_told_loads_on_demand_once(tmp_path: Path) -> None:
    """Twenty first requests at once cost one load; a request without a path, or for changed files, is refused."""
    (entry,) = configured_adapters({"a": save_plain(tmp_path / "a")})
    assert entry.spec is not None
    wanted = entry.spec
    engine = _engine()
    engine.start()
    replica = ReplicaAdapters(AppConfig(), engine)
    collector = Collector()

    async def flood() -> None:
        await asyncio.gather(*(replica.submit(_request(f"r{i}", wanted), wanted.path, collector) for i in range(20)))

    asyncio.run(flood())
    collector.wait(f"r{i}" for i in range(20))
    assert [value for name, _, value in engine.stats().samples if name == "warmpath_lora_loads_total"] == [1]
    assert engine.unload_adapter(wanted.key)
    with pytest.raises(UnknownAdapter):
        asyncio.run(replica.submit(_request("x", wanted), "", collector))
    save_plain(tmp_path / "a", 7.0)
    with pytest.raises(AdapterError, match="changed"):
        asyncio.run(replica.submit(_request("x", wanted), wanted.path, collector))
    engine.stop()


def test_an_adapter_evicted_while_its_request_was_on_its_way_is_loaded_again(tmp_path: Path) -> None:
    """Room for one in memory, two in turns: every request finds its adapter."""
    both = [entry.spec for entry in configured_adapters({n: save_plain(tmp_path / n) for n in "ab"})]
    engine = _engine(max_loras=1, max_cpu_loras=1)
    engine.start()
    replica = ReplicaAdapters(AppConfig(), engine)
    collector = Collector()
    for i in range(6):
        adapter = both[i % 2]
        assert adapter is not None
        asyncio.run(replica.submit(_request(f"r{i}", adapter), adapter.path, collector))
        collector.wait([f"r{i}"])
    assert set(collector.finish.values()) == {"length"}
    engine.stop()


def test_only_loads_are_timed_and_smoothed(tmp_path: Path) -> None:
    """An adapter that is in memory already takes no time and says nothing of what loading takes."""
    both = [entry.spec for entry in configured_adapters({n: save_plain(tmp_path / n) for n in "ab"})]
    readings = iter([10.0, 12.0, 20.0, 30.0, 31.0])
    replica = ReplicaAdapters(AppConfig(), _engine(), clock=lambda: next(readings))
    took = [replica.load_s]
    for adapter in (both[0], both[0], both[1]):
        assert asyncio.run(replica.load(AdapterEntry("x", adapter))) == ""
        took.append(replica.load_s)
    assert took == [0.0, 2.0, 2.0, pytest.approx(1.7)]


@pytest.fixture(scope="module")
def front(demo_model_path: Path) -> tuple[CheckpointInfo, PromptTokenizer]:
    return load_checkpoint_info(demo_model_path), PromptTokenizer(demo_model_path, cache_bytes=1 << 20, block_size=16)


@pytest.fixture
def prepared(front: tuple[CheckpointInfo, PromptTokenizer]) -> Callable[..., Any]:
    secret = b"0" * 32

    def prepare(held: AdapterRegistry, model: str = "base", tenant: str = "t") -> Any:
        preparer = Preparer(
            front[0], front[1], Tenants([], secret), secret, held, Limits(2048, 4),
        )  # fmt: skip
        wanted = CompletionRequest(model=model, prompts=("The same words. " * 30,), max_tokens=1)
        return asyncio.run(preparer.prepare(wanted, Tenant(tenant), "id"))[0]

    return prepare


def test_the_routers_chain_is_the_replicas_and_differs_by_adapter_and_by_digest(prepared: Callable[..., Any]) -> None:
    """What the ingress hashes for an adapter is what the engine stores; base, adapter and reload share no block."""
    old, new = spec("a", "0" * 64), spec("a", "1" * 64)
    base = prepared(registry(AdapterEntry("a", old)))
    first = prepared(registry(AdapterEntry("a", old)), "a")
    second = prepared(registry(AdapterEntry("a", new)), "a")
    chains = [set(_blocks(one.block_hashes)) for one in (base, first, second)]
    assert all(chains)
    assert not (chains[0] & chains[1] or chains[1] & chains[2] or chains[0] & chains[2])
    assert len({one.placement_key for one in (base, first, second)}) == 3
    assert (first.scope.lora, first.lora_path, base.lora_path) == (old.key, old.path, "")
    assert (route_of(first).adapter, route_of(base).adapter) == (old.key, "")
    stored: list[Any] = []
    runner = SimulatedRunner(CostModel(prefill_tokens_per_s=1e9, decode_base_s=0.0))
    runner.adapters._load = lambda _: None  # type: ignore[assignment,return-value]
    engine = TorchEngine(runner, EngineSettings(num_blocks=64), stored.extend)
    engine.start()
    engine.load_adapter(old)
    collector = Collector()
    # Without the router's hashes the engine computes its own.
    engine.submit(EngineRequest("x", first.token_ids, first.scope, first.root, first.sampling), collector)
    collector.wait(["x"])
    engine.stop()
    hashes = b"".join(event.hashes for event in stored if isinstance(event, BlocksStored))
    assert set(_blocks(hashes)) == chains[1]


def _blocks(chain: bytes) -> list[bytes]:
    return [chain[i : i + HASH_BYTES] for i in range(0, len(chain), HASH_BYTES)]
