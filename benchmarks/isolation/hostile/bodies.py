"""Bodies of attacks: as large as a body may be, each dear in a way of its own. Pure: names and sizes to bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from benchmarks.common.prompts import WORDS
from benchmarks.isolation.hostile.raw_http import CHAT, COMPLETIONS

MAX_BODY_BYTES = 8 * 1024 * 1024
"""The default of the setting ``max_body_bytes``."""

_MODEL = b'{"model":"demo","max_tokens":1,'


def tiny_messages(number: int) -> bytes:
    """As many messages of one letter as there is room for: about 280,000."""
    return _list(_MODEL + b'"messages":[', b'{"role":"user","content":"%c"}' % (97 + number % 26), b"]}")


def empty_system_messages(number: int) -> bytes:
    """The same of system messages without any content; ``number`` makes no difference."""
    return _list(_MODEL + b'"messages":[', b'{"role":"system","content":""}', b"]}")


def token_ids(number: int) -> bytes:
    """One prompt of about 4.2 million token ids."""
    return _list(_MODEL + b'"prompt":[', b"%d" % (1 + number % 9), b"]}")


def long_text(number: int) -> bytes:
    """One message of so much prose, other prose for each number."""
    generator = random.Random(number)
    head = _MODEL + b'"messages":[{"role":"user","content":"%08d ' % number
    paragraph = " ".join(generator.choices(WORDS, k=20_000)).encode()
    room = MAX_BODY_BYTES - len(head) - 4
    return head + (paragraph * (room // len(paragraph) + 1))[:room] + b'"}]}'


def nested(number: int) -> bytes:
    """Brackets in brackets, millions deep; ``number`` makes no difference."""
    head, tail = _MODEL + b'"messages":[{"role":"user","content":', b"}]}"
    depth = (MAX_BODY_BYTES - len(head) - len(tail)) // 2
    return head + b"[" * depth + b"]" * depth + tail


KINDS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "tiny_messages": (CHAT, tiny_messages),
    "empty_system_messages": (CHAT, empty_system_messages),
    "token_ids": (COMPLETIONS, token_ids),
    "long_text": (CHAT, long_text),
    "nested": (CHAT, nested),
}
"""Kinds of 8 MB bodies: the path that takes them, and what makes one from a number."""


def short_prompts(prompts: int, max_tokens: int, number: int, prompt_ref: str = "") -> bytes:
    """Return a completion request of many prompts of a few words, others for each number."""
    generator = random.Random(number)
    texts = [f"{number} {index} {' '.join(generator.choices(WORDS, k=4))}" for index in range(prompts)]
    body = {"model": "demo", "prompt": texts, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps(body | ({"prompt_ref": prompt_ref} if prompt_ref else {})).encode()


def _list(head: bytes, item: bytes, tail: bytes) -> bytes:
    count = (MAX_BODY_BYTES - len(head) - len(tail) + 1) // (len(item) + 1)
    return head + b",".join([item] * count) + tail
