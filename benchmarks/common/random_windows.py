"""A tiny model with random weights whose layers have a window, but for each fourth: the shape of Gemma 3."""

from pathlib import Path

PATTERN = ("sliding_attention",) * 3 + ("full_attention",)


def make_windowed(directory: Path, vocab_size: int, window: int, tokenizer: Path) -> Path:
    """Write a checkpoint with a window of so many tokens to ``directory``, with another's tokenizer; return that."""
    # Imported here: they take seconds.
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=len(PATTERN),
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=window, layer_types=list(PATTERN),
        max_position_embeddings=4096,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    for file in tokenizer.glob("tokenizer*"):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory
