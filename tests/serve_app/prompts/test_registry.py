"""Public prompts: bounded, found by reference, recognised in any prompt, changed under a lock, and counted."""

import asyncio
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from router.protocol.samples import TIME_CELLS_S
from serve_app.checkpoints.sources import resolve_model
from serve_app.config.app import AppConfig
from serve_app.config.prompts import MAX_PROMPT_BYTES, PublicPromptConfig
from serve_app.errors import InvalidRequest
from serve_app.prompts.lock import COPIES, LOCK, Prompt, PromptDirectory, PromptError
from serve_app.prompts.registry import (
    MAX_FIGURES,
    STATE,
    Cutover,
    Cutovers,
    PromptNotFound,
    Prompts,
    PromptTraffic,
    Use,
    VersionCounts,
    merged,
    read_cutovers,
    version_samples,
    write_cutovers,
)
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
    tokenizer.pretrained.chat_template = "It is the 22nd. " + tokenizer.pretrained.chat_template
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


CHANGES = st.lists(st.tuples(st.sampled_from(["clerk", "pilot"]), st.sampled_from(["1", "2", "3", ""])), max_size=12)
"""A name and the version that it shall stand for; "": the previous one."""


@given(changes=CHANGES)
def test_every_state_is_kept_and_names_no_version_twice(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, str]]
) -> None:
    """Reading returns the written state; a later state is newer; a roll-back without a previous version is refused."""
    directory, state = tmp_path_factory.mktemp("state"), Cutovers()
    for name, version in changes:
        before = state.names.get(name)
        if not version and (before is None or not before.previous):
            with pytest.raises(InvalidRequest):
                state.rolled_back(name)
            continue
        after = state.promoted(name, version) if version else state.rolled_back(name)
        assert after.newer_than(state) and not state.newer_than(after)
        state, cutover = after, after.names[name]
        assert cutover.promoted == (version or (before and before.previous))
        # A roll-back goes back once; promoting a version again keeps the previous one.
        kept = before.previous if before and before.promoted == version else before.promoted if before else ""
        assert cutover.previous == (kept if version else "")
        assert cutover.promoted != cutover.previous and len(state.refs(name)) == 1 + (cutover.previous != "")
        one, other = state.promoted(name, "8"), state.promoted(name, "9")
        assert one.newer_than(other) != other.newer_than(one), "one of two concurrent changes counts everywhere"
    write_cutovers(directory, state)
    assert read_cutovers(directory) == state


PERCENTS = st.floats(0, 100)
KEYS = st.tuples(st.text(max_size=12), st.text(max_size=40))
"""A tenant, and what stays the same in one of its conversations."""


def in_part(percent: float) -> Cutovers:
    return Cutovers().promoted("clerk", "1").cut_over("clerk", "2", percent)


@given(KEYS, PERCENTS.filter(bool), PERCENTS)
def test_a_conversation_stays_on_its_side_and_never_moves_back(key: tuple[str, str], one: float, more: float) -> None:
    """The same key gets the same version at each ingress, after restarts; a higher share moves some, and none back."""
    few, many = (in_part(percent) for percent in sorted((one, max(one, more))))
    versions = [state.version("clerk", *key) for state in (few, in_part(min(one, max(one, more))), many)]
    assert versions[0] == versions[1] and (versions[0] == "1" or versions[2] == "2")
    assert in_part(100).version("clerk", *key) == "2", "all"
    assert many.rolled_back("clerk").version("clerk", *key) == "1", "all are back"
    assert Cutovers().version("clerk", *key) == ""


@pytest.mark.parametrize("percent", [5, 20, 50, 99])
@pytest.mark.parametrize("form", ["session-{}", "{}", "user {}@example.com", "{:032x}"])
def test_the_share_of_conversations_is_the_one_asked_for(percent: int, form: str) -> None:
    """Within four standard deviations, whatever the keys look like, and for each tenant."""
    count, state = 4000, in_part(percent)
    for tenant in ("", "acme"):
        moved = sum(state.version("clerk", tenant, form.format(at)) == "2" for at in range(count))
        part = percent / 100
        assert abs(moved - count * part) <= 4 * (count * part * (1 - part)) ** 0.5


def test_each_version_is_tried_by_others_first() -> None:
    """Who gets one new version first is not who gets the next one first, and no tenant decides for another."""
    keys = [str(at) for at in range(400)]
    states = [Cutovers().promoted("clerk", "1").cut_over("clerk", version, 50) for version in "23"]
    sides = [
        [state.version("clerk", "acme", key) == version for key in keys]
        for state, version in zip(states, "23", strict=True)
    ]
    both = sum(one and other for one, other in zip(*sides, strict=True))
    assert 60 < both < 140
    others = [states[0].version("clerk", "globex", key) == "2" for key in keys]
    assert 60 < sum(one and other for one, other in zip(sides[0], others, strict=True)) < 140


def test_a_cut_over_in_part_begins_and_ends() -> None:
    """It needs another version to begin with; a promotion, of any version, and a roll-back end it."""
    part = in_part(20)
    assert part.refs("clerk") == ["clerk@1", "clerk@2"]
    with pytest.raises(PromptError, match="clerk@2 is in use"):
        part.check({"clerk@1"})
    assert part.cut_over("clerk", "2", 100).names["clerk"] == Cutover("2", "1")
    assert part.promoted("clerk", "3").names["clerk"] == Cutover("3", "1")
    assert part.rolled_back("clerk").names["clerk"] == Cutover("1")
    assert part.cut_over("clerk", "3", 5).names["clerk"] == Cutover("1", "", "3", 5)
    for state, version in ((Cutovers(), "1"), (part, "1")):
        with pytest.raises(InvalidRequest, match="promote the one to begin with"):
            state.cut_over("clerk", version, 20)


def test_an_old_state_with_a_canary_stands_for_the_promoted_version(tmp_path: Path) -> None:
    (tmp_path / STATE).write_text('{"serial":3,"by":"x","names":{"clerk":{"promoted":"1","canary":"2","percent":5}}}')
    assert read_cutovers(tmp_path).names == {"clerk": Cutover("1")}


@pytest.mark.parametrize("raw", ["", "[]", '{"names": {"clerk": {}}}', '{"serial": "x"}', '{"names": {"a": 1}}'])
def test_a_state_that_is_none_is_refused(tmp_path: Path, raw: str) -> None:
    assert read_cutovers(tmp_path) == Cutovers()
    (tmp_path / STATE).write_text(raw)
    with pytest.raises(PromptError, match=STATE):
        read_cutovers(tmp_path)


def test_a_version_in_use_must_be_there() -> None:
    state = Cutovers().promoted("clerk", "1").promoted("clerk", "2")
    state.check({"clerk@1", "clerk@2"})
    with pytest.raises(PromptError, match="clerk@1 is in use"):
        state.check({"clerk@2"})


WORDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,9}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60)


def digest(raw: bytes) -> str:
    return f"sha256:{sha256(raw).hexdigest()}"


@given(prompts=st.dictionaries(st.tuples(WORDS, WORDS), TEXTS, min_size=1, max_size=6), tenants=st.data())
def test_locked_texts_are_read_unchanged(
    tmp_path_factory: pytest.TempPathFactory, prompts: dict[tuple[str, str], str], tenants: st.DataObject
) -> None:
    """Texts are arbitrary, versions may look like numbers or dates, prompts may be public; no problem is found."""
    shelf = PromptDirectory(tmp_path_factory.mktemp("any") / "prompts")
    source = tmp_path_factory.mktemp("source") / "text"
    owners = {name: tenants.draw(st.none() | WORDS) for name, _ in prompts}
    for (name, version), text in prompts.items():
        source.write_bytes(text.encode())
        shelf.add(f"{name}@{version}", source, owners[name])
    read = {(each.name, each.version): each for each in shelf.read()}
    assert {key: each.text for key, each in read.items()} == prompts
    assert all(each.tenant == owners[name] for (name, _), each in read.items())
    assert all(each.digest == digest(each.text.encode()) for each in read.values())
    assert shelf.problems() == []


