"""Public prompts: read once, bounded, found by reference, and recognised in whoever's prompt."""

from __future__ import annotations

import asyncio
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.config.app import AppConfig
from serve_app.config.prompts import MAX_PROMPT_BYTES, PublicPromptConfig
from serve_app.errors import InvalidRequest
from serve_app.prompts.cutover import Cutovers, write_cutovers
from serve_app.prompts.lock import Prompt, PromptDirectory, PromptError
from serve_app.prompts.registry import PromptNotFound, Prompts
from serve_app.tokenization.tokenizer import PromptTokenizer

TEXT = "You are the clerk of a harbour. Name the ship, the berth and the tide before any advice. " * 3


def config(**fields: Any) -> PublicPromptConfig:
    return PublicPromptConfig.model_validate({"name": "clerk", "version": "1", **fields})


def test_a_file_is_read_once_and_travels_as_text(tmp_path: Path) -> None:
    """To the last byte; what a process gets from the settings of another is the same, though the file has changed."""
    file = tmp_path / "clerk.txt"
    file.write_bytes("Grüße\r\n".encode())
    read = config(file=file)
    assert (read.text, read.file) == ("Grüße\r\n", None)
    assert read.sha256 == sha256(file.read_bytes()).hexdigest()
    app = AppConfig(public_prompts=[read])
    file.write_text("changed")
    assert AppConfig.model_validate(app.to_json()).public_prompts == [read]
    assert config(text="Grüße\r\n", sha256=f"sha256:{read.sha256.upper()}") == read


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "either text or file"),
        ({"text": "a", "file": "/nowhere"}, "either text or file"),
        ({"file": "/nowhere/at/all"}, "cannot read"),
        ({"text": ""}, "0 bytes"),
        ({"text": "x" * (MAX_PROMPT_BYTES + 1)}, "bytes"),
        ({"text": "\ud800"}, "surrogate"),
        (
            {"text": "a", "sha256": "0" * 64},
            r"ca978112ca1b\w+, and 0000",
        ),
        ({"text": "a", "name": "a@b"}, "pattern"),
        ({"text": "a", "version": ""}, "pattern"),
        ({"text": "a", "txt": "b"}, "Extra"),
    ],
)
def test_a_wrong_setting_says_what_is_wrong(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config(**fields)


def test_a_file_that_is_too_large_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * (MAX_PROMPT_BYTES + 1))
    (tmp_path / "binary").write_bytes(b"abc\xff")
    with pytest.raises(ValidationError, match="over 1048576 bytes"):
        config(file=tmp_path / "large")
    with pytest.raises(ValidationError, match="not UTF-8 at byte 3"):
        config(file=tmp_path / "binary")


def test_the_registry_is_bounded() -> None:
    """In number and in all, and every reference is one prompt's."""
    one = {"name": "a", "text": "x"}
    with pytest.raises(ValidationError, match="a@1 is given twice"):
        AppConfig.model_validate({"public_prompts": [{**one, "version": "1"}] * 2})
    with pytest.raises(ValidationError, match="too many"):
        AppConfig.model_validate({"public_prompts": [{**one, "version": str(i)} for i in range(257)]})
    large = {"name": "a", "text": "x" * MAX_PROMPT_BYTES}
    with pytest.raises(ValidationError, match="together"):
        AppConfig.model_validate({"public_prompts": [{**large, "version": str(i)} for i in range(9)]})


def test_references_are_exact() -> None:
    """No version is guessed; an unknown one names those there are."""
    prompts = Prompts([config(text="one"), config(text="two", version="2")])
    assert (prompts.find("clerk@1").text, prompts.find("clerk@2").text) == ("one", "two")
    for ref in ("@1", "clerk@", "", "@"):
        with pytest.raises(InvalidRequest, match="NAME@VERSION"):
            prompts.find(ref)
    with pytest.raises(PromptNotFound, match="known versions: clerk@1, clerk@2") as caught:
        prompts.find("clerk@3")
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "prompt_not_found", "prompt_ref")
    with pytest.raises(PromptNotFound, match="no version of it"):
        Prompts().find("nobody@1")


