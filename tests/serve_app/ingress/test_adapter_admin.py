"""Operators load and unload adapters: everywhere or nowhere, inside the root, and for whom they say."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints.adapter_registry import AdapterRegistry, configured_adapters
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import AdapterError, AdapterSpec
from serve_app.errors import InvalidRequest, ModelNotFound, NotFound, PermissionDenied
from serve_app.ingress.adapter_admin import AdapterAdmin
from serve_app.replica.adapter_loader import ReplicaAdapters
from tests.serve_app.engine.adapters import save_plain, simulated_engine


class Deployment:
    """Two simulated replicas and another ingress' registry, told without Ray."""

    def __init__(self, **settings: Any) -> None:
        self.config = AppConfig.model_validate({"model": "demo", "allow_runtime_lora": True, **settings})
        self.engines = [simulated_engine() for _ in range(2)]
        self.replicas = [ReplicaAdapters(self.config, engine) for engine in self.engines]
        self.registry = AdapterRegistry("demo")
        self.other_ingress = AdapterRegistry("demo")
        self.admin = AdapterAdmin(self.config, self.registry, self._replicas, self._ingresses)

    async def _replicas(self, method: str, argument: Any) -> list[Any]:
        answers = []
        for replica in self.replicas:
            match method:
                case "load_adapter":
                    answers.append(await replica.load(argument.spec))
                case "drop_adapter":
                    answers.append(replica._engine.unload_adapter(argument))
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
    """Leaving ``tenants`` out keeps them; only an explicit null opens a tenant's adapter to all. (docs/lora.md)"""
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
    slow.tell_replicas = replicas
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
        (
            {"lora_name": "a", "lora_path": "/nowhere"},
            "cannot be loaded from /nowhere: there is no adapter_model.safet",
        ),
        (
            {"lora_name": "a", "lora_path": "x", "tenats": ["acme"]},
            "Unknown parameter: 'tenats'; did you mean 'tenants'",
        ),
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
    """A file outside ``lora_root`` is not read, whatever it is; links inside, as Hugging Face's cache has, are.

    docs/security.md
    """
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
