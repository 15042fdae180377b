"""OpenAI's explicit prompt caching, by its own client: marks in chats and responses, their lifetimes, and usage."""

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.serve_app.ingress.scripted import Script

RULES = "You are a careful clerk. Name the clause, the date and the amount before any advice. " * 4
MORE = "Answer in one sentence, and cite the page. " * 4
BLOCK = 16


def part(text: str, kind: str = "text", **mark: Any) -> dict[str, Any]:
    marked = {"prompt_cache_breakpoint": {"mode": "explicit", **mark}} if mark.pop("marked", True) else {}
    return {"type": kind, "text": text, **marked}


def chat(client: OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", max_tokens=5, messages=messages, extra_body=fields)


def respond(client: OpenAI, items: list[Any], **fields: Any) -> Any:
    return client.responses.create(model="demo", max_output_tokens=16, input=items, extra_body=fields)


def test_marks_keep_equal_prefixes_in_chats_and_responses(client: OpenAI, script: Script) -> None:
    """Each to the block; the second part of a message with the first, and the longer lifetime where it says one."""
    script.text = "Yes."
    chat(client, [
        {"role": "system", "content": [part(RULES, ttl="12h")]},
        {"role": "user", "content": [part(RULES), part(MORE), part("And?", marked=False)]},
    ])  # fmt: skip
    of_chat, prompt = script.asked[-1].saves, script.prompt()
    assert [save.ttl_s for save in of_chat] == [43200.0, 1800.0, 1800.0]
    ids, size = script.asked[-1].token_ids.tolist(), [save.tokens for save in of_chat]
    assert size == sorted(size) and not any(tokens % BLOCK for tokens in size)
    text = script.tokenizer.decode
    assert text(ids[: size[0] + BLOCK]).count("before any advice") == 4
    assert text(ids[: size[1] + BLOCK]).count("before any advice") == 8 and "cite" not in text(ids[: size[1]])
    assert text(ids[: size[2] + BLOCK]).count("cite the page") == 4 and "And?" not in text(ids[: size[2]])
    respond(client, [
        {"role": "developer", "content": [part(RULES, "input_text", ttl="12h")]},
        {"role": "user", "content": [part(RULES, "input_text"), part(MORE, "input_text"),
                                     part("And?", "input_text", marked=False)]},
    ])  # fmt: skip
    assert (script.asked[-1].saves, script.prompt()) == (of_chat, prompt)
    respond(client, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."},
                     {"role": "user", "content": [part(RULES, "input_text")]}], instructions=RULES)  # fmt: skip
    (save,) = script.asked[-1].saves
    assert text(script.asked[-1].token_ids.tolist()[: save.tokens + BLOCK]).count("before any advice") == 8


def test_a_mark_in_a_part_that_becomes_text_counts(client: OpenAI, script: Script) -> None:
    """And one that is no part's is an unread field, which the answer names."""
    script.text = "Yes."
    source = {"type": "text", "media_type": "text/plain", "data": RULES}
    other = {"type": "document", "source": source, "prompt_cache_breakpoint": {"mode": "explicit"}}
    chat(client, [{"role": "user", "content": [other, part("And?", marked=False)]}])
    assert len(script.asked[-1].saves) == 1
    marked = {"role": "user", "content": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    for ask in (chat, respond):
        ask(client, [marked])
        assert script.asked[-1].saves == ()
    raw = client.with_raw_response.chat.completions.create(model="demo", messages=[marked])  # type: ignore[list-item]
    assert "messages[].prompt_cache_breakpoint" in raw.headers["x-warmpath-warning"]
    raw = client.with_raw_response.responses.create(model="demo", input=[marked])  # type: ignore[list-item]
    assert "input[].prompt_cache_breakpoint" in raw.headers["x-warmpath-warning"]


def test_four_marks_are_kept_the_latest(client: OpenAI, script: Script) -> None:
    script.text = "Yes."
    turns = [{"role": "user", "content": [part(f"{number}: {RULES}")]} for number in range(6)]
    chat(client, turns)
    saves = script.asked[-1].saves
    assert len(saves) == 4
    assert "2:" in script.tokenizer.decode(script.asked[-1].token_ids.tolist()[: saves[0].tokens])


def test_lifetimes_come_from_the_mark_then_the_options_then_the_retention(client: OpenAI, script: Script) -> None:
    script.text = "Yes."
    marked = [{"role": "user", "content": [part(RULES)]}]

    def lifetimes(messages: list[Any], **fields: Any) -> list[Any]:
        chat(client, messages, **fields)
        return [save.ttl_s for save in script.asked[-1].saves]

    assert lifetimes([{"role": "user", "content": [part(RULES, ttl="90s")]}], prompt_cache_options={"ttl": "1h"}) == [
        90
    ]
    assert lifetimes(marked, prompt_cache_options={"ttl": "1h"}) == [3600]
    assert lifetimes(marked, prompt_cache_retention="24h") == [86400]
    plain = [{"role": "system", "content": RULES}, {"role": "user", "content": RULES}]
    assert lifetimes(plain, prompt_cache_retention="24h") == [86400]
    (save,) = script.asked[-1].saves
    assert script.tokenizer.decode(script.asked[-1].token_ids.tolist()[: save.tokens]).count("before any advice") <= 4
    assert lifetimes(plain, prompt_cache_retention="in_memory") == lifetimes(plain, prompt_cache_options={}) == []


def test_explicit_without_a_mark_stores_nothing(client: OpenAI, script: Script) -> None:
    """Unless the request says otherwise; and what is written is told in both APIs."""
    script.text, explicit = "Yes.", {"prompt_cache_options": {"mode": "explicit"}}
    plain, marked = [{"role": "user", "content": RULES}], [{"role": "user", "content": [part(RULES)]}]
    for ask, usage in ((chat, "prompt_tokens_details"), (respond, "input_tokens_details")):
        items = marked if ask is chat else [{"role": "user", "content": [part(RULES, "input_text")]}]
        cases: list[tuple[Any, Any, bool]] = [
            (plain, explicit, False),
            (plain, {**explicit, "store_kv": True}, True),
            (items, explicit, True),
            (plain, {}, True),
        ]
        for messages, fields, stored in cases:
            told = getattr(ask(client, messages, **fields).usage, usage)
            assert script.asked[-1].store_kv == stored
            whole = len(script.asked[-1].token_ids) // BLOCK * BLOCK
            assert (told.cached_tokens, told.cache_write_tokens) == (16, whole - 16 if stored else 0)
    script.text = "a"
    client.completions.create(model="demo", prompt=RULES, max_tokens=2, extra_body=explicit)
    assert not script.asked[-1].store_kv


@pytest.mark.parametrize(
    ("fields", "mark", "param"),
    [
        ({}, {"mode": "implicit"}, "messages[0].content[0].prompt_cache_breakpoint"),
        ({}, {"ttl": "soon"}, "messages[0].content[0].prompt_cache_breakpoint"),
        ({}, {"ttl": "25h"}, "messages[0].content[0].prompt_cache_breakpoint"),
        ({"prompt_cache_options": {"ttl": "0m"}}, {}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"mode": "off"}}, {}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": "24h"}, {}, "prompt_cache_options"),
        ({"prompt_cache_retention": "forever"}, {}, "prompt_cache_retention"),
    ],
)
def test_other_forms_are_refused(fields: Any, mark: Any, param: str, client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as refused:
        chat(client, [{"role": "user", "content": [part(RULES, **mark)]}], **fields)
    assert refused.value.param == param
