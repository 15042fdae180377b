"""Built-in demo checkpoints in Hugging Face's format, built in seconds without torch and without a network.

Qwen3-style decoders with random weights from a fixed seed, a byte-level BPE tokenizer trained on Python's own source
text, and a ChatML template with tools.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from serve_app.checkpoints.model_cache import default_cache_dir, ensure_made

RECIPE_VERSION = 2
"""Incremented whenever the same recipe produces other bytes, so that old builds are not used."""

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)

CHAT_TEMPLATE = """{%- if tools -%}
{{- '<|im_start|>system\\nFunctions, called as <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>:\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Source: the Qwen2 and Qwen3 tokenizers."""

_CORPUS_MODULES = (
    "pydoc_data.topics", "argparse", "ast", "asyncio.base_events", "asyncio.tasks", "collections", "configparser",
    "csv", "datetime", "decimal", "difflib", "doctest", "email.message", "enum", "fractions", "functools", "heapq",
    "http.client", "http.server", "inspect", "ipaddress", "json.decoder", "logging", "mailbox", "optparse", "os",
    "pathlib", "pickle", "random", "shutil", "socket", "statistics", "string", "subprocess", "tarfile", "textwrap",
    "this", "threading", "typing", "unittest.case", "urllib.parse", "zipfile",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DemoRecipe:
    """All parameters of a demo checkpoint's bytes, besides the tokenizer's training text."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    head_dim: int = 64
    max_position_embeddings: int = 32768
    seed: int = 20240229
    version: int = RECIPE_VERSION

    @property
    def size_bytes(self) -> int:
        """The size of the weights, and some more."""
        heads = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return 4 * (self.num_layers * layer + self.vocab_size * self.hidden_size) + (4 << 20)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        DemoRecipe("demo", 256, 4, 4, 2, 768, 4096),
        DemoRecipe("small", 512, 8, 8, 4, 1344, 8192),
    )
}
"""The built-in models: ``demo`` about 4 M parameters, ``small`` about 27 M; both with 32k positions."""


def ensure_demo_model(name: str, cache_dir: Path | None = None) -> Path:
    """Return the directory of a built-in model, built if missing. Raises ValueError on an unknown name."""
    if name not in RECIPES:
        raise ValueError(f"no built-in model is called {name!r}; there are: {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    corpus = list(shipped_text())
    digest = sha256(msgspec.json.encode(asdict(recipe)))
    for text in corpus:
        digest.update(text.encode())
    target = (cache_dir or default_cache_dir()) / f"{name}-{digest.hexdigest()[:16]}"
    return ensure_made(target, lambda directory: _write_checkpoint(recipe, corpus, directory), recipe.size_bytes)


def shipped_text() -> Iterator[str]:
    """Yield the sources of this Python's stdlib modules, in a fixed order."""
    for module in _CORPUS_MODULES:
        spec = importlib.util.find_spec(module)
        loader = None if spec is None else spec.loader
        source = loader.get_source(module) if loader is not None and hasattr(loader, "get_source") else None
        if source:
            yield source


def _write_checkpoint(recipe: DemoRecipe, corpus: list[str], directory: Path) -> None:
    tokenizer = _train_tokenizer(recipe, corpus)
    vocabulary = tokenizer.get_vocab()
    ids = {token: vocabulary[token] for token in SPECIAL_TOKENS}
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(directory / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, IM_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": recipe.max_position_embeddings,
    })  # fmt: skip
    _write_json(directory / "generation_config.json", {
        "eos_token_id": [ids[IM_END], ids[END_OF_TEXT]],
        "pad_token_id": ids[END_OF_TEXT],
    })  # fmt: skip
    _write_json(directory / "config.json", _model_config(recipe, ids))
    save_file(_weights(recipe, ids), directory / "model.safetensors", metadata={"format": "pt"})


def _train_tokenizer(recipe: DemoRecipe, corpus: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    if tokenizer.get_vocab_size() != recipe.vocab_size:
        raise ValueError(f"the text Python ships gave only {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def _model_config(recipe: DemoRecipe, ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": ids[IM_END],
        "pad_token_id": ids[END_OF_TEXT],
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "hidden_size": recipe.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": recipe.intermediate_size,
        "layer_types": ["full_attention"] * recipe.num_layers,
        "max_position_embeddings": recipe.max_position_embeddings,
        "num_attention_heads": recipe.num_heads,
        "num_hidden_layers": recipe.num_layers,
        "num_key_value_heads": recipe.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": recipe.vocab_size,
    }


def _weights(recipe: DemoRecipe, ids: dict[str, int]) -> dict[str, npt.NDArray[np.float32]]:
    """Return every tensor by its Hugging Face name, float32.

    With ordinary random initialisation, greedy output repeats one token forever. Small embeddings keep the tied head
    from repeating the last token, and query and key norms above 1 keep the context from averaging out. <|im_end|> is
    made likelier, so that an answer without ``max_tokens`` ends, and the other special tokens unlikely.
    """
    rng = np.random.Generator(np.random.PCG64(recipe.seed))

    def normal(rows: int, columns: int, std: float) -> npt.NDArray[np.float32]:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)

    def constant(size: int, value: float = 1.0) -> npt.NDArray[np.float32]:
        return np.full(size, value, dtype=np.float32)

    hidden, head = recipe.hidden_size, recipe.head_dim
    embeddings = normal(recipe.vocab_size, hidden, 0.05)
    embeddings[ids[IM_END]] *= np.float32(1.1)
    embeddings[ids[IM_START]] *= np.float32(0.25)
    embeddings[ids[END_OF_TEXT]] *= np.float32(0.25)
    tensors = {"model.embed_tokens.weight": embeddings, "model.norm.weight": constant(hidden)}
    std, down_std = hidden**-0.5, 2 * recipe.intermediate_size**-0.5
    for layer in range(recipe.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": constant(hidden),
            prefix + "post_attention_layernorm.weight": constant(hidden),
            prefix + "self_attn.q_norm.weight": constant(head, 2.5),
            prefix + "self_attn.k_norm.weight": constant(head, 2.5),
            prefix + "self_attn.q_proj.weight": normal(recipe.num_heads * head, hidden, std),
            prefix + "self_attn.k_proj.weight": normal(recipe.num_kv_heads * head, hidden, std),
            prefix + "self_attn.v_proj.weight": normal(recipe.num_kv_heads * head, hidden, 2 * std),
            prefix + "self_attn.o_proj.weight": normal(hidden, recipe.num_heads * head, std),
            prefix + "mlp.gate_proj.weight": normal(recipe.intermediate_size, hidden, std),
            prefix + "mlp.up_proj.weight": normal(recipe.intermediate_size, hidden, std),
            prefix + "mlp.down_proj.weight": normal(hidden, recipe.intermediate_size, down_std),
        }
    return tensors


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2) + b"\n")
