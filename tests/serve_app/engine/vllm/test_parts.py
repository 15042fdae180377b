"""Arguments, adapters' files and the waiting line, without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine.outbox import Outbox
from serve_app.engine.protocol import AdapterError, EngineOutput, QueueFull
from serve_app.engine.vllm.adapters import VllmAdapters
from serve_app.engine.vllm.arguments import EXECUTOR, engine_arguments, lora_rank, set_environment
from serve_app.engine.vllm.events.endpoints import EventEndpoints
from serve_app.engine.vllm.live_requests import LiveRequest, LiveRequests
from serve_app.engine.vllm.sampling.token_choice import choice_of
from serve_app.engine.vllm.settings import VllmSettings
from tests.serve_app.engine.adapters import described, save_plain
from tests.serve_app.engine.tiny import prompt, request

ENDPOINTS = EventEndpoints(Path("/run/private"))


def test_the_pool_has_as_many_blocks_as_were_asked_for() -> None:
    """One more is vLLM's own, and on a CPU the bytes of all of them; a prompt is no longer than the pool."""
    settings = VllmSettings("m", num_blocks=10, block_size=32, block_bytes=1000)
    cpu = engine_arguments(settings, ENDPOINTS, on_cpu=True)
    assert (cpu["num_gpu_blocks_override"], cpu["kv_cache_memory_bytes"], cpu["max_model_len"]) == (11, 11000, 320)
    gpu = engine_arguments(VllmSettings("m", kv_cache_bytes=5000), ENDPOINTS, on_cpu=False)
    assert (gpu["kv_cache_memory_bytes"], gpu["gpu_memory_utilization"]) == (5000, 0.9)
    assert "num_gpu_blocks_override" not in gpu


def test_a_cpus_core_computes_itself() -> None:
    """As a GPU's does by default: a worker process would be waited for in a loop that takes a core."""
    cpu, gpu = (engine_arguments(VllmSettings("m"), ENDPOINTS, on_cpu=on_cpu) for on_cpu in (True, False))
    assert cpu["distributed_executor_backend"] == EXECUTOR
    assert "distributed_executor_backend" not in gpu


def test_prompts_stay_on_the_machine_and_out_of_logs() -> None:
    """vLLM's default publishes the token ids of all prompts on a TCP port."""
    found = engine_arguments(VllmSettings("m"), ENDPOINTS, on_cpu=True)
    events = found["kv_events_config"]
    assert events["endpoint"] == "ipc:///run/private/events"
    assert events["replay_endpoint"].startswith("ipc://")
    assert not found["enable_log_requests"]
    assert found["prefix_caching_hash_algo"] == "sha256"
    off = engine_arguments(VllmSettings("m", enable_prefix_caching=False), ENDPOINTS, on_cpu=True)
    assert "kv_events_config" not in off


def test_room_for_adapters_is_made_where_there_may_be_some() -> None:
    """vLLM has room for ranks of its own choice, and no room by default."""
    assert "enable_lora" not in engine_arguments(VllmSettings("m"), ENDPOINTS, on_cpu=True)
    found = engine_arguments(VllmSettings("m", lora=True, max_lora_rank=17, max_loras=2), ENDPOINTS, on_cpu=True)
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 2, 32)
    with pytest.raises(ValueError, match="at most 512"):
        lora_rank(1000)


