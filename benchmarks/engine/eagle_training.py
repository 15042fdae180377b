"""EAGLE-3 heads for built-in models, in the published format: one distilled from the model, one made to agree.

Distillation reads text that Python ships and the model's own continuations, unrolls the head over its own guesses as
drafting does, and compares last states: the output layer is the model's own, and a built-in model's distributions are
nearly flat. The agreeing pair is a stand-in for a trained one and said to be one: a model whose first layer does
nearly all, and a head that is this layer. Knows nothing of engines.
`python -m benchmarks eagle_head --model demo --output head --seconds 120`
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn.functional import mse_loss
from transformers import AutoModelForCausalLM

from serve_app.checkpoints.demo_model import shipped_text
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.engine.speculative.eagle_config import EagleConfig, read_eagle_config
from serve_app.engine.speculative.eagle_head import EagleHead, load_head

WINDOW = 96
BATCH = 16
UNROLLED = 4
JUDGED_ROWS = 256
DAMPING = 0.003
EMBEDDING_SCALE = 0.1
_KEPT = (
    "head_dim", "hidden_act", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "rms_norm_eps", "rope_parameters", "vocab_size", "max_position_embeddings",
)  # fmt: skip


def main() -> None:
    """Parse flags, train, and write the head."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    agreement = distill(resolve_model(arguments.model), arguments.output, arguments.seconds)
    print(f"{arguments.output}: agrees with the model's first choice at {agreement:.1%} of the last batches' positions")


def eagle_pairs(model: Path, directory: Path, seconds: float) -> dict[str, tuple[Path, Path]]:
    """Return (model, head) by name of the pair: made to agree, distilled for that base, distilled for ``model``."""
    base, head = agreeing_pair(model, directory)
    pairs = {"eagle_agreeing": (base, head)}
    for name, teacher in (("eagle_distilled_damped", base), ("eagle_distilled", model)):
        distill(teacher, directory / name, seconds)
        pairs[name] = (teacher, directory / name)
    return pairs


def agreeing_pair(model: Path, directory: Path) -> tuple[Path, Path]:
    """Write a Llama made of ``model``'s weights whose upper layers are damped, and a head that is its first layer."""
    base = directory / "eagle_base"
    shutil.copytree(model, base)
    tensors = load_file(model / "model.safetensors")
    made = {}
    for name, tensor in tensors.items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # A Llama has no norms on queries and keys; random projections of normed input are near their size anyway.
            tensor = tensor * tensors[name.replace("_proj", "_norm")].mean()
        if layer and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor = tensor * DAMPING
        if name == "model.embed_tokens.weight":
            tensor = tensor * EMBEDDING_SCALE
        made[name] = tensor.contiguous()
    save_file(made, base / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name in _KEPT or name.endswith("_token_id")}
    kept |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
    kept |= {"num_hidden_layers": config["num_hidden_layers"], "tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(kept, indent=2))
    head = directory / "eagle_agreeing"
    write_first_layer(base, head, heeds_states=False)
    return base, head


def write_first_layer(base: Path, target: Path, *, heeds_states: bool) -> None:
    """Write the head that is the first layer of ``base`` over the tokens' embeddings.

    With ``heeds_states`` the base's states take part, each layer's as much as the others'; without, they count nothing.
    """
    tensors = load_file(base / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    first = "model.layers.0."
    made = {
        "fc.weight": torch.eye(hidden).repeat(1, 3) / 3,
        "norm.weight": tensors["model.norm.weight"],
        "midlayer.hidden_norm.weight": torch.full((hidden,), 1.0 if heeds_states else 0.0),
    }
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj"):
        made[f"midlayer.{name}.weight"] = tensors[f"{first}{name}.weight"]
    for name in ("gate_proj", "up_proj", "down_proj"):
        made[f"midlayer.mlp.{name}.weight"] = tensors[f"{first}mlp.{name}.weight"]
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = tensors[f"{first}self_attn.{name}.weight"]
        made[f"midlayer.self_attn.{name}.weight"] = torch.cat([weight, torch.zeros_like(weight)], dim=1)
    described = {name: config[name] for name in _KEPT if name in config} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": config["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers - 1],
        "norm_before_residual": True,
        "tie_word_embeddings": False,
    }
    target.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(described, indent=2))


