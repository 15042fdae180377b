"""A deployment's adapters and models: each tenant's visible adapters, copies that agree, and the cache of models."""

import asyncio
import errno
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError
from safetensors import SafetensorError

from router.protocol.block_hash import split_chain
from serve_app.api.request import CompletionRequest
from serve_app.checkpoints.adapter_registry import AdapterEntry, AdapterRegistry
from serve_app.checkpoints.checkpoint import CheckpointError, load_checkpoint_info
from serve_app.checkpoints.model_cache import ensure_made
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import AdapterSpec
from serve_app.errors import InvalidRequest, ModelNotFound, Overloaded
from serve_app.generation.prepare import Limits, Preparer
from serve_app.ingress.adapter_admin import AdapterAdmin
from serve_app.ingress.broadcast import Broadcast
from serve_app.tenants import Tenant, Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer


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


def test_an_unknown_adapter_is_refused_and_only_the_callers_adapters_are_named() -> None:
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
    assert [one.name for one in held.visible("acme", {"secret"})] == ["secret"]
    assert [one.name for one in held.visible(None)] == ["open", "secret"]
    with pytest.raises(InvalidRequest, match="none is loaded"):
        registry().choose("base", "x", "t")


def test_models_that_a_tenant_may_not_use_do_not_exist_for_it() -> None:
    """This includes the base model: each answer is the exact one for an unknown name. (docs: tenants)"""
    held = registry(AdapterEntry("a", spec("a")), AdapterEntry("b", spec("b")))
    assert held.choose("a", None, "t", {"a"}) == spec("a")
    assert held.choose("base", None, "t", {"base"}) is None
    for allowed in ({"a"}, {"base"}, set[str]()):
        for model, lora_name in (("base", None), ("b", None), ("base", "b"), ("a", "b")):
            if model in allowed and lora_name is None:
                continue
            hidden = lora_name if model in allowed else model
            with pytest.raises((ModelNotFound, InvalidRequest)) as forbidden:
                held.choose(model, lora_name, "t", allowed)
            missing_name = (model, "nothing") if model in allowed else ("nothing", lora_name)
            with pytest.raises(type(forbidden.value)) as missing:
                held.choose(*missing_name, "t", allowed)
            assert forbidden.value.message.replace(repr(hidden), "'nothing'", 1) == missing.value.message
    fresh = AdapterRegistry("base", current=False)
    with pytest.raises(Overloaded):  # as for any other name, while it does not know the adapters yet
        fresh.choose("base", None, "t", {"a"})


entries = st.builds(
    AdapterEntry,
    st.sampled_from("ab"),
    st.one_of(st.none(), st.builds(spec, st.just("a"), st.sampled_from("01"))),
    tenants=st.sampled_from([(), ("acme",)]),
    stamp=st.integers(1, 5),
)


@given(news=st.lists(entries), order=st.randoms())
def test_copies_agree_in_any_order_of_the_news(news: list[AdapterEntry], order: Any) -> None:
    """Late, repeated and reordered news change nothing, nor do two entries of one name and time. (docs: adapters)"""
    shuffled = news * 2
    order.shuffle(shuffled)
    first, second = registry(*news), registry(*shuffled)
    assert set(first.entries()) == set(second.entries())
    for entry in news:
        assert first.next_entry(entry.name, None).stamp > entry.stamp


def test_settings_that_changed_do_not_change_each_other() -> None:
    """A new ingress keeps its own settings against older replicas' entries; a runtime change overrides both."""
    held = registry(AdapterEntry("a", spec("a", "5")))
    for digest in "19":
        held.merge([AdapterEntry("a", spec("a", digest))])
        assert held.choose("a", None, "t") == spec("a", "5")
    held.merge([AdapterEntry("a", None, stamp=1)])
    assert held.get("a") is None