def test_what_begins_with_a_public_prompt_is_recognised() -> None:
    """In a chat and as bare text, as far as blocks lie wholly inside, and only where a public root is given."""
    tokenizer = PromptTokenizer(resolve_model("demo"))
    root, public_root = b"r" * 16, b"p" * 16
    chat = tokenizer.render_chat([{"role": "system", "content": TEXT}, {"role": "user", "content": "Hi"}])
    before = tokenizer.encode(chat.text, root, public_root=public_root)
    prompts = Prompts([config(text=TEXT)])
    prompts.install(tokenizer)
    system = tokenizer.encode(chat.system_text, root)
    whole = tokenizer.encode(chat.text, root, public_root=public_root)
    assert before.public_blocks == 0
    assert whole.public_blocks == len(system.token_ids) // 16 >= 2
    assert whole.block_hashes != before.block_hashes, "what was remembered before a prompt was registered is not used"
    assert tokenizer.encode(chat.text, root).public_blocks == 0
    bare = tokenizer.encode(TEXT + " More.", root, public_root=public_root, add_special_tokens=True)
    assert bare.public_blocks >= len(system.token_ids) // 16 - 1
    assert tokenizer.encode("Not " + TEXT, root, public_root=public_root).public_blocks == 0
    assert prompts.is_public(chat.system_text)
    assert prompts.is_public(TEXT)
    assert not prompts.is_public(chat.text)


def test_prompts_are_formatted_anew_each_day() -> None:
    """A template that writes the date: yesterday's formatted prompt is nobody's any more."""
    tokenizer = PromptTokenizer(resolve_model("demo"))
    now = [date(2026, 11, 21)]
    template = tokenizer._tokenizer.chat_template
    prompts = Prompts([config(text=TEXT)], today=lambda: now[0])

    def public_blocks() -> int:
        chat = tokenizer.render_chat([{"role": "system", "content": TEXT}, {"role": "user", "content": "Hi"}])
        return tokenizer.encode(chat.text, b"r" * 16, public_root=b"p" * 16).public_blocks

    asyncio.run(prompts.keep_current(tokenizer))
    first = public_blocks()
    tokenizer._tokenizer.chat_template = "It is the 22nd. " + template
    asyncio.run(prompts.keep_current(tokenizer))
    assert public_blocks() == 0
    now[0] = date(2026, 11, 22)
    asyncio.run(prompts.keep_current(tokenizer))
    assert public_blocks() >= first > 0


def test_other_prompts_take_the_place_of_all() -> None:
    """Settings change: what was public is private from the next request on, and the other way round."""
    tokenizer = PromptTokenizer(resolve_model("demo"))
    prompts = Prompts()
    prompts.install(tokenizer)

    def public_blocks(text: str) -> int:
        return tokenizer.encode(text, b"r" * 16, public_root=b"p" * 16, add_special_tokens=True).public_blocks

    assert not prompts and public_blocks(TEXT) == 0
    asyncio.run(prompts.replace(tokenizer, [config(text=TEXT)]))
    assert prompts and public_blocks(TEXT) > 0
    assert prompts.find("clerk@1").text == TEXT
    other = "You are a pirate. " * 20
    asyncio.run(prompts.replace(tokenizer, [config(text=other, version="2")]))
    assert public_blocks(TEXT) == 0 < public_blocks(other)
    with pytest.raises(PromptNotFound):
        prompts.find("clerk@1")
    asyncio.run(prompts.replace(tokenizer, []))
    assert not prompts and public_blocks(other) == 0


def locked(ref: str, text: str = TEXT, tenant: str | None = None) -> Prompt:
    name, _, version = ref.partition("@")
    return Prompt(name, version, text, tenant, "sha256:" + sha256(text.encode()).hexdigest())