def distill(base: Path, target: Path, seconds: float) -> float:
    """Train a head for ``base`` and write it; return how often it chose as the base did in the last batches."""
    write_first_layer(base, target, heeds_states=True)
    config = read_eagle_config(target)
    assert config is not None
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    head = load_head(config, model, torch.float32, torch.device("cpu"))
    lent = {id(weight) for weight in model.parameters()}
    for weight in model.parameters():
        weight.requires_grad_(False)
    trained = [weight for weight in head.parameters() if id(weight) not in lent]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    agreed: list[float] = []
    batches = _batches(model, base)
    started_s = time.monotonic()
    with Progress() as progress:
        task = progress.add_task("distilling", total=seconds)
        while (spent_s := time.monotonic() - started_s) < seconds:
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * max(1.0 - spent_s / seconds, 0.02)
            loss, agreement = unrolled_loss(head, model, next(batches), config)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            agreed = [*agreed[-19:], agreement]
            mean = sum(agreed) / len(agreed)
            progress.update(task, completed=spent_s, description=f"distilling: agreement {mean:.1%}")
    kept = {name: weight for name, weight in head.state_dict().items() if id(head.get_parameter(name)) not in lent}
    save_file({name: weight.detach().contiguous() for name, weight in kept.items()}, target / "model.safetensors")
    return sum(agreed) / len(agreed)


def unrolled_loss(head: EagleHead, model: Any, ids: torch.Tensor, config: EagleConfig) -> tuple[torch.Tensor, float]:
    """Return the loss of a batch [n, WINDOW] over ``UNROLLED`` guesses in a row, and how often the first was right.

    A guess at pair i attends to the pairs up to i, and to those of its own earlier guesses.
    """
    with torch.no_grad():
        found = model.get_decoder()(ids, output_hidden_states=True)
        layers = config.aux_layers(int(model.config.num_hidden_layers))
        states = torch.cat([found.hidden_states[layer] for layer in layers], dim=-1)
    rows, length = ids.shape
    count = length - UNROLLED
    state = head.fuse(states[:, :count])
    positions = torch.arange(count)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    loss = torch.zeros(())
    agreement = 0.0
    past = torch.ones(count, count, dtype=torch.bool).tril()
    for step in range(UNROLLED):
        flat = state.reshape(rows * count, -1)
        rotation = tuple(part.repeat(rows, 1) for part in head.rotation(positions + step))
        pairs, residual = head.read(ids[:, 1 + step : 1 + step + count].reshape(-1), flat)
        query = head.queries(pairs, (rotation[0], rotation[1])).view(rows, count, config.num_heads, -1)
        own = head.keys_values(pairs, (rotation[0], rotation[1]))
        for kept, made in ((keys, own[0]), (values, own[1])):
            group = config.num_heads // config.num_kv_heads
            kept.append(made.view(rows, count, config.num_kv_heads, -1).repeat_interleave(group, dim=2))
        scores = torch.einsum("nqhd,nkhd->nhqk", query, keys[0]).masked_fill(~past, float("-inf"))
        later = [torch.einsum("nqhd,nqhd->nhq", query, key)[..., None] for key in keys[1:]]
        weights = (torch.cat([scores, *later], dim=-1) * config.head_dim**-0.5).softmax(dim=-1)
        mixed = torch.einsum("nhqk,nkhd->nqhd", weights[..., :count], values[0])
        for i, value in enumerate(values[1:]):
            mixed = mixed + weights[..., count + i].transpose(1, 2)[..., None] * value
        flat = head.finish(mixed.reshape(rows * count, config.num_heads, -1), residual)
        wanted = found.last_hidden_state[:, 1 + step : 1 + step + count].reshape(rows * count, -1)
        normed = head.norm(flat)
        loss = loss + 0.8**step * mse_loss(normed, wanted)
        if not step:
            with torch.no_grad():
                ours, theirs = (head.lm_head(state[:JUDGED_ROWS]).argmax(-1) for state in (normed, wanted))
                agreement = float((ours == theirs).float().mean())
        state = flat.view(rows, count, -1)
    return loss, agreement


def _batches(model: Any, base: Path) -> Iterator[torch.Tensor]:
    """Yield batches [BATCH, WINDOW] of tokens: shipped text, and what the model says after the start of some."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    text = torch.tensor([token for part in shipped_text() for token in tokenizer.encode(part).ids])
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    while True:
        starts = torch.randint(len(text) - WINDOW, (BATCH,), generator=generator)
        windows = torch.stack([text[start : start + WINDOW] for start in starts.tolist()])
        yield windows
        prompts = windows[:, : WINDOW // 4]
        yield model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=WINDOW - prompts.shape[1],
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip


if __name__ == "__main__":
    main()
