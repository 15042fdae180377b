"""Public prompts: bounded, found by reference, and recognised in any tenant's prompt."""

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
ROOT, PUBLIC_ROOT = b"r" * 16, b"p" * 16


def config(**fields: Any) -> PublicPromptConfig:
    return PublicPromptConfig.model_validate({"name": "clerk", "version": "1", **fields})


def locked(ref: str, text: str = TEXT, tenant: str | None = None) -> Prompt:
    name, _, version = ref.partition("@")
    return Prompt(name, version, text, tenant, "sha256:" + sha256(text.encode()).hexdigest())


@pytest.fixture
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer(resolve_model("demo"))


def public_blocks(tokenizer: PromptTokenizer, text: str) -> int:
    """Return the public blocks of bare text."""
    return tokenizer.encode(text, ROOT, public_root=PUBLIC_ROOT, add_special_tokens=True).public_blocks


LARGE = "x" * MAX_PROMPT_BYTES


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([{}], "text"),
        ([{"text": ""}], "0 bytes"),
        ([{"text": LARGE + "x"}], "bytes"),
        ([{"text": "\ud800"}], "surrogate"),
        ([{"text": "a", "name": "a@b"}], "pattern"),
        ([{"text": "a", "version": ""}], "pattern"),
        ([{"text": "a", "file": "b"}], "Extra"),
        ([{"text": "a"}] * 2, "clerk@1 is given twice"),
        ([{"text": "a", "version": str(i)} for i in range(257)], "too many"),
        ([{"text": LARGE, "version": str(i)} for i in range(9)], "together"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_setting_is_explained(prompts: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AppConfig.model_validate({"public_prompts": [{"name": "clerk", "version": "1", **one} for one in prompts]})


def test_references_are_exact_and_a_name_stands_for_the_promoted_version() -> None:
    """No version is guessed; the error for an unknown one names the existing ones."""
    prompts = Prompts([], [locked("clerk@1", "one"), locked("clerk@2", "two")])
    assert (prompts.find("clerk@1").text, prompts.find("clerk@2").text) == ("one", "two")
    for ref in ("@1", "clerk@", "", "@"):
        with pytest.raises(InvalidRequest, match="NAME@VERSION"):
            prompts.find(ref)
    for ref, said in (
        ("clerk@3", "known versions: clerk@1, clerk@2"),
        ("clerk", "none of it is promoted; name a version: clerk@1, clerk@2"),
        ("nobody@1", "no version of it"),
    ):
        with pytest.raises(PromptNotFound, match=said) as caught:
            prompts.find(ref)
        assert (caught.value.status, caught.value.code, caught.value.param) == (404, "prompt_not_found", "prompt_ref")
    state = Cutovers().promoted("clerk", "1")
    assert prompts.switch(state) and not prompts.switch(state)
    assert prompts.find("clerk").text == "one"
    assert prompts.find("clerk@2").text == "two", "an explicit version is returned"
    with pytest.raises(PromptError, match="clerk@3 is in use"):
        prompts.switch(state.promoted("clerk", "3"))
    assert prompts.cutovers == state


def test_a_text_that_begins_with_a_public_prompt_is_recognised(tokenizer: PromptTokenizer) -> None:
    """In a chat and as bare text, blocks wholly inside are public, but only if a public root is given."""
    chat = tokenizer.template.render([{"role": "system", "content": TEXT}, {"role": "user", "content": "Hi"}])
    before = tokenizer.encode(chat.text, ROOT, public_root=PUBLIC_ROOT)
    prompts = Prompts([config(text=TEXT)])
    prompts.install(tokenizer)
    system = tokenizer.encode(chat.system_text, ROOT)
    whole = tokenizer.encode(chat.text, ROOT, public_root=PUBLIC_ROOT)
    assert before.public_blocks == 0
    assert whole.public_blocks == len(system.token_ids) // 16 >= 2
    assert whole.block_hashes != before.block_hashes, "the result cached before the registration is not used"
    assert tokenizer.encode(chat.text, ROOT).public_blocks == 0
    assert public_blocks(tokenizer, TEXT + " More.") >= len(system.token_ids) // 16 - 1
    assert public_blocks(tokenizer, "Not " + TEXT) == 0
    assert prompts.is_public(chat.system_text) and prompts.is_public(TEXT) and not prompts.is_public(chat.text)


def test_prompts_are_formatted_anew_each_day(tokenizer: PromptTokenizer) -> None:
    """A template may write the date: then yesterday's formatted prompt is of no use."""
    now = [date(2026, 11, 21)]
    prompts = Prompts([config(text=TEXT)], today=lambda: now[0])

    def chat_blocks() -> int:
        asyncio.run(prompts.keep_current(tokenizer))
        chat = tokenizer.template.render([{"role": "system", "content": TEXT}, {"role": "user", "content": "Hi"}])
        return tokenizer.encode(chat.text, ROOT, public_root=PUBLIC_ROOT).public_blocks

    first = chat_blocks()
    tokenizer._tokenizer.chat_template = "It is the 22nd. " + tokenizer._tokenizer.chat_template
    assert chat_blocks() == 0
    now[0] = date(2026, 11, 22)
    assert chat_blocks() >= first > 0


def test_other_prompts_take_the_place_of_all_from_their_source(tokenizer: PromptTokenizer) -> None:
    """After a change of settings, removed public prompts are private from the next request on, and new ones public.

    A directory is read again as a whole; removing a version in use changes nothing.
    """
    prompts = Prompts([], [locked("pilot@1")], Cutovers().promoted("pilot", "1"))
    prompts.install(tokenizer)
    other = "You are a pirate. " * 20
    assert public_blocks(tokenizer, TEXT) > 0 == public_blocks(tokenizer, other)
    asyncio.run(prompts.replace(tokenizer, [config(text=other)]))
    assert public_blocks(tokenizer, other) > 0
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
    asyncio.run(prompts.replace(tokenizer, []))
    assert public_blocks(tokenizer, other) == 0 < public_blocks(tokenizer, TEXT)
    with pytest.raises(PromptNotFound):
        prompts.find("clerk@1")


def test_a_private_prompt_is_as_unknown_to_others_as_one_that_is_not_there(tokenizer: PromptTokenizer) -> None:
    """By version and by name, promoted or not, only the requested name differs in the error; it is never public.

    docs: prompts
    """
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
    assert public_blocks(tokenizer, TEXT) == 0
    assert prompts and not Prompts([], [locked("pilot@1", tenant="acme")]), "nothing is public"


def test_a_directory_that_was_changed_does_not_start(tmp_path: Path) -> None:
    """Only locked texts are served, also after a restart."""
    (tmp_path / "clerk").mkdir()
    (tmp_path / "clerk/1.txt").write_text("Be brief.")
    PromptDirectory(tmp_path).add("clerk@1", None, None)
    write_cutovers(tmp_path, Cutovers().promoted("clerk", "1"))
    assert Prompts.of([], tmp_path).find("clerk").text == "Be brief."
    assert Prompts.of([], None).all() == {}
    (tmp_path / "clerk/1.txt").write_text("Be Brief.")
    with pytest.raises(PromptError, match="first differing byte is 3"):
        Prompts.of([], tmp_path)
