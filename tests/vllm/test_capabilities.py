"""The checks of what this project needs of vLLM: what differs switches its own capability off, and the rest works."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from vllm.config import SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy
from vllm.v1.request import Request
from vllm.v1.sample.sampler import Sampler

from router.protocol.block_hash import PrefixScope
from serve_app.cli.checks import machine, settings
from serve_app.cli.checks.finding import Look
from serve_app.config.app import AppConfig
from serve_app.engine.vllm.scheduling import hooks, probe
from serve_app.engine.vllm.settings import CHECKED, IN_CORE, WHOLE_HITS
from tests.serve_app.engine.tiny import request, run_all
from tests.vllm import source
from tests.vllm.engines import BLOCK, both_engines

Patch = pytest.MonkeyPatch
GAUGE = "warmpath_engine_capability"


def kept(name: str) -> property:
    """Return an attribute that keeps its first value."""
    return property(lambda one: vars(one)[name], lambda one, value: vars(one).setdefault(name, value))


def a_queue_that_stays(patch: Patch) -> None:
    patch.setattr(Scheduler, "waiting", kept("waiting"), raising=False)


def another_victim(patch: Patch) -> None:
    """vLLM preempts the latest arrival, whatever its priority."""
    schedule = Scheduler.schedule

    def by_arrival(self: Any, *arguments: Any) -> Any:
        for one in self.running:
            one.priority = 0
        return schedule(self, *arguments)

    patch.setattr(Scheduler, "schedule", by_arrival)


def a_pool_that_asks_for_more(patch: Patch) -> None:
    get_new_blocks = BlockPool.get_new_blocks

    def asks(self: Any, *arguments: Any, **named: Any) -> Any:
        self.free_block_queue.peek()
        return get_new_blocks(self, *arguments, **named)

    patch.setattr(FreeKVCacheBlockQueue, "peek", lambda self: None, raising=False)
    patch.setattr(BlockPool, "get_new_blocks", asks)


def hashes_elsewhere(patch: Patch) -> None:
    """A request keeps its first hasher."""

    def update(self: Any) -> None:
        hasher = vars(self).setdefault("first", self._block_hasher)
        self.block_hashes.extend(hasher(self))

    patch.setattr(Request, "update_block_hashes", update)


def blocks_stored_elsewhere(patch: Patch) -> None:
    store = BlockPool.cache_full_blocks
    patch.setattr(BlockPool, "cache_full_blocks", property(lambda self: partial(store, self), lambda self, value: None))


def no_events(patch: Patch) -> None:
    patch.setattr(KVCacheManager, "take_events", lambda self: [])


def a_connector_without_a_pool(patch: Patch) -> None:
    patch.delattr(KVConnectorBase_V1, "bind_gpu_block_pool")


def least_recently_used_alone(patch: Patch) -> None:
    """Host memory has one order for all tenants."""
    patch.setattr(CachePolicyFactory, "get_cache_policy_cls", lambda *_: LRUCachePolicy)


def steps_without_blocks(patch: Patch) -> None:
    schedule = Scheduler.schedule

    def told(self: Any, *arguments: Any) -> Any:
        output = schedule(self, *arguments)
        for new in output.scheduled_new_reqs:
            new.block_ids = ()
        return output

    patch.setattr(Scheduler, "schedule", told)


def another_sampler(patch: Patch) -> None:
    patch.setattr(Sampler, "sample", lambda self, logits, metadata: logits)


def a_prompt_of_one_length(patch: Patch) -> None:
    patch.setattr(Request, "num_prompt_tokens", kept("num_prompt_tokens"), raising=False)


def grammars_unasked(patch: Patch) -> None:
    patch.setattr(Scheduler, "get_grammar_bitmask", lambda self, step: None)


def no_such_field(patch: Patch) -> None:
    """Its drafts always cost a block."""
    own = SpeculativeConfig

    def made(**fields: Any) -> Any:
        if WHOLE_HITS in fields:
            raise TypeError(f"unexpected keyword argument {WHOLE_HITS!r}")
        return own(**fields)

    patch.setattr(probe, "SpeculativeConfig", made)


DIFFERENT: dict[Callable[[Patch], None], set[str]] = {
    a_queue_that_stays: {"turns"},
    another_victim: {"turns"},
    a_pool_that_asks_for_more: {"shares"},
    hashes_elsewhere: {"public_prompts"},
    blocks_stored_elsewhere: {"public_prompts", "store_kv"},
    no_events: {"predictions", "tiers"},
    a_connector_without_a_pool: {"saves", "copies", "tiers", "host_memory"},
    least_recently_used_alone: {"host_memory"},
    steps_without_blocks: {"copies", "tiers"},
    another_sampler: {"exact_resume"},
    a_prompt_of_one_length: {"resume"},
    grammars_unasked: {"grammars"},
    no_such_field: {"draft_hits"},
}


def test_the_installed_vllm_allows_every_capability() -> None:
    assert hooks.switched_off() == {}
    assert hooks.CHECKS.keys() == CHECKED


@pytest.mark.parametrize("change", DIFFERENT, ids=lambda change: change.__name__)
def test_what_differs_switches_off_its_own_capability(
    change: Callable[[Patch], None], monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning says so, requests are served without it, and who requires it is refused."""
    change(monkeypatch)
    off = hooks.start([])
    assert off.keys() == DIFFERENT[change]
    (record,) = (record for record in caplog.records if record.name == hooks.__name__)
    assert all(f"{name}: " in record.getMessage() for name in off)
    serve(IN_CORE - off.keys())
    for name in off:
        with pytest.raises(ValueError, match=rf"required_capabilities: vLLM \S+ has no {name}: "):
            hooks.start([name])
    hooks.start(sorted(CHECKED - off.keys()))


