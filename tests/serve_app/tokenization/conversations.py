"""Prompts as a chat template writes them."""

from __future__ import annotations


def conversation(turns: int, chars: int) -> str:
    """Return chat turns of so many characters each, of which no two are the same."""
    turn = "".join(chr(97 + i * i % 26) + " " * (i % 5 == 0) for i in range(chars))
    return "".join(f"<|im_start|>user\n{turn} {i}<|im_end|>\n" for i in range(turns))
