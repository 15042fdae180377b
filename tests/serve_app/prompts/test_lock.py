"""A directory of prompts: locked texts are read to the byte, and a changed one is refused."""

from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.prompts.lock import LOCK, PromptDirectory, PromptError

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


def test_a_changed_file_is_refused_with_both_digests(shelf: PromptDirectory, tmp_path: Path) -> None:
    (tmp_path / "clerk/1.txt").write_bytes(now := b"You are the clerk.\n")
    with pytest.raises(PromptError, match="restore it from version control") as caught:
        shelf.read()
    assert digest(now) in str(caught.value) and digest(b"You are the clerk.\r\n") in str(caught.value)
    assert shelf.problems() == [str(caught.value)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_bytes(b"You are a clerk.")
    return tmp_path / "source"


def test_a_version_never_changes(shelf: PromptDirectory, tmp_path: Path, source: Path) -> None:
    """Other bytes need another version; adding the same bytes again changes nothing, and repairs a changed file."""
    before = (tmp_path / LOCK).read_bytes()
    with pytest.raises(PromptError, match="take a new version"):
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