@pytest.fixture
def shelf(tmp_path: Path) -> PromptDirectory:
    (tmp_path / "clerk").mkdir()
    (tmp_path / "clerk/1.txt").write_bytes(b"You are the clerk.\r\n")
    shelf = PromptDirectory(tmp_path)
    shelf.add("clerk@1", None, None)
    return shelf


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (b"You are the clerk.\n", r"first differing byte is 18: '\\r\\n' was locked, '\\n' is there"),
        (b"You are the clerk.\r\n ", "first differing byte is 20: the end was locked, ' ' is there"),
        (b"You", r"first differing byte is 3: ' are the clerk.*' was locked, the end is there"),
    ],
)
def test_a_changed_file_is_refused_with_both_digests(
    shelf: PromptDirectory, tmp_path: Path, now: bytes, said: str
) -> None:
    locked = digest(b"You are the clerk.\r\n")
    (tmp_path / "clerk/1.txt").write_bytes(now)
    with pytest.raises(PromptError, match=said) as caught:
        shelf.read()
    assert digest(now) in str(caught.value) and locked in str(caught.value)
    assert shelf.problems() == [str(caught.value)]
    (tmp_path / COPIES / locked.removeprefix("sha256:")).write_bytes(b"also changed")
    with pytest.raises(PromptError, match=r"cannot be told: .* was changed, too"):
        shelf.read()
    (tmp_path / COPIES / locked.removeprefix("sha256:")).unlink()
    with pytest.raises(PromptError, match="cannot be told: there is no copy"):
        shelf.read()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_bytes(b"You are a clerk.")
    return tmp_path / "source"


def test_a_version_never_changes(shelf: PromptDirectory, tmp_path: Path, source: Path) -> None:
    """Other bytes need another version; adding the same bytes again changes nothing, and repairs a changed file."""
    before = (tmp_path / LOCK).read_bytes()
    with pytest.raises(PromptError, match=r"first differing byte is 8.*Lock it as a new version"):
        shelf.add("clerk@1", source, None)
    (tmp_path / "clerk/1.txt").write_bytes(b"spoilt")
    source.write_bytes(b"You are the clerk.\r\n")
    shelf.add("clerk@1", source, None)
    assert [each.text for each in shelf.read()] == ["You are the clerk.\r\n"]
    assert (tmp_path / LOCK).read_bytes() == before


def test_all_versions_of_a_name_are_one_tenants(shelf: PromptDirectory, source: Path) -> None:
    """A public name does not become private with its next version, nor the other way round."""
    with pytest.raises(PromptError, match="clerk is public"):
        shelf.add("clerk@2", source, "acme")
    assert shelf.add("pilot@1", source, "acme").tenant == shelf.add("pilot@2", source, None).tenant == "acme"
    with pytest.raises(PromptError, match="pilot is the tenant acme's"):
        shelf.add("pilot@3", source, "globex")


@pytest.mark.parametrize("ref", ["clerk", "clerk@", "@1", "../x@1", "clerk@../1", ".locked@1", "a@b@c", "a/b@1"])
def test_no_name_leads_out_of_the_directory(shelf: PromptDirectory, source: Path, ref: str) -> None:
    with pytest.raises(PromptError, match="NAME@VERSION"):
        shelf.add(ref, source, None)


@pytest.mark.parametrize(
    "lock",
    ["[]", "clerk: 1", "clerk: {versions: {'1': sha256:00}}", "x: {versions: [1]}", "../a: {versions: {'1': x}}",
     "clerk: {versions: {1: 'sha256:" + "0" * 64 + "'}}", "{", "a: {}"],
)  # fmt: skip
def test_a_lock_that_is_none_is_refused(tmp_path: Path, lock: str) -> None:
    (tmp_path / LOCK).write_text(lock)
    with pytest.raises(PromptError, match=LOCK):
        PromptDirectory(tmp_path).read()


def test_an_unlocked_file_is_a_problem_but_is_not_served(shelf: PromptDirectory, tmp_path: Path) -> None:
    (tmp_path / "clerk/2.txt").write_text("You are the new clerk.")
    assert [prompt.ref for prompt in shelf.read()] == ["clerk@1"]
    (problem,) = shelf.problems()
    assert "clerk@2" in problem and "warmpath prompts add clerk@2" in problem


USE = Use("acme", "demo", None, None, chat=True)


def test_cold_requests_are_counted_over_all_ingresses() -> None:
    """A request is warm if all of the prompt was cached."""
    parts = [PromptTraffic({"clerk@1": 64}.__getitem__) for _ in range(2)]
    for traffic in parts:
        for cached_tokens in (48, 64, 80):
            traffic.add("clerk@1", 100, cached_tokens, 0.01 if cached_tokens < 80 else 0.1)
    total = merged(traffic.report()[0] for traffic in parts)["clerk@1"].to_json()
    assert (total["requests"], total["cold_requests"], total["hit_rate"]) == (6, 2, 0.64)
    assert total["ttft_p50_s"] == pytest.approx(0.01, rel=0.07) and total["ttft_p95_s"] == pytest.approx(0.1, rel=0.07)
    assert parts[0].report()[0]["clerk@1"].requests == 3, "merging leaves its inputs unchanged"
    parts[0].correct("clerk@1", 48, 64)
    corrected = parts[0].report()[0]["clerk@1"]
    assert (corrected.requests, corrected.warm_requests, corrected.cached_tokens) == (3, 3, 208)


def test_times_to_first_token_are_told_within_seven_percent() -> None:
    """Also of one request, and of one that took longer than all bounds; none before the first."""
    assert VersionCounts().to_json()["ttft_p50_s"] is None
    for ttft_s in (0.0004, 0.0123, 1.0, 77.0, 1e6):
        traffic = PromptTraffic()
        traffic.add("clerk@1", 100, 0, ttft_s)
        shown = traffic.report()[0]["clerk@1"].to_json()
        nearest = min(max(ttft_s, TIME_CELLS_S[0]), TIME_CELLS_S[-1])
        assert shown["ttft_p50_s"] == shown["ttft_p95_s"] == pytest.approx(nearest, rel=0.07)


def test_the_versions_that_are_counted_are_bounded() -> None:
    """The one used least recently goes first; each of the others has four metrics."""
    traffic = PromptTraffic()
    for number in (*range(MAX_FIGURES), 0, MAX_FIGURES):
        traffic.add(f"clerk@{number}", 100, 0, 0.1)
    report = traffic.report()[0]
    assert len(report) == MAX_FIGURES and report["clerk@0"].requests == 2 and "clerk@1" not in report
    assert len(list(version_samples(report))) == 4 * MAX_FIGURES


def test_uses_are_distinguished_if_their_kv_differs() -> None:
    """Tenants and salts share a public prompt's KV, and no other; the latest uses are kept."""
    traffic = PromptTraffic()
    others = [USE._replace(tenant="globex", cache_salt="s"), USE._replace(chat=False), USE._replace(lora_name="pirate")]
    for use in (USE, *others):
        traffic.add_use("clerk@1", use, public=True)
        traffic.add_use("pilot@1", use, public=False)
    uses = traffic.report()[1]
    assert uses["clerk"] == others
    assert uses["pilot"] == [USE, *others]
    for number in range(1000):
        traffic.add_use("pilot@1", USE._replace(cache_salt=str(number)), public=False)
    assert 1 < len(traffic.report()[1]["pilot"]) < 100
