"""Texts of an exact number of tokens, reproducible from a seed."""

import random
from functools import cache
from pathlib import Path

from serve_app.tokenization.tokenizer import PromptTokenizer

WORDS = """
the reader should answer every question about a contract with care and name its clause date party amount
before it gives advice never guess always quote source when rule changed since last year report what is known
table number value string method returns object class function error list item first second third result
""".split()


@cache
def tokenizer_of(model_path: Path) -> PromptTokenizer:
    """Return a checkpoint's tokenizer, loaded once."""
    return PromptTokenizer(model_path, cache_bytes=64 * 1024 * 1024)


@cache
def text_of(tokens: int, model_path: Path, seed: int) -> str:
    """Return prose of exactly ``tokens`` tokens, different for each seed."""
    tokenizer = tokenizer_of(model_path)
    generator = random.Random(seed)
    words = [f"Instruction {seed}:"]
    root = b"\0" * 16

    def count(text: str) -> int:
        return len(tokenizer.encode(text, root).token_ids)

    while count(" ".join(words)) < tokens:
        words.extend(generator.choices(WORDS, k=max(1, (tokens - count(" ".join(words))) // 3)))
    while count(" ".join(words)) > tokens:
        words.pop()
    text = " ".join(words)
    while count(text) < tokens:  # the removed word had several tokens: fill up with single ones
        text += " a"
    return text