def test_doctor_and_check_try_the_installed_vllm() -> None:
    (row,) = machine.engines(Look())
    assert (row.subject, row.state) == ("vllm", "ok")
    assert row.found.endswith(f"allows {', '.join(sorted(CHECKED))}")
    config = AppConfig(engine="vllm", model="demo", required_capabilities=sorted(CHECKED))
    assert not [finding for finding in settings.fit(Look("here", config)) if finding.state == "problem"]


def test_another_release_may_allow_no_less_than_the_installed_one(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `make test-vllm-source` tells of a release: a line for each check, and what has become worse."""
    installed = source.told()
    assert set(installed.values()) == {""}
    for why, status in (("", 0), ("its queue is another", 1)):
        answers = iter((installed, {**installed, "turns": why}))
        monkeypatch.setattr(source, "told_of", lambda *sources: next(answers))  # noqa: B023  # called at once
        monkeypatch.setattr(source, "fetched", lambda version, cache: cache / version)
        assert source.main("0.99.0") == status
        told = capsys.readouterr().out.splitlines()
        assert len(told) == len(installed) + 1
        assert f"turns           {why or 'ok'}" in told
        assert told[-1] == f"vLLM 0.99.0: {'turns differ' if why else 'all that the installed one allows'}"


@pytest.mark.parametrize("number", range(len(IN_CORE) + 1))
def test_every_part_of_the_capabilities_works_without_the_others(number: int) -> None:
    for on in itertools.combinations(sorted(IN_CORE), number):
        serve(frozenset(on))


@pytest.mark.parametrize("name", sorted(IN_CORE))
def test_a_check_fails_if_its_capability_does_nothing(name: str, monkeypatch: Patch) -> None:
    own, scoped = probe.SchedulerProbe, {"public_prompts", "store_kv"}  # these two need the same hook
    off = scoped if name in scoped else {name}
    monkeypatch.setattr(probe, "SchedulerProbe", lambda *on, **more: own(*(IN_CORE - off), **more))
    with pytest.raises(probe.Differs):
        getattr(probe, name)()


def test_a_vllm_that_mixes_tenants_does_not_start(monkeypatch: Patch) -> None:
    """Its hashes leave out the salt."""
    extra_keys = kv_cache_utils.generate_block_hash_extra_keys

    def without_salt(request: Any, *arguments: Any) -> Any:
        request.cache_salt = None
        return extra_keys(request, *arguments)

    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", without_salt)
    with pytest.raises(ValueError, match="does not keep tenants' caches apart"):
        hooks.start([])


def test_a_model_too_large_for_the_card_is_one_sentence(demo_model_path: Path, monkeypatch: Patch) -> None:
    """It has 1 MiB, and nothing is loaded."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda self: 1 << 20)
    monkeypatch.setattr(AsyncLLM, "from_vllm_config", None)
    with pytest.raises(ValueError, match=r"too large for 1 GPU of 0\.0 GiB: \S+ GiB of weights") as refused:
        both_engines(demo_model_path).__enter__()
    assert "\n" not in str(refused.value)


def serve(on: frozenset[str]) -> None:
    """Check that a flood and another tenant, which take turns and run out of blocks, all get their answers."""
    served = probe.SchedulerProbe(*on)
    asked = [served.ask("flood", probe.prompt(number % 3, 9), public=2) for number in range(6)]
    asked += [served.ask("calm", probe.prompt(number % 2, 9), store_kv=False) for number in range(3)]
    for _ in range(3000):
        served.step()
        for one in [each for each in asked if each.num_tokens > 12 * probe.SIZE]:
            served.end(one)
            asked.remove(one)
        if not asked:
            break
    assert not asked
    assert served.scheduler.reset_prefix_cache()
    assert served.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == probe.BLOCKS - 1


def test_an_engine_that_goes_without_everything_answers_and_keeps_tenants_apart(
    demo_model_path: Path, monkeypatch: Patch
) -> None:
    """Public prompts are each tenant's own then, and what may not be stored is read by nobody."""
    monkeypatch.setattr(hooks, "switched_off", lambda: dict.fromkeys(CHECKED - {"exact_resume"}, "it is another"))
    with both_engines(demo_model_path) as both:
        public, own = both.prompt(4 * BLOCK, seed=1), both.prompt(4 * BLOCK + 1, seed=2)

        def cached(tenant: str, *, store_kv: bool = True) -> int:
            scope = PrefixScope("tiny", salt=tenant.encode(), public_blocks=4)
            item = request("r", np.concatenate([public, own]), 6, scope=scope, tenant=tenant)
            answered = run_all(both.vllm, [structs.replace(item, store_kv=store_kv)])
            assert answered.tokens == run_all(both.torch, [item]).tokens
            return answered.cached["r"] // BLOCK

        assert [cached("c", store_kv=False) for _ in range(2)] == [0, 0]
        assert [cached(tenant) for tenant in "abab"] == [0, 0, 8, 8]
        assert cached("a", store_kv=False) == 0
        both.vllm.set_tenant_shares({"a": 2.0})
        assert both.vllm.reset_prefix_cache()
        assert cached("a") == 0
        allowed = {
            dict(labels)["capability"]: value for name, labels, value in both.vllm.stats().samples if name == GAUGE
        }
        assert allowed == {name: float(name == "exact_resume") for name in CHECKED}