def test_a_private_prompt_is_as_unknown_to_others_as_one_that_is_not_there() -> None:
    """By version and by name, promoted or not: the words differ in what was asked for alone, and it is never public.

    docs/prompts.md
    """
    tokenizer = PromptTokenizer(resolve_model("demo"))
    cutovers = Cutovers().promoted("pilot", "1")
    prompts = Prompts([config(text="one")], [locked("pilot@1", tenant="acme")], cutovers)
    prompts.install(tokenizer)
    assert prompts.find("pilot@1", "acme").text == prompts.find("pilot", "acme").text == TEXT
    for ref in ("pilot@1", "pilot", "pilot@2"):
        said = []
        for name in ("pilot", "other"):
            with pytest.raises(PromptNotFound) as caught:
                prompts.find(ref.replace("pilot", name), "globex")
            said.append(caught.value.message.replace(name, ""))
        assert said[0] == said[1]
    assert tokenizer.encode(TEXT, b"r" * 16, public_root=b"p" * 16, add_special_tokens=True).public_blocks == 0
    assert not Prompts([], [locked("pilot@1", tenant="acme")]), "nothing is public"


def test_a_name_means_what_is_promoted() -> None:
    """And nothing before."""
    prompts = Prompts([], [locked("clerk@1", "one"), locked("clerk@2", "two")])
    with pytest.raises(PromptNotFound, match="none of it is promoted; name a version: clerk@1, clerk@2"):
        prompts.find("clerk")
    state = Cutovers().promoted("clerk", "1")
    assert prompts.switch(state) and not prompts.switch(state)
    assert prompts.find("clerk").text == "one"
    assert prompts.find("clerk@2").text == "two", "who names a version gets it"
    with pytest.raises(PromptError, match="clerk@3 is in use"):
        prompts.switch(state.promoted("clerk", "3"))
    assert prompts.cutovers == state


def test_a_directory_is_read_again_as_a_whole() -> None:
    """A new version is there with the next request; what takes away a version in use changes nothing."""
    tokenizer = PromptTokenizer(resolve_model("demo"))
    prompts = Prompts([config(text="one")], [locked("pilot@1")], Cutovers().promoted("pilot", "1"))
    prompts.install(tokenizer)
    asyncio.run(prompts.replace(tokenizer, locked=[locked("pilot@1"), locked("pilot@2", TEXT + "More.")]))
    assert prompts.find("pilot@2").text == TEXT + "More."
    assert prompts.tokens("pilot@2") > prompts.tokens("pilot@1") >= 32
    assert prompts.least_tokens("pilot@1", 16) == (prompts.tokens("pilot@1") // 16 - 1) * 16
    for refused, said in (
        ([locked("pilot@2")], "pilot@1 is in use"), ([locked("pilot@1"), locked("clerk@1")], "clerk@1 is in public"),
    ):  # fmt: skip
        with pytest.raises(PromptError, match=said):
            asyncio.run(prompts.replace(tokenizer, locked=refused))
    assert set(prompts.all()) == {"clerk@1", "pilot@1", "pilot@2"}


def test_a_directory_that_was_changed_does_not_start(tmp_path: Path) -> None:
    """What is served is what was locked, also after a restart."""
    (tmp_path / "clerk").mkdir()
    (tmp_path / "clerk/1.txt").write_text("Be brief.")
    PromptDirectory(tmp_path).add("clerk@1", None, None)
    write_cutovers(tmp_path, Cutovers().promoted("clerk", "1"))
    assert Prompts.of([], tmp_path).find("clerk").text == "Be brief."
    assert Prompts.of([], None).all() == {}
    (tmp_path / "clerk/1.txt").write_text("Be Brief.")
    with pytest.raises(PromptError, match="first differing byte is 3"):
        Prompts.of([], tmp_path)