def test_the_environment_keeps_whole_hashes() -> None:
    """64 bits of a hash can be made to collide; whoever set a log level keeps it."""
    environment = {"VLLM_LOGGING_LEVEL": "DEBUG", "OMP_NUM_THREADS": "1"}
    set_environment(environment, 3)
    assert environment["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] == "0"
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_LOGGING_LEVEL"]) == ("3", "DEBUG")


class Vllm:
    """What vLLM was told, and which files it was given."""

    def __init__(self) -> None:
        self.paths: dict[int, Path] = {}
        self.removed: list[int] = []
        self.error = ""

    def add(self, name: str, number: int, path: str) -> Any:
        self.paths[number] = Path(path)
        if self.error:
            raise ValueError(f"{path}: {self.error}")
        return name, number


def adapters_of(vllm: Vllm, directory: Path, **settings: Any) -> VllmAdapters:
    values = {"enabled": True, "max_loras": 1, "max_cpu_loras": 1, **settings}
    return VllmAdapters(directory, vllm.add, vllm.removed.append, **values)


def test_vllm_reads_files_that_nobody_else_writes(tmp_path: Path) -> None:
    """The copy has the bytes that were described; it is gone once the adapter is, and the next one's is another."""
    vllm = Vllm()
    adapters = adapters_of(vllm, tmp_path / "private")
    spec, _ = described(save_plain(tmp_path / "a"))
    adapters.slots.load(spec)
    copy = vllm.paths[1]
    assert (copy / "adapter_model.safetensors").read_bytes() == (tmp_path / "a/adapter_model.safetensors").read_bytes()
    config = json.loads((copy / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (1, 1.0, ["x"])
    other, _ = described(save_plain(tmp_path / "b", 2.0), "b")
    adapters.slots.load(other)
    assert vllm.removed == [1]
    assert not copy.exists()
    assert vllm.paths[2].exists()


def test_changed_files_and_what_vllm_refuses_are_errors_that_name_no_path(tmp_path: Path) -> None:
    """The sentence goes to a client."""
    vllm = Vllm()
    adapters = adapters_of(vllm, tmp_path / "private")
    spec, _ = described(save_plain(tmp_path / "a"))
    vllm.error = "target modules are not supported"
    with pytest.raises(AdapterError, match="cannot serve this adapter: a: target modules") as refused:
        adapters.slots.load(spec)
    assert str(tmp_path) not in str(refused.value)
    assert not vllm.paths[1].exists()
    save_plain(tmp_path / "a", 3.0)
    with pytest.raises(AdapterError, match="changed after it was loaded"):
        adapters.slots.load(spec)
    with pytest.raises(AdapterError, match="allow_runtime_lora"):
        adapters_of(vllm, tmp_path / "other", enabled=False).slots.load(spec)


def live(name: str, tenant: str = "default") -> LiveRequest:
    asked = request(name, prompt(4), tenant=tenant)
    return LiveRequest(asked, lambda _: None, choice_of(asked, "/none"), 0.0, Path("/none"))


def test_the_waiting_line_is_bounded_and_its_end_is_for_others() -> None:
    """Among several tenants one alone fills seven eighths of the line; whoever has a token waits no more."""
    line = LiveRequests(8, {"flood": 1.0, "calm": 1.0}, lambda: 0.0)
    flood = [live(str(number), "flood") for number in range(7)]
    for one in flood:
        line.check(one.request.request_id, "flood", 1.0)
        line.add(one)
    with pytest.raises(QueueFull):
        line.check("more", "flood", 2.5)
    line.check("other", "calm", 1.0)
    with pytest.raises(ValueError, match="in use"):
        line.check("0", "calm", 1.0)
    line.begin(flood[0])
    line.begin(flood[0])
    line.check("more", "flood", 1.0)
    line.remove(flood[1])
    assert len(line) == 6
    assert line.get("1") is None


def test_a_submitter_gets_the_outputs_of_a_turn_together() -> None:
    """And a sink that fails harms nobody else."""
    soon: list[None] = []
    got: list[list[EngineOutput]] = []
    box = Outbox(lambda: soon.append(None))

    def fails(outputs: Any) -> None:
        raise RuntimeError

    box.add(fails, EngineOutput("x"))
    for name in "abc":
        box.add(got.append, EngineOutput(name))
    assert len(soon) == 1
    box.deliver()
    assert [[output.request_id for output in batch] for batch in got] == [["a", "b", "c"]]
    box.add(got.append, EngineOutput("d"))
    assert len(soon) == 2
