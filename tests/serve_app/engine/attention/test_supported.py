"""Models whose attention this engine would get wrong are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, MistralConfig, Qwen3Config

from serve_app.engine.attention.supported import UnsupportedModel, refuse_unsupported


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MistralConfig(sliding_window=4096), "sliding_window"),
        (Qwen3Config(num_hidden_layers=4, use_sliding_window=True, sliding_window=64, max_window_layers=2), "sliding"),
        (SimpleNamespace(model_type="g", layer_types=None, attn_logit_softcapping=50.0), "soft-capped"),
        (GptOssConfig(num_hidden_layers=2), "sliding"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "rope_type=dynamic"),
    ],
)
def test_models_this_engine_would_get_wrong_are_refused(config: object, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        refuse_unsupported(config)


def test_sinks_are_refused_by_their_parameters_and_plain_models_pass() -> None:
    model = torch.nn.Module()
    model.register_parameter("sinks", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(UnsupportedModel, match="sinks"):
        refuse_unsupported(LlamaConfig(), model)
    for config in (LlamaConfig(), Qwen3Config(), MistralConfig(sliding_window=None)):
        refuse_unsupported(config)
