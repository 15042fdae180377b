"""Operators load and unload adapters: everywhere or nowhere, inside the root, and for the given tenants."""

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints.adapter_registry import AdapterEntry, AdapterRegistry, configured_adapters
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import AdapterError, AdapterSpec
from serve_app.errors import InvalidRequest, ModelNotFound, NotFound, PermissionDenied
from serve_app.ingress.adapter_admin import AdapterAdmin
from serve_app.replica.adapter_loader import ReplicaAdapters
from tests.serve_app.engine.adapters import save_plain, simulated_engine


class Deployment:
    """Two simulated replicas and another ingress' registry, informed without Ray."""

    def __init__(self, **settings: Any) -> None:
        self.config = AppConfig.model_validate({"model": "demo", "allow_runtime_lora": True, **settings})
        self.engines = [simulated_engine() for _ in range(2)]
        self.replicas = [ReplicaAdapters(self.config, engine) for engine in self.engines]
        self.registry, self.other_ingress = AdapterRegistry("demo"), AdapterRegistry("demo")
        self.admin = AdapterAdmin(self.config, self.registry, self.tell_replicas, self.tell_ingresses)

    async def tell_replicas(self, method: str, argument: Any) -> list[Any]:
        answers = []
        for replica in self.replicas:
            match method:
                case "load_adapter":
                    answers.append(await replica.load(argument.spec))
                case "drop_adapter":
                    answers.append(replica._engine.adapters.unload(argument))
                case _:
                    replica.registry.merge(argument)
        return answers

    async def tell_ingresses(self, method: str, argument: Any) -> list[Any]:
        assert method == "merge_adapters"
        self.other_ingress.merge(argument)
        return []

    def load(self, name: Any, path: Any, **more: Any) -> str:
        return asyncio.run(self.admin.load(json.dumps({"lora_name": name, "lora_path": str(path), **more}).encode()))

    def unload(self, name: str) -> str:
        return asyncio.run(self.admin.unload(json.dumps({"lora_name": name}).encode()))

    def entry(self) -> AdapterEntry:
        """Return the adapter's entry, equal everywhere; all replicas have this adapter in memory, and no other."""
        entry = self.registry.get("style")
        assert entry is not None and entry.spec is not None
        for copy in (self.registry, self.other_ingress, *(replica.registry for replica in self.replicas)):
            assert copy.entries() == (entry,)
        assert all(engine.adapters.loaded == (entry.spec.key,) for engine in self.engines)
        return entry


def test_a_loaded_adapter_is_on_every_replica_and_every_ingress(tmp_path: Path) -> None:
    """A reload in place changes only the digest, everywhere; an unloaded adapter is gone from all of them."""
    app = Deployment()
    assert app.load("style", save_plain(tmp_path / "a", 1.0)) == "Success: LoRA adapter 'style' added successfully."
    old = app.entry()
    assert app.other_ingress.choose("demo", "style", "t") == old.spec
    with pytest.raises(InvalidRequest, match="already been loaded"):
        app.load("style", tmp_path / "a")
    app.load("style", save_plain(tmp_path / "b", 2.0), load_inplace=True)
    assert old.spec is not None and old.spec != app.entry().spec
    assert app.unload("style") == "Success: LoRA adapter 'style' removed successfully."
    assert all(engine.adapters.loaded == () for engine in app.engines)
    for copy in (app.registry, app.other_ingress, app.replicas[0].registry):
        with pytest.raises(ModelNotFound):
            copy.choose("style", None, "t")
    with pytest.raises(NotFound, match="cannot be found"):
        app.unload("style")


def test_a_reload_in_place_keeps_its_tenants(tmp_path: Path) -> None:
    """Leaving ``tenants`` out keeps them; only an explicit null opens a tenant's adapter to all. (docs: adapters)"""
    tenants = [{"name": name, "key_sha256": [sha256(name.encode()).hexdigest()]} for name in ("acme", "globex")]
    app = Deployment(tenants=tenants, operator_key_sha256=[sha256(b"operator").hexdigest()])

    def reload(weight: float, **more: Any) -> tuple[str, ...]:
        app.load("style", save_plain(tmp_path / str(weight), weight), load_inplace=True, **more)
        return app.entry().tenants

    assert reload(1.0, tenants=["acme"]) == ("acme",)
    assert reload(2.0) == ("acme",)
    with pytest.raises(ModelNotFound):
        app.registry.choose("style", None, "globex")
    assert reload(3.0, tenants=["globex"]) == ("globex",)
    assert reload(4.0, tenants=None) == reload(5.0) == ()
    app.load("style", save_plain(tmp_path / "c", 6.0), load_inplace=True, tenants=["acme"])
    app.unload("style")
    assert reload(7.0) == (), "a new adapter is for all"


