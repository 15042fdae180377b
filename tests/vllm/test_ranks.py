"""vLLM with several ranks: tokens, hits and copies equal those of one; a dead rank is noticed; `engine_args`."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from serve_app.config.app import AppConfig
from serve_app.engine.protocol import EngineError
from serve_app.engine.vllm.engine_args import REFUSED, parsed_engine_args, refused_engine_args
from tests.harness.eventually import eventually
from tests.serve_app.engine.tiny import Collector, request, run_all
from tests.vllm.engines import BLOCK, Both, both_engines, compute, mispredicted, prefix_of, reset
from tests.vllm.test_served import ended

STAGES: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "allow_runtime_lora": False,
    "engine_args": {"compilation_config": {"mode": 2, "backend": "eager"}},
}
"""vLLM's CPU build runs stages only with compilation; this compiles without inductor."""


def kept_as_by_one_rank(both: Both, requests: int) -> None:
    """Answers are the built-in engine's, alone and together; a prefix is exported in parts and imported whole."""
    asked = [request(f"r{i}", both.prompt(90, seed=i // 2), 24, temperature=i % 2, seed=i) for i in range(8)]
    assert run_all(both.vllm, asked).tokens == run_all(both.torch, asked).tokens
    wrong, hits = mispredicted(both, requests)
    assert hits > requests // 3
    assert wrong == []
    ids = both.prompt(5 * BLOCK + 1, seed=77)
    prefix, tokens = compute(both, ids)
    part = both.vllm.transfer.export_prefix(prefix)
    assert part is not None
    assert [each.shape for each in part.header.format.parts] == [(both.vllm.kv_block_bytes // 2,)] * 2
    assert part.header.format.block_bytes == both.vllm.kv_block_bytes
    reset(both)
    assert both.vllm.transfer.import_part(part, prefix_of(ids), 0) == 5
    again = run_all(both.vllm, [request("again", ids, 8)])
    assert (again.tokens["again"], again.cached["again"]) == (tokens, 5 * BLOCK)


def test_two_ranks_are_as_one_until_one_dies(demo_model_path: Path) -> None:
    """Each has half of the heads. If one dies, requests end with an error and the engine is unhealthy."""
    with both_engines(demo_model_path, tensor_parallel_size=2, num_threads=2) as both:
        kept_as_by_one_rank(both, 300)
        collector = Collector()
        both.vllm.submit(request("long", both.prompt(40), 1900), collector)
        collector.wait_tokens("long", 3, 120)
        processes = [child for child in psutil.Process().children(recursive=True) if child.name().startswith("VLLM")]
        (victim,) = (process for process in processes if "Worker_TP1" in " ".join(process.cmdline()))
        victim.kill()
        eventually(lambda: "long" in collector.finish)
        assert collector.finish["long"] == "error"
        assert not both.vllm.healthy()
        try:
            both.vllm.submit(request("next", both.prompt(40), 4), collector)
            eventually(lambda: "next" in collector.finish)
            assert collector.finish["next"] == "error"
        except EngineError:
            pass
        assert len(processes) == 3
        eventually(lambda: all(map(ended, processes)))


def test_two_stages_are_as_one(demo_model_path: Path) -> None:
    """Each has half of the layers."""
    with both_engines(demo_model_path, num_threads=2, **STAGES) as both:
        kept_as_by_one_rank(both, 100)


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2}])
def test_impossible_divisions_are_refused_before_vllm_starts(demo_model_path: Path, sizes: dict[str, int]) -> None:
    """Heads cannot be divided by three, and stages need compiled code on a CPU."""
    with pytest.raises(ValueError, match="parallel_size"), both_engines(demo_model_path, **sizes):
        pass


YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kv_cache_dtype": "fp8", "quantization": "fp8"}, {"kv_cache_dtype": "fp8", "quantization": "fp8"}),
    ({"hf_overrides": YARN}, {"hf_overrides": YARN}),
    ({"seed": "7", "cpu_offload_gb": 2}, {"seed": 7, "cpu_offload_gb": 2.0}),
    ({"trust_remote_code": False, "async_scheduling": True}, {"trust_remote_code": False, "async_scheduling": True}),
    ({"lora_target_modules": ["q_proj", "v_proj"]}, {"lora_target_modules": ["q_proj", "v_proj"]}),
    ({"max_num_active_seqs": None}, {}),
]
NOT_TAKEN: list[tuple[dict[str, Any], str]] = [
    ({"kv_cache_dtype": "fp7"}, "--kv-cache-dtype: invalid choice: 'fp7'"),
    ({"cpu_offload_gb": "much"}, "invalid float value: 'much'"),
    ({"kv_cache_dtyp": "fp8"}, "engine_args.kv_cache_dtyp: vLLM has no such argument; did you mean kv_cache_dtype?"),
    ({"seed": True}, "--seed: expected one argument"),
    ({"compilation_config": {"moode": 3}}, "moode"),
]


@pytest.mark.parametrize(("given", "found"), TAKEN)
def test_values_are_typed_as_vllm_types_them(given: dict[str, Any], found: dict[str, Any]) -> None:
    assert parsed_engine_args(given) == found
    assert refused_engine_args(given) == []


@pytest.mark.parametrize(("given", "told"), NOT_TAKEN)
def test_arguments_that_vllm_refuses_are_reported_in_its_words(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match="engine_args") as refused:
        parsed_engine_args(given)
    assert told in str(refused.value)


def test_refused_arguments_exist_in_vllm() -> None:
    """No name of the table is misspelt, and all arguments that warmpath itself sets are refused."""
    names = {field.name for field in fields(AsyncEngineArgs)}
    assert REFUSED.keys() - AppConfig.model_fields.keys() <= names
    assert {name for name in names if name.startswith("data_parallel")} <= REFUSED.keys()
