"""What makes a head's files unfit is said before or at loading, with both sides' names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_app.engine.core.build import build_engine
from serve_app.engine.settings import EngineSettings
from serve_app.engine.speculative.eagle_config import EagleConfig, read_eagle_config
from tests.serve_app.engine.speculative.heads import AUX, save_base, save_head
from tests.serve_app.engine.tiny import VOCAB


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("eagle_base"))


def load(base: Path, head: Path) -> None:
    settings = EngineSettings(num_blocks=8, dtype="float32", speculative_model=str(head), num_speculative_tokens=2)
    build_engine(base, settings, lambda _: None)


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "shape": (
        {"tensors": {"fc.weight": torch.zeros(64, 128)}},
        r"fc.weight: .*\[64, 128\].*\[64, 192\]",
    ),
    "missing": ({"tensors": {"midlayer.mlp.up_proj.weight": None}}, r"lacks midlayer.mlp.up_proj.weight"),
    "two layers": ({"tensors": {"layers.1.mlp.up_proj.weight": torch.zeros(1)}}, "layers.1.mlp.*one decoder layer"),
    "no d2t": ({"draft_vocab": 100, "tensors": {"d2t": None}}, f"100 draft tokens for {VOCAB} and no d2t"),
    "d2t": ({"draft_vocab": 100, "tensors": {"d2t": torch.full((100,), 150)}}, "d2t .* does not name 100"),
    "few d2t": ({"tensors": {"d2t": torch.zeros(5, dtype=torch.long)}}, "d2t .* has 5 entries"),
    "lm_head": (
        {"draft_vocab": 100, "tensors": {"lm_head.weight": None}},
        r"no lm_head.weight and needs .*\[100, 64\]",
    ),
    "two ids": ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "must be a list of 3 layers"),
    "size": ({"intermediate_size": "wide"}, "must name intermediate_size"),
    "EAGLE-1": ({"eagle_config": {"use_aux_hidden_state": False}}, "only EAGLE-3"),
    "fc norm": ({"norm_before_fc": True}, "norm_before_fc"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_an_unfit_head_is_refused_with_the_reason(what: str, base: Path, tmp_path: Path) -> None:
    how, reason = UNFIT[what]
    head = save_head(base, tmp_path / "head", **how)
    with pytest.raises(ValueError, match=reason) as refused:
        load(base, head)
    assert str(head) in str(refused.value)


def test_a_head_of_another_model_is_refused_before_it_is_loaded(base: Path, tmp_path: Path) -> None:
    """With both names; a base may keep its sizes in ``text_config``."""
    values = json.loads((base / "config.json").read_text())
    for changes, reason in (
        ({"hidden_size": 128, "head_dim": 16}, "hidden_size 128, and .* has 64"),
        ({"vocab_size": 300}, f"vocab_size 300, and .* has {VOCAB}"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, "names layers 0, 1, 4"),
    ):
        head = read_eagle_config(save_head(base, tmp_path / "head", **changes))
        assert head is not None
        for config in (values, {"text_config": values}):
            with pytest.raises(ValueError, match=reason) as refused:
                head.check_fits(base, config)
            assert str(head.path) in str(refused.value)


def test_a_directory_without_weights_is_refused(base: Path, tmp_path: Path) -> None:
    head = save_head(base, tmp_path / "head")
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(OSError, match="convert the head to safetensors"):
        load(base, head)


def test_embeddings_and_output_layer_come_from_the_base_where_the_files_have_none(base: Path, tmp_path: Path) -> None:
    load(base, save_head(base, tmp_path / "lent", tensors={"lm_head.weight": None, "t2d": None, "d2t": None}))
    load(base, save_head(base, tmp_path / "own", tensors={"embed_tokens.weight": torch.ones(VOCAB, 64)}))


def test_which_layers_are_read(base: Path, tmp_path: Path) -> None:
    """Named at the top, or as the layers after which states are taken, or by the published default."""
    name = "eagle_aux_hidden_state_layer_ids"

    def read(**config: Any) -> EagleConfig:
        found = read_eagle_config(save_head(base, tmp_path, **config))
        assert found is not None
        return found

    assert read().aux_layers(3) == AUX
    assert read(**{name: None, "eagle_config": {name: [0, 1, 2]}}).aux_layers(3) == (1, 2, 3)
    default = read(**{name: None})
    assert default.aux_layers(32) == (2, 16, 29)
    with pytest.raises(ValueError, match="leaves out eagle_aux_hidden_state_layer_ids"):
        default.aux_layers(2)


def test_other_models_and_other_names_for_heads(base: Path, tmp_path: Path) -> None:
    assert read_eagle_config(base) is None
    assert read_eagle_config(tmp_path) is None
    head = save_head(base, tmp_path / "head", architectures=["Eagle3LlamaForCausalLM"])
    assert read_eagle_config(head) is not None
    (head / "config.json").write_text(json.dumps([1]))
    assert read_eagle_config(head) is None
