"""What a request asks to be saved: the formatted system prompt's tokens, as far as the request has them too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.block_hash import system_prompt_key
from serve_app.api.generate import GenerateRequest
from serve_app.checkpoint import load_checkpoint_info, resolve_model
from serve_app.dispatch import Generation
from serve_app.prepare import Preparer
from serve_app.tenancy import Tenant, Tenants
from serve_app.tokenizer import PromptTokenizer

SECRET = b"s" * 32
RULES = "You are a careful clerk. Name the clause, the date and the amount before any advice. " * 3


@pytest.fixture(scope="module")
def model_path() -> Path:
    return resolve_model("demo")


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> PromptTokenizer:
    return PromptTokenizer(model_path)


@pytest.fixture(scope="module")
def preparer(model_path: Path, tokenizer: PromptTokenizer) -> Preparer:
    return Preparer(
        load_checkpoint_info(model_path), tokenizer, Tenants([], SECRET), SECRET,
        model_name="demo", max_model_len=4096, default_max_tokens=8, save_ttl_s=300.0,
    )  # fmt: skip


def prepare(preparer: Preparer, *messages: tuple[str, str], **more: Any) -> Generation:
    chat = GenerateRequest(
        kind="chat",
        model="demo",
        messages=tuple({"role": role, "content": content} for role, content in messages),
        **{"save_system_prompt_kv_cache": True, **more},
    )
    return asyncio.run(preparer.prepare(chat, Tenant("default"), "id"))[0]


def test_the_formatted_system_prompt_is_saved(preparer: Preparer, tokenizer: PromptTokenizer) -> None:
    """Its tokens under the chat template are a prefix of the request's; the key is of its text, in the scope."""
    generation = prepare(preparer, ("system", RULES), ("user", "Hi"))
    text = tokenizer.render_chat([{"role": "system", "content": RULES}], add_generation_prompt=False).text
    assert generation.save is not None
    assert generation.save.tokens == len(tokenizer.encode(text, generation.root).token_ids) > 16
    assert generation.save.key == system_prompt_key(generation.root, text)
    assert generation.save.ttl_s == 300.0


def test_equal_system_prompts_have_one_key_and_salts_have_others(preparer: Preparer) -> None:
    one = prepare(preparer, ("system", RULES), ("user", "Hi")).save
    two = prepare(preparer, ("system", RULES), ("user", "Something else")).save
    salted = prepare(preparer, ("system", RULES), ("user", "Hi"), cache_salt="x").save
    assert one == two
    assert one is not None
    assert salted is not None
    assert salted.key != one.key


def test_nothing_is_saved_without_the_flag_or_a_system_prompt(preparer: Preparer) -> None:
    """Both are no-ops, not errors."""
    assert prepare(preparer, ("user", "Hi")).save is None
    assert prepare(preparer, ("user", "Hi"), apply_chat_template=False).save is None
    assert prepare(preparer, ("system", ""), ("user", "Hi"), apply_chat_template=False).save is None
    assert prepare(preparer, ("system", RULES), ("user", "Hi"), save_system_prompt_kv_cache=False).save is None


def test_a_system_prompt_whose_last_token_merges_is_saved_without_it(
    preparer: Preparer, tokenizer: PromptTokenizer
) -> None:
    """Raw text that ends inside a word: the request's ids go another way from there, and only what is common counts."""
    root = bytes(16)
    cut = next(
        end
        for end in range(len(RULES) - 1, 40, -1)
        if not _is_prefix(tokenizer.encode(RULES[:end], root).token_ids, tokenizer.encode(RULES, root).token_ids)
    )
    generation = prepare(preparer, ("system", RULES[:cut]), ("user", RULES[cut:]), apply_chat_template=False)
    alone = tokenizer.encode(RULES[:cut], generation.root, add_special_tokens=True).token_ids
    assert generation.save is not None
    assert 0 < generation.save.tokens < len(alone)
    assert np.array_equal(alone[: generation.save.tokens], generation.token_ids[: generation.save.tokens])
    assert alone[generation.save.tokens] != generation.token_ids[generation.save.tokens]


def _is_prefix(part: np.ndarray, whole: np.ndarray) -> bool:
    return np.array_equal(part, whole[: len(part)])