def test_a_new_ingress_serves_no_adapter_before_it_has_the_others_entries() -> None:
    """A configured adapter may have been unloaded or restricted: 503 until then. The base is served."""
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

        def __init__(self) -> None:
            self.replica = SimpleNamespace(describe=SimpleNamespace(remote=AsyncMock()))
            self.replicas = AsyncMock(side_effect=[ActorUnavailableError("not yet", None), [()], [()]])
            self.ingresses = AsyncMock(side_effect=[TimeoutError, [new.entries(), old.entries()]])

    asyncio.run(Others().connect(new, AsyncMock()))
    assert new.current
    with pytest.raises(ModelNotFound):
        new.choose("a", None, "t")


async def _nobody(method: str, argument: Any) -> list[Any]:
    return []


def test_the_chain_differs_by_adapter_and_by_digest(demo_model_path: Path) -> None:
    info, secret = load_checkpoint_info(demo_model_path), b"0" * 32
    tokenizer = PromptTokenizer(demo_model_path, cache_bytes=1 << 20, block_size=16)

    def prepared(one: AdapterSpec, model: str) -> Any:
        held = registry(AdapterEntry("a", one))
        preparer = Preparer(info, tokenizer, Tenants([], secret), secret, held, Limits(2048, 4))
        wanted = CompletionRequest(model=model, prompts=("The same words. " * 30,), max_tokens=1)
        return asyncio.run(preparer.prepare(wanted, Tenant("t"), "id"))[0]

    old, new = spec("a", "0" * 64), spec("a", "1" * 64)
    base, first, second = made = prepared(old, "base"), prepared(old, "a"), prepared(new, "a")
    chains = [set(split_chain(one.block_hashes)) for one in made]
    assert all(chains) and len(set.union(*chains)) == sum(map(len, chains))
    assert len({one.placement_key for one in made}) == 3
    assert (first.scope.lora, first.lora_path, base.lora_path) == (old.key, old.path, "")
    assert (first.adapter, second.adapter, base.adapter) == (old.key, new.key, "")


_KILLED = """
import sys, time
from pathlib import Path
from serve_app.checkpoints.model_cache import ensure_made
def half(directory):
    (directory / "config.json").write_text("{")
    print("half made", flush=True)
    time.sleep(3600)
ensure_made(Path(sys.argv[1]), half, 0)
"""


def whole(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """The reason is reported, a full device as one sentence, and the next call makes the model."""

    def fail_with(error: Exception) -> None:
        def broken(directory: Path) -> None:
            whole(directory)
            raise error

        ensure_made(tmp_path / "demo", broken, 0)

    with pytest.raises(ValueError, match="no weights"):
        fail_with(ValueError("no weights"))
    for error in (OSError(errno.ENOSPC, "full"), SafetensorError("No space left on device (os error 28)")):
        with pytest.raises(CheckpointError, match=r"demo needs about .* whose disk is full.* XDG_CACHE_HOME"):
            fail_with(error)
    with pytest.raises(CheckpointError, match=rf"^demo needs about 1,000,000,000 MB in {tmp_path}, whose disk has "):
        ensure_made(tmp_path / "demo", lambda _: pytest.fail("it cannot fit"), 10**15)
    assert list(tmp_path.iterdir()) == []
    assert (ensure_made(tmp_path / "demo", whole, 0) / "config.json").read_text() == "{}"
    with pytest.raises(CheckpointError, match="XDG_CACHE_HOME"):
        ensure_made(tmp_path / "demo" / "config.json" / "other", whole, 0)


def test_a_killed_maker_leaves_nothing_half_and_is_cleaned_up_after(tmp_path: Path) -> None:
    """After a SIGKILL in the middle the model is absent, and making another model removes the remains."""
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "model")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as maker:
        assert maker.stdout is not None and maker.stdout.readline() == "half made\n"
        maker.send_signal(signal.SIGKILL)
    assert not (tmp_path / "model").exists() and len(list(tmp_path.iterdir())) == 1
    assert (ensure_made(tmp_path / "model", whole, 0) / "config.json").read_text() == "{}"
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]