def test_two_ingresses_that_load_one_name_at_once_end_with_one_entry(tmp_path: Path) -> None:
    """The second one gets an error and leaves nothing in the replicas' memory."""
    app = Deployment()
    fast, late = save_plain(tmp_path / "fast", 1.0), save_plain(tmp_path / "slow", 2.0)

    async def replicas(method: str, argument: Any) -> list[Any]:
        answers = await app.tell_replicas(method, argument)
        if method == "load_adapter":
            await app.admin.load(json.dumps({"lora_name": "style", "lora_path": str(fast)}).encode())
        return answers

    slow = AdapterAdmin(app.config, app.other_ingress, replicas, app.tell_ingresses)
    with pytest.raises(InvalidRequest, match="meanwhile"):
        asyncio.run(slow.load(json.dumps({"lora_name": "style", "lora_path": str(late)}).encode()))
    kept = app.entry().spec
    assert kept is not None and Path(kept.path) == fast


def test_an_adapter_that_one_replica_cannot_serve_is_offered_nowhere(tmp_path: Path) -> None:
    """The reason reaches the operator; replicas that could have served it do not keep it."""
    app = Deployment()

    def fail(_: AdapterSpec) -> None:
        raise AdapterError("model.x has rank 9, over max_lora_rank 8")

    app.engines[1].adapters.load = fail  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest, match="over max_lora_rank 8"):
        app.load("style", save_plain(tmp_path / "a"))
    assert [engine.adapters.loaded for engine in app.engines] == [(), ()]
    assert app.registry.entries() == ()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"lora_name": None}, "Both 'lora_name' and 'lora_path'"),
        ({"lora_name": 3}, "lora_name must be"),
        ({"lora_name": "demo"}, "base model's name"),
        ({"lora_name": "a@1"}, "not a valid adapter name"),
        ({"lora_path": "/nowhere"}, "cannot be loaded from /nowhere: there is no adapter_model.safet"),
        ({"tenats": ["acme"]}, "Unknown parameter: 'tenats'; did you mean 'tenants'"),
        ({"lora_path": "x\0y"}, "no path|no adapter_model"),
        ({"tenants": []}, "at least one"),
        ({"lora_path": "x" * 256}, "The adapter cannot be loaded"),  # no system call takes it
        ({"lora_path": "x/" * 2048}, "The adapter cannot be loaded"),
    ],
)
def test_a_wrong_body_is_a_400(body: dict[str, Any], reason: str, tmp_path: Path) -> None:
    raw = json.dumps({"lora_name": "a", "lora_path": "x", **body}).encode()
    for settings in ({}, {"lora_root": str(tmp_path)}) if reason.startswith("The adapter") else ({},):
        with pytest.raises(InvalidRequest, match=reason):
            asyncio.run(Deployment(**settings).admin.load(raw))


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
    """A file outside ``lora_root`` is not read; links inside, as in Hugging Face's cache, are. (docs: isolation)"""
    app = Deployment(lora_root=str(tmp_path / "root"))
    file = save_plain(tmp_path / "root" / "a") / linked
    secret, fine = tmp_path / "secret.json", tmp_path / "fine"
    secret.write_text('{"peft_type": "TOPSECRET"}')
    fine.write_bytes(file.read_bytes())
    for target in (secret, fine, tmp_path / "missing"):
        file.unlink()
        file.symlink_to(target)
        with pytest.raises(InvalidRequest, match=f"{linked} is a link that leads out of lora_root") as refused:
            app.load("a", path)
        assert "TOPSECRET" not in refused.value.message
    file.unlink()
    file.symlink_to(fine.rename(tmp_path / "root" / "blob"))
    assert "added" in app.load("a", path)


def test_settings_that_name_no_adapter_are_refused_at_start(tmp_path: Path) -> None:
    """The error names the wrong one; the model's own name cannot be an adapter's."""
    with pytest.raises(AdapterError, match="'gone' of the settings"):
        configured_adapters({"fine": save_plain(tmp_path / "a"), "gone": tmp_path / "none"})
    for settings, said in (
        ({"lora_adapters": {"demo": tmp_path}}, "as the model is"),
        ({"max_loras": 8, "max_cpu_loras": 7}, "max_cpu_loras"),
    ):
        with pytest.raises(ValueError, match=said):
            AppConfig(model="demo", **settings)
