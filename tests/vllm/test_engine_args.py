"""`engine_args` by vLLM's own parser; no engine starts."""

from dataclasses import fields
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from serve_app.config.app import AppConfig
from serve_app.engine.vllm.engine_args import REFUSED, parsed_engine_args, refused_engine_args

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
